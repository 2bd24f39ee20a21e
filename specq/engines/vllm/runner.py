"""Run cells, each in a process of its own, one after another or each on GPUs of its own, and keep what is done.

A process imports vLLM, which takes longer than many a cell, and then waits for a line on its standard input before it touches
a GPU: so that the next cell can get ready while another is timed, and no two ever share a GPU.

Per cell `<name>.request.json`, `<name>.log` and, when it worked, `<name>.result.json`. A result is used again when its
request has not changed, so an interrupted sweep goes on where it stopped; a failed cell is tried again by the next call.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from specq.engines.vllm.protocol import CellRequest, CellResult, read_result
from specq.errors import SpecqError

ENGINE = (sys.executable, "-m", "specq.engines.vllm.engine")
_running: set[subprocess.Popen] = set()
GRACE = 10.0  # seconds between asking a process to end and ending it
LINGER = 2.0  # seconds for what was ended to be gone
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(  # of vLLM's log: (process pid=1) LEVEL date time [file:line]
    r"(?:\((\w[^()]*\bpid=[^()]*)\) ?)?(?:(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?(.*)"
)
EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit):")
MEMORY = re.compile(r"gpu.memory.utilization", re.IGNORECASE)
LONGEST = 500  # characters of an engine's last words
BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend")


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: `status` is ok, failed, timeout or pending (not started); `error` says why in a line."""

    status: str
    result: CellResult | None = None
    error: str | None = None
    seconds: float | None = None
    backends: tuple[str, ...] = ()


FAILURES = ("failed", "timeout")  # what an engine that was started came to, if not ok
ALONE = nullcontext()  # no other cell waits for these GPUs
PENDING = Outcome("pending", error="not started: the time of --stop-after was over")


def log_of(folder: Path, name: str) -> Path:
    """Where the engine's output of a cell is."""
    return folder / f"{name}.log"


def finished(folder: Path, request: CellRequest) -> CellResult | None:
    """The kept result of this very request, or None; one that a killed machine left damaged is none."""
    try:
        result = read_result((folder / f"{request.name}.result.json").read_text(encoding="utf-8"), request)
    except (FileNotFoundError, UnicodeDecodeError, SpecqError):
        return None
    return result if result.digest == request.digest else None


def run_cell(
    folder: Path,
    request: CellRequest,
    limit: float,
    command: Sequence[str] = ENGINE,
    *,
    gpus: str | None = None,
    turn: AbstractContextManager = ALONE,
    late: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run one cell, or take its kept result. Never raises for what the engine does.

    limit: seconds from its turn on until its whole process group is ended. gpus: what its CUDA_VISIBLE_DEVICES is, if not
    this process's. turn: held while the cell has its GPUs. late: whether it shall not be run any more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, out = log_of(folder, request.name), folder / f"{request.name}.result.json"
    kept = finished(folder, request)
    if kept is not None:
        return Outcome("ok", kept, backends=_backends(log))
    if late():
        return PENDING
    asked = folder / f"{request.name}.request.json"
    asked.write_text(request.model_dump_json(indent=1), encoding="utf-8")
    out.unlink(missing_ok=True)
    with _started([*command, str(asked), str(out)], log, gpus) as process, turn:
        if late():
            return PENDING
        began = time.monotonic()
        code = _go(process, limit)
        took = time.monotonic() - began
    if code is None:
        return Outcome("timeout", error=f"not done after {limit:.0f} s", seconds=took)
    if code or not out.is_file():
        return Outcome("failed", error=f"{last_words(log)} (exit code {code})", seconds=took)
    try:
        return Outcome("ok", read_result(out.read_text(encoding="utf-8"), request), None, took, _backends(log))
    except SpecqError as error:
        return Outcome("failed", error=str(error), seconds=took)


@contextmanager
def _started(command: Sequence[str], log: Path, gpus: str | None) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own, which is ended with the block: on Ctrl-C too, and workers that outlive it."""
    environment = None if gpus is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        _running.add(process)
        try:
            yield process
        finally:
            _end_group(process)
            _running.discard(process)
            with suppress(BrokenPipeError):
                process.stdin.close()


def _go(process: subprocess.Popen, limit: float) -> int | None:
    """Let a process go on; its exit code, or None when it was ended after `limit` seconds.

    Its standard input stays open: when it ends, the process knows that this one is gone (engine.end_with_caller).
    """
    try:
        with suppress(BrokenPipeError):  # gone already
            process.stdin.write(b"go\n")
            process.stdin.flush()
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)  # before the next one's turn: what outlives it would hold the GPU's memory
    return process.returncode


def _end_group(process: subprocess.Popen) -> None:
    """End a process and all of its group, and wait until they are gone: what lingers holds the GPU's memory."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        until = time.monotonic() + LINGER
        while time.monotonic() < until:  # its children are not ours to wait for
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    process.wait()


def last_words(log: Path) -> str:
    """The line of a log that says why a process failed: the last exception's that does not point to another, else the last;
    with specq's name of an option of vLLM's that it speaks of.

    An exception ends a traceback or stands by its name; what vLLM logs below ERROR did not fail. Where the exception says
    only that an assertion failed, the assertion is added.
    """
    lines, errors, asserted, inside = [], [], "", {}
    for raw in log.read_text(encoding="utf-8", errors="replace").split("\n"):
        who, level, line = PREFIX.match(COLOURS.sub("", raw)).groups()
        if line.strip():
            lines.append(line.strip())
        if level not in (None, "ERROR", "CRITICAL") or not line.strip():
            continue
        if line.startswith("Traceback (most recent call last)"):
            inside[who] = True
        elif line.strip().startswith("assert "):
            asserted = line.strip()
        elif not line[0].isspace() and (inside.pop(who, False) or EXCEPTION.match(line)):
            errors.append(line.strip())
    causes = [x for x in errors if "root cause" not in x]
    said = (causes or errors or lines or ["it said nothing"])[-1]
    if re.search(r"assertion failed|^AssertionError$", said) and asserted:
        said += f": {asserted}"
    hint = " (`specq validate` sets it by --memory-share)" if MEMORY.search(said) else ""
    return (said if len(said) <= LONGEST else said[:LONGEST].rsplit(" ", 1)[0] + " ...") + hint


def _backends(log: Path) -> tuple[str, ...]:
    """The attention backends that the engine's log names, in order: the target's first."""
    if not log.is_file():
        return ()
    return tuple(dict.fromkeys(BACKEND.findall(log.read_text(encoding="utf-8", errors="replace"))))


def lanes(at_once: int, each: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of cells that run at once, `each` GPUs a cell; one cell at a time takes what this process has."""
    if at_once == 1:
        return [None]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(at_once * each)]
    if len(names) < at_once * each:
        raise SpecqError(f"{at_once} cells at once need {at_once * each} GPUs; CUDA_VISIBLE_DEVICES has {len(names)}")
    return [",".join(names[i * each : (i + 1) * each]) for i in range(at_once)]


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP, unless ignored, do what Ctrl-C does, once: further ones do not disturb the ending of processes."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python hands signals to the main thread alone

    def end(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_cells(
    folder: Path,
    requests: Sequence[CellRequest],
    limit: float,
    *,
    stop_after: float | None = None,
    command: Sequence[str] = ENGINE,
    done: Callable[[CellRequest, Outcome], None] = lambda request, outcome: None,
    clock: Callable[[], float] = time.monotonic,
    gpus: Sequence[str | None] = (None,),
    ahead: bool = False,
) -> dict[str, Outcome]:
    """All cells, started in order, as many at once as `gpus` has entries, each on one entry's GPUs.

    After `stop_after` seconds no further cell is started: kept ones are taken, others pending. `done` is called in this
    thread, as cells end. With `ahead` every entry's next process gets ready while its last one is timed.
    """
    start, free, ended = clock(), queue.SimpleQueue(), threading.Event()
    for entry in [(names, threading.Lock()) for names in gpus] * (1 + ahead):
        free.put(entry)

    def run(request: CellRequest) -> Outcome:
        mine = free.get()
        try:
            return run_cell(
                folder, request, limit, command, gpus=mine[0], turn=mine[1],
                late=lambda: ended.is_set() or (stop_after is not None and clock() - start >= stop_after),
            )  # fmt: skip
        finally:
            free.put(mine)

    outcomes: dict[str, Outcome] = {}
    with _ended_in_order(), ThreadPoolExecutor(free.qsize()) as pool:
        try:
            futures = {pool.submit(run, request): request for request in requests}
            for future in as_completed(futures):
                outcomes[futures[future].name] = future.result()
                done(futures[future], outcomes[futures[future].name])
        except BaseException:  # Ctrl-C: the threads only wait for their processes
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _end_group(process)
            raise
    return {request.name: outcomes[request.name] for request in requests}
