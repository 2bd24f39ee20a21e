"""The best K, per batch and context, with the uncertainty of the very draws that gave mu its interval.

Rule (DESIGN section 6): the smallest K whose paired bootstrap log-ratio to the best includes 0 and whose point loss is
at most 1 %. K = 0 means plain decoding. K beyond what was measured is never recommended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specq.cost import CostModel, Operating, cycle_time_draws, cycle_times, speedup
from specq.stats import LEVEL

MAX_LOSS = 0.01


def quantile_interval(draws: np.ndarray) -> list[float]:
    """Equal-tailed 95 % interval of bootstrap draws."""
    return np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def choose_k(point: np.ndarray, draws: np.ndarray) -> int:
    """The recommended K for a speedup curve.

    point [k_max + 1] from all documents, draws [R, k_max + 1] from the bootstrap; index is K.
    """
    best = int(point.argmax())
    log_ratio = np.log(draws / draws[:, [best]])
    low, high = np.quantile(log_ratio, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    good = (low <= 0) & (high >= 0) & (point >= (1 - MAX_LOSS) * point[best])
    good[best] = True
    return int(good.argmax())


def draw_choices(draws: np.ndarray) -> np.ndarray:
    """The K that each draw alone would choose: the smallest within 1 % of its own best, [R]."""
    return (draws >= (1 - MAX_LOSS) * draws.max(1, keepdims=True)).argmax(1)


@dataclass
class Curve:
    """Speedup over plain decoding at the same format, for K = 0..k_max, at one operating point.

    times, point [k_max + 1]; draws [R, k_max + 1]; plain_draws [R or 1] seconds of a plain decoding step.
    """

    at: Operating
    times: np.ndarray
    point: np.ndarray
    draws: np.ndarray
    plain_draws: np.ndarray

    @property
    def best(self) -> int:
        """The recommended K."""
        return choose_k(self.point, self.draws)

    def interval(self, k: int) -> list[float]:
        """95 % interval of speedup(k)."""
        return quantile_interval(self.draws[:, k])


def speed_curve(emitted: np.ndarray, emitted_draws: np.ndarray, cost: CostModel, at: Operating) -> Curve:
    """Curve from emitted [k_max + 1] and its draws [R, k_max + 1] under a cost model, timing noise included."""
    times, noisy = cycle_times(cost, at, len(emitted) - 1), cycle_time_draws(cost, at, len(emitted) - 1)
    return Curve(at, times, speedup(emitted, times), speedup(emitted_draws, noisy), noisy[:, 0])


@dataclass
class Gain:
    """What choosing K anew is worth: speedup ratio minus 1, with an interval over draws that each choose their own K."""

    value: float
    ci95: list[float]
    recommended_ci95: list[float]
    choice_shares: dict[int, float]


def retuning(curve: Curve, current: int, recommended: int) -> Gain:
    """Gain of `recommended` over `current`, with an interval that includes the choice of K.

    Every draw chooses its own K and is judged on another draw: choosing and judging on the same noise would find a gain
    where all K are alike. Draws of NaN (one document) give intervals of NaN and no shares.
    """
    value = float(curve.point[recommended] / curve.point[current] - 1)
    if np.isnan(curve.draws).any():
        return Gain(value, [np.nan] * 2, [np.nan] * 2, {})
    ks = draw_choices(curve.draws)
    judged = np.roll(curve.draws, 1, axis=0)
    chosen = np.take_along_axis(judged, ks[:, None], 1)[:, 0]
    ratio = chosen / judged[:, current]
    low, high = (x - 1 for x in quantile_interval(ratio))
    shares = {int(k): float((ks == k).mean()) for k in np.unique(ks)}
    # a point outside its draws' interval would be an artefact of choosing per draw: widen, never shift
    return Gain(value, [min(low, value), max(high, value)], quantile_interval(chosen), shares)


def schedule(best_by_batch: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Batch-size schedule in vLLM's form: inclusive, gapless ranges [from, to, K] starting at 1.

    `best_by_batch` holds (batch, K) for the batch sizes asked for; each K serves from the last smaller batch + 1 on, and
    neighbours with the same K are merged. vLLM carries the last K on beyond the last range.
    """
    ranges: list[list[int]] = []
    for batch, k in sorted(best_by_batch):
        start = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = batch
        else:
            ranges.append([start, batch, k])
    return ranges
