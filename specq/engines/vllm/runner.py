"""Run cells one after another, each in a process of its own, and keep what is done.

Per cell `<name>.request.json`, `<name>.log` and, when it worked, `<name>.result.json`. A result is used again when its
request has not changed, so an interrupted sweep goes on where it stopped; a failed cell is tried again by the next call.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specq.engines.vllm.protocol import CellRequest, CellResult, read_result
from specq.errors import SpecqError

ENGINE = (sys.executable, "-m", "specq.engines.vllm.engine")
GRACE = 10.0  # seconds between asking a process to end and ending it
BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend")


@dataclass
class Outcome:
    """What became of a cell: `status` is ok, failed, timeout or pending (not started); `error` says why in a line."""

    status: str
    result: CellResult | None = None
    error: str | None = None
    seconds: float | None = None
    backends: tuple[str, ...] = ()


def finished(folder: Path, request: CellRequest) -> CellResult | None:
    """The kept result of this very request, or None; one that a killed machine left damaged is none."""
    try:
        result = read_result((folder / f"{request.name}.result.json").read_text(encoding="utf-8"), request)
    except (FileNotFoundError, UnicodeDecodeError, SpecqError):
        return None
    return result if result.digest == request.digest else None


def run_cell(folder: Path, request: CellRequest, limit: float, command: Sequence[str] = ENGINE) -> Outcome:
    """Run one cell, or take its kept result. Never raises for what the engine does.

    limit: seconds until its whole process group is ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, out = folder / f"{request.name}.log", folder / f"{request.name}.result.json"
    kept = finished(folder, request)
    if kept is not None:
        return Outcome("ok", kept, backends=_backends(log))
    asked = folder / f"{request.name}.request.json"
    asked.write_text(request.model_dump_json(indent=1), encoding="utf-8")
    out.unlink(missing_ok=True)
    began = time.monotonic()
    code = _run([*command, str(asked), str(out)], log, limit)
    took = time.monotonic() - began
    if code is None:
        return Outcome("timeout", error=f"not done after {limit:.0f} s; see {log.name}", seconds=took)
    if code or not out.is_file():
        return Outcome("failed", error=f"{last_words(log)} (exit code {code}; see {log.name})", seconds=took)
    try:
        return Outcome("ok", read_result(out.read_text(encoding="utf-8"), request), None, took, _backends(log))
    except SpecqError as error:
        return Outcome("failed", error=str(error), seconds=took)


def _run(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Exit code of a command in a process group of its own, or None when it was ended after `limit` seconds."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also on Ctrl-C, and for workers that outlive their parent and would hold the GPU's memory
            _end_group(process)


def _end_group(process: subprocess.Popen) -> None:
    for sign, patience in ((signal.SIGTERM, GRACE if process.poll() is None else 0.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def last_words(log: Path) -> str:
    """The line of a log that says why a process failed: the last exception's, else the last line."""
    lines = [x.strip() for x in log.read_text(encoding="utf-8", errors="replace").split("\n") if x.strip()]
    errors = [x for x in lines if re.match(r"(?:\(.*?\) )?(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*:", x)]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _backends(log: Path) -> tuple[str, ...]:
    """The attention backends that the engine's log names, in order: the target's first."""
    if not log.is_file():
        return ()
    return tuple(dict.fromkeys(BACKEND.findall(log.read_text(encoding="utf-8", errors="replace"))))


def run_cells(
    folder: Path,
    requests: Sequence[CellRequest],
    limit: float,
    *,
    stop_after: float | None = None,
    command: Sequence[str] = ENGINE,
    done: Callable[[CellRequest, Outcome], None] = lambda request, outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Outcome]:
    """All cells in order. After `stop_after` seconds no further cell is started: kept ones are taken, others pending."""
    start, outcomes = clock(), {}
    for request in requests:
        late = stop_after is not None and clock() - start >= stop_after
        if late and finished(folder, request) is None:
            outcome = Outcome("pending", error="not started: the time of --stop-after was over")
        else:
            outcome = run_cell(folder, request, limit, command)
        outcomes[request.name] = outcome
        done(request, outcome)
    return outcomes
