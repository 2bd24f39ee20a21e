"""Step times measured here: real forward steps of this pair, on this machine, in every format of the study.

What a CPU without FP8 units gains from FP8 says nothing about a GPU; the report names the source of every figure.
"""

import platform
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from specq.cost.base import Kind
from specq.cost.table import TableCost, Timing
from specq.kv import get_format
from specq.models.loaded import LoadedModel

REPEATS = 9


def _new_token_grid(k_max: int) -> list[int]:
    return sorted({n for n in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65) if n <= k_max + 1} | {k_max + 1})


@torch.inference_mode()
def measure(
    target: LoadedModel,
    draft: LoadedModel,
    target_formats: Iterable[str],
    draft_formats: Iterable[str],
    batches: Iterable[int],
    contexts: Iterable[int],
    k_max: int,
    round_query: Callable,
    progress: Callable[[float], None] = lambda done: None,
) -> TableCost:
    """Time every (kind, format, batch, context, new tokens) REPEATS times, interleaved.

    The table keeps all repeats, so that decisions know the timing noise. `progress` counts timed steps.
    """
    cases: list[tuple[Kind, str, int]] = [("target", f, n) for f in target_formats for n in _new_token_grid(k_max)]
    cases += [("draft", f, 1) for f in draft_formats]
    models = {"target": target, "draft": draft}
    records, spread, launching = [], [], []
    for batch in batches:
        for context in contexts:
            ready = {}
            for kind, name, _ in cases:
                if (kind, name) not in ready:
                    fmt = get_format(name)
                    cache = models[kind].new_cache(fmt, batch, context + k_max + 1, round_query=round_query(fmt))
                    models[kind].forward(torch.zeros(batch, 1, dtype=torch.long), cache, counts=context)
                    ready[kind, name] = cache
            seconds = {case: [] for case in cases}
            for _ in range(REPEATS + 1):
                for case in cases:
                    kind, name, new = case
                    took, launched = _one_step(models[kind], ready[kind, name], batch, new)
                    seconds[case].append(took)
                    launching.append(launched / took)
                    progress(1)
            for (kind, name, new), times in seconds.items():
                repeats = times[1:]  # the first one warms up
                low, middle, high = np.quantile(repeats, [0.25, 0.5, 0.75])
                spread.append((high - low) / middle)
                at = {"kind": kind, "batch": batch, "context": context, "new_tokens": new, "kv_format": name}
                records.append(Timing(**at, seconds=float(middle), repeats=repeats))
    details = {
        "machine": platform.processor() or platform.machine(),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "median_relative_spread": float(np.median(spread)),
        "launching_share": float(np.median(launching)) if target.device.type == "cuda" else None,
        "note": "real steps of this pair on this machine; a serving GPU differs",
        "records": [r.model_dump() for r in records],
    }
    return TableCost(records, "measured", details)


def _one_step(model: LoadedModel, cache: object, batch: int, new: int) -> tuple[float, float]:
    """Seconds of a step, and of them those until its last kernel was launched."""
    before = cache.lengths
    tokens = torch.zeros(batch, new, dtype=torch.long)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    model.forward(tokens, cache)
    launched = time.perf_counter() - began
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    cache.rollback(before)
    return elapsed, launched


def steps_to_time(target_formats: int, draft_formats: int, batches: int, contexts: int, k_max: int) -> int:
    """How many steps `measure` will run, for a progress bar."""
    return (target_formats * len(_new_token_grid(k_max)) + draft_formats) * (REPEATS + 1) * batches * contexts
