"""Step times and throughput of measured cells, the K truly best, and timings that `--cost` reads.

A steady step is one in which all slots of the batch got tokens and nobody prefilled, neither in it nor just before: one
cycle of the whole batch. Its median is the cycle time; throughput counts everything, prefill and ragged ends included.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from specq.cost.table import Timing
from specq.engines.vllm.protocol import CellResult, Pass

FEW_STEPS = 20  # below so many steady steps a cycle time is not worth a number


def steady_steps(done: Pass, batch: int) -> np.ndarray:
    """Seconds of the steady steps of one pass (see above)."""
    ends, rows, firsts = (np.array(x) for x in (done.step_ends, done.rows, done.firsts))
    full = min(batch, len(done.requests))
    quiet = (rows == full) & (firsts == 0)
    return np.diff(ends)[quiet[1:] & (firsts[:-1] == 0) & (rows[:-1] == full)]


def cycle_seconds(result: CellResult, batch: int) -> list[float] | None:
    """Median seconds of a steady step for every pass; None where some pass has too few."""
    steps = [steady_steps(p, batch) for p in result.passes]
    return [float(np.median(s)) for s in steps] if min(map(len, steps)) >= FEW_STEPS else None


def speed(result: CellResult, batch: int) -> dict:
    """The JSON block of one cell's speed, repeats apart."""
    tokens = [sum(len(r.tokens) for r in p.requests) for p in result.passes]
    throughput = [n / p.seconds for n, p in zip(tokens, result.passes, strict=True)]
    waits = [r.last - r.first for r in result.requests]
    further = [len(r.tokens) - len(r.steps[0]) for r in result.requests]
    latencies = [1000 * w / n for w, n in zip(waits, further, strict=True) if n]
    return {
        "tokens_per_second": float(np.mean(throughput)),
        "tokens_per_second_repeats": throughput,
        "tokens_per_second_spread": spread(throughput),
        "ms_per_output_token": 1000 * sum(waits) / sum(further) if sum(further) else None,
        "ms_per_output_token_p50_p99": np.quantile(latencies, [0.5, 0.99]).tolist() if latencies else None,
        "cycle_seconds_repeats": cycle_seconds(result, batch),
        "steady_steps": sum(len(steady_steps(p, batch)) for p in result.passes),
        "output_tokens": sum(tokens),
    }


def spread(values: Sequence[float]) -> float | None:
    """Relative standard deviation between repeats; None for one."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else None


def regret(throughput: Mapping[int, Sequence[float]], recommended: int | None) -> dict:
    """The K truly best among those measured, and what the recommended one (None where there is none) loses against it.

    throughput: K -> tokens per second of every repeat.
    """
    mean = {k: float(np.mean(v)) for k, v in throughput.items()}
    best = max(mean, key=lambda k: (mean[k], -k))
    spreads = [s for s in map(spread, throughput.values()) if s is not None]
    return {
        "measured_best_k": best,
        "recommended_k": recommended,
        "regret": 1 - mean[recommended] / mean[best] if recommended in mean else None,
        "spread_of_repeats": max(spreads) if spreads else None,
        "tokens_per_second": {str(k): mean[k] for k in sorted(mean)},
    }


def timings(cycles: Mapping[tuple[str, int], Sequence[float]], batch: int, context: int) -> dict | None:
    """A timings file's `records` and `fixed` that give back every measured cycle time exactly.

    cycles: (KV format, K) -> cycle seconds of every repeat; K = 0 is plain decoding. An engine shows whole cycles only, so
    what a draft step takes is a convention here: the smallest rise per K of any format, which leaves verification never
    falling. The sum over a cycle is measured, its split between draft and target is not. None without a K = 0 and another.
    """
    per_format: dict[str, dict[int, float]] = {}
    for (fmt, k), repeats in cycles.items():
        per_format.setdefault(fmt, {})[k] = float(np.median(repeats))
    usable = {f: dict(sorted(t.items())) for f, t in per_format.items() if 0 in t and len(t) > 1}
    if not usable:
        return None
    rises = [(t[b] - t[a]) / (b - a) for t in usable.values() for a, b in zip(list(t), list(t)[1:], strict=False)]
    draft = max(min(rises), 1e-9)
    records = []
    for fmt, times in usable.items():
        records.append(Timing(kind="draft", batch=batch, context=context, new_tokens=1, kv_format=fmt, seconds=draft))
        for k, seconds in times.items():
            rest = [s - k * draft for s in cycles[fmt, k]]
            record = Timing(
                kind="target", batch=batch, context=context, new_tokens=k + 1, kv_format=fmt, seconds=seconds - k * draft,
                repeats=rest if len(rest) > 1 and min(rest) > 0 else None,
            )  # fmt: skip
            records.append(record)
    if not any(r.kv_format == "bf16" and r.kind == "draft" for r in records):  # decisions ask for the draft in BF16
        records.append(records[0].model_copy(update={"kv_format": "bf16"}))
    return {"records": [r.model_dump(exclude_none=True) for r in records], "fixed": 0.0}
