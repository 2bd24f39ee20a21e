"""The adapter to vLLM, and the only module that imports it: one cell, in a process of its own.

    python -m specq.engines.vllm.engine REQUEST.json RESULT.json      imports vLLM, then waits for a line on standard input,
                                                                      and is ended where that ends before the cell does

Written against vLLM 0.24 and 0.32: LLM(...), LLMEngine.add_request / step / has_unfinished_requests, LLM.get_metrics()
(Counter.value, Vector.values), SamplingParams with RequestOutputKind.DELTA. The engine is stepped by hand so that tokens
arrive step by step, which neither generate() nor 0.24's request metrics tell.
"""

import os
import signal
import sys
import threading
import time
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specq.engines.metrics.text import COUNTERS, PER_POSITION, PREFIX
from specq.engines.vllm.protocol import CellRequest, CellResult, Counts, Pass, RequestLog

WARMUP_TOKENS = 16


def run_pass(engine: Any, prompts: list[list[int]], params: Any, tag: str) -> Pass:  # noqa: ANN401 - vLLM's own types
    """Feed all prompts and step the engine until they are done."""
    start = time.perf_counter()
    for i, ids in enumerate(prompts):
        engine.add_request(f"{tag}-{i}", {"prompt_token_ids": ids}, params)
    logs: dict[int, RequestLog] = {}
    ends, rows, firsts = [], [], []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        got = first = 0
        for output in outputs:
            i, completion = int(output.request_id.rsplit("-", 1)[1]), output.outputs[0]
            ids = list(completion.token_ids)
            if ids and i not in logs:
                logs[i] = RequestLog(prompt=i, steps=[], first=now, last=now, finish_reason=None)
                first += 1
            if ids:
                logs[i].steps.append(ids)
                logs[i].last = now
                got += 1
            if completion.finish_reason is not None and i in logs:
                logs[i].finish_reason = completion.finish_reason
        if got:
            ends.append(now)
            rows.append(got)
            firsts.append(first)
    requests = [logs[i] for i in sorted(logs)]
    return Pass(seconds=time.perf_counter() - start, requests=requests, step_ends=ends, rows=rows, firsts=firsts)


def read_counters(llm: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Speculation counters summed over engines, or None where the engine does not speculate."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix(PREFIX)
        if name in COUNTERS:
            field = COUNTERS[name]
            found[field] = found.get(field, 0) + int(metric.value)
        elif name == PER_POSITION:
            so_far = found.get("per_position", [0] * len(metric.values))
            found["per_position"] = [a + int(b) for a, b in zip(so_far, metric.values, strict=True)]
    return found if "drafts" in found else None


def _counts(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Counts | None:
    if after is None:
        return None
    before = before or {"drafts": 0, "drafted": 0, "accepted": 0, "per_position": [0] * len(after["per_position"])}
    per_position = [a - b for a, b in zip(after["per_position"], before["per_position"], strict=True)]
    numbers = {name: after[name] - before[name] for name in COUNTERS.values()}
    return Counts(**numbers, per_position=per_position)


def measure(llm: Any, make_params: Any, request: CellRequest) -> tuple[list[Pass], Counts | None]:  # noqa: ANN401
    """Warm up, then run the passes between two readings of the counters."""
    engine = llm.llm_engine
    if request.warmup:
        few = {**request.sampling, "max_tokens": min(WARMUP_TOKENS, request.sampling["max_tokens"])}
        run_pass(engine, request.prompts[: request.warmup], make_params(few), "warmup")
    before, params = read_counters(llm), make_params(request.sampling)
    passes = [run_pass(engine, request.prompts, params, f"pass{n}") for n in range(request.passes)]
    return passes, _counts(before, read_counters(llm))


def _environment() -> tuple[dict[str, str], str]:
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"vllm": vllm.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}, device


def end_with_caller() -> None:
    """From now on, end this process and its group when standard input does: whoever started it is gone, however that ended.

    Workers and the GPU's memory would outlive it otherwise. File descriptor 0 is read, not sys.stdin, whose lock a thread
    that waits must not hold when Python ends.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)  # started by hand, in a group that is not its own

    threading.Thread(target=wait, daemon=True).start()


def main(request_path: str, result_path: str) -> None:
    """Run the cell of REQUEST.json and write RESULT.json, whole or not at all."""
    request = CellRequest.model_validate_json(Path(request_path).read_text(encoding="utf-8"))
    os.environ.update(request.environment)  # before vLLM reads it
    if request.probe:
        from specq.engines.vllm import probe

        for old in Path(os.environ["SPECQ_PROBE"]).glob("cycles-*.parquet"):
            old.unlink()  # of an attempt that did not finish
        probe.register()  # the plugin's own call comes to nothing then; without an installed specq it never comes
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not sys.stdin.readline():
        sys.exit("SystemExit: whoever started this cell is gone")
    end_with_caller()
    digest = request.digest
    llm = LLM(**deepcopy(request.engine))  # 0.24 writes types of torch into the configuration it is given
    passes, counters = measure(
        llm, lambda sampling: SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA), request
    )
    if request.probe:
        probe.close()
    versions, device = _environment()
    result = CellResult(
        digest=digest,
        versions=versions,
        device=device,
        timing_mode="eager"
        if request.engine.get("enforce_eager")
        else "compiled, CUDA graphs where the device has them",
        passes=passes,
        counters=counters,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    beside = Path(result_path + ".tmp")
    beside.write_text(result.model_dump_json(), encoding="utf-8")
    os.replace(beside, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
