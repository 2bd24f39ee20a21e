"""Step times measured here: real forward steps of this pair, on this machine, in every format of the study.

What a CPU without FP8 units gains from FP8 says nothing about a GPU; the report names the source of every figure.
"""

import platform
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from specq.config import DRAWS
from specq.cost.base import Kind
from specq.cost.table import TableCost, Timing
from specq.kv import get_format
from specq.models import LoadedModel

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
    """Time every (kind, format, batch, context, new tokens) REPEATS times, interleaved; the table keeps medians.

    More new tokens never cost less: the medians are made monotone by isotonic regression. The table carries bootstrap
    draws of the medians over repeats, so that decisions know the timing noise. `progress` counts timed steps.
    """
    cases: list[tuple[Kind, str, int]] = [("target", f, n) for f in target_formats for n in _new_token_grid(k_max)]
    cases += [("draft", f, 1) for f in draft_formats]
    models = {"target": target, "draft": draft}
    rng = np.random.default_rng(0)
    records, spread, resampled = [], [], []
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
                    seconds[case].append(_one_step(models[kind], ready[kind, name], batch, new))
                    progress(1)
            for kind, name in ready:
                mine = [c for c in cases if c[:2] == (kind, name)]
                times = np.array([seconds[c][1:] for c in mine])  # [cases, REPEATS]; the first repeat warms up
                low, middle, high = np.quantile(times, [0.25, 0.5, 0.75], axis=1)
                spread += ((high - low) / middle).tolist()
                picks = rng.integers(0, REPEATS, (len(mine), DRAWS, REPEATS))
                medians = np.median(np.take_along_axis(times[:, None, :], picks, axis=2), axis=2)
                resampled.append(np.apply_along_axis(_monotone, 0, medians))
                for case, value in zip(mine, _monotone(middle), strict=True):
                    records.append(
                        Timing(
                            kind=kind, batch=batch, context=context, new_tokens=case[2], kv_format=name, seconds=value
                        )
                    )
    details = {
        "machine": platform.processor() or platform.machine(),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "median_relative_spread": float(np.median(spread)),
        "note": "real steps of this pair on this machine; a serving GPU differs",
        "records": [r.model_dump() for r in records],
    }
    return TableCost(records, "measured", details, draws=np.concatenate(resampled))


def _monotone(seconds: np.ndarray) -> np.ndarray:
    return isotonic_regression(seconds).x


def _one_step(model: LoadedModel, cache: object, batch: int, new: int) -> float:
    before = cache.lengths
    tokens = torch.zeros(batch, new, dtype=torch.long)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    model.forward(tokens, cache)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - began
    cache.rollback(before)
    return elapsed


def steps_to_time(target_formats: int, draft_formats: int, batches: int, contexts: int, k_max: int) -> int:
    """How many steps `measure` will run, for a progress bar."""
    return (target_formats * len(_new_token_grid(k_max)) + draft_formats) * (REPEATS + 1) * batches * contexts
