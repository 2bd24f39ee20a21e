"""The best K, per batch and context, with the uncertainty of the very draws that gave mu its interval.

Rule (docs/method.md, "From acceptance to K"): the smallest K whose paired bootstrap log-ratio to the best includes 0 and
whose point loss is at most 1 %. K = 0 means plain decoding. K beyond what was measured is never recommended.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtr  # Student's distribution

from specq.cost import CostModel, Operating, cycle_time_draws, cycle_times, speedup
from specq.stats import LEVEL, NORMAL, POWER

MAX_LOSS = 0.01
MOST = 10**9  # prompts; what these do not decide, no number does


def quantile_interval(draws: np.ndarray) -> list[float]:
    """Equal-tailed 95 % interval of bootstrap draws."""
    return np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()


def choose_k(point: np.ndarray, draws: np.ndarray, allowed: np.ndarray | None = None) -> int:
    """The recommended K for a speedup curve.

    point [k_max + 1] from all documents, draws [R, k_max + 1] from the bootstrap; index is K. `allowed` [k_max + 1] rules
    K out, by a latency limit for instance; where it allows none, the best of all K stands.
    """
    allowed = np.ones(len(point), bool) if allowed is None or not allowed.any() else allowed
    best = int(np.where(allowed, point, -np.inf).argmax())
    log_ratio = np.log(draws / draws[:, [best]])
    low, high = np.quantile(log_ratio, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    good = allowed & (low <= 0) & (high >= 0) & (point >= (1 - MAX_LOSS) * point[best])
    good[best] = True
    return int(good.argmax())


def draw_choices(draws: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
    """The K that each draw alone would choose among those allowed: the smallest within 1 % of its own best, [R]."""
    if allowed is not None and allowed.any():
        draws = np.where(allowed, draws, 0.0)
    return (draws >= (1 - MAX_LOSS) * draws.max(1, keepdims=True)).argmax(1)


@dataclass
class Curve:
    """Speedup over plain decoding at the same format, for K = 0..k_max, at one operating point.

    times, point [k_max + 1]; draws [R, k_max + 1]; plain_draws [R or 1] seconds of a plain decoding step. `limit` is the
    longest mean time per token in seconds that a choice of K may have, where the user set one.
    """

    at: Operating
    times: np.ndarray
    point: np.ndarray
    draws: np.ndarray
    plain_draws: np.ndarray
    limit: float | None = None

    @property
    def per_token(self) -> np.ndarray:
        """Mean seconds per token of one sequence, [k_max + 1]."""
        return self.times[0] / self.point

    @property
    def meets_limit(self) -> np.ndarray:
        """Which K keep the mean time per token within the limit, [k_max + 1]."""
        return self.per_token <= (np.inf if self.limit is None else self.limit)

    @cached_property
    def best(self) -> int:
        """The recommended K."""
        return choose_k(self.point, self.draws, self.meets_limit)

    @property
    def tokens_per_second(self) -> np.ndarray:
        """Tokens per second of the whole batch, [k_max + 1]."""
        return self.at.batch / self.per_token

    @property
    def tokens_per_second_draws(self) -> np.ndarray:
        """The same in every draw, [R, k_max + 1]."""
        return self.at.batch * self.draws / self.plain_draws[:, None]

    def interval(self, k: int) -> list[float]:
        """95 % interval of speedup(k)."""
        return quantile_interval(self.draws[:, k])


def speed_curve(
    emitted: np.ndarray, emitted_draws: np.ndarray, cost: CostModel, at: Operating, limit: float | None = None
) -> Curve:
    """Curve from emitted [k_max + 1] and its draws [R, k_max + 1] under a cost model, timing noise included."""
    times, noisy = cycle_times(cost, at, len(emitted) - 1), cycle_time_draws(cost, at, len(emitted) - 1)
    return Curve(at, times, speedup(emitted, times), speedup(emitted_draws, noisy), noisy[:, 0], limit)


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
    ks = draw_choices(curve.draws, curve.meets_limit)
    judged = np.roll(curve.draws, 1, axis=0)
    chosen = np.take_along_axis(judged, ks[:, None], 1)[:, 0]
    shares = {int(k): float((ks == k).mean()) for k in np.unique(ks)}
    return Gain(value, _around(value, chosen / judged[:, current] - 1), quantile_interval(chosen), shares)


@dataclass
class Loss:
    """Share of the speed that is lost by keeping K at `k`, and its 95 % interval."""

    k: int
    value: float
    ci95: list[float]


def kept_k_loss(curve: Curve, base: Curve, recommended: int, kept: int) -> Loss:
    """Speed lost by keeping the baseline's best K after the format changed: 1 - speedup(kept) / speedup(recommended).

    Every draw chooses both K anew, the baseline's from the baseline's curve, and is judged on another draw.
    """
    value = float(1 - curve.point[kept] / curve.point[recommended])
    if np.isnan(curve.draws).any() or np.isnan(base.draws).any():
        return Loss(kept, value, [np.nan] * 2)
    judged = np.roll(curve.draws, 1, axis=0)
    old, new = (
        np.take_along_axis(judged, draw_choices(c.draws, c.meets_limit)[:, None], 1)[:, 0] for c in (base, curve)
    )
    return Loss(kept, value, _around(value, 1 - old / new))


def _around(value: float, draws: np.ndarray) -> list[float]:
    """Interval of draws, widened to hold the point: outside it would be an artefact of choosing per draw."""
    low, high = quantile_interval(draws)
    return [min(low, value), max(high, value)]


def tokens_ratio(mine: Curve, base: Curve, k: int, base_k: int) -> tuple[float, np.ndarray]:
    """Tokens per second of `mine` at k over `base` at base_k, and its draws."""
    value = float(mine.tokens_per_second[k] / base.tokens_per_second[base_k])
    return value, mine.tokens_per_second_draws[:, k] / base.tokens_per_second_draws[:, base_k]


def pays(value: float, interval: list[float]) -> str:
    """Whether tokens per second over BF16 of `value` pay, yes, no or open.

    Yes: faster for sure, or surely not slower by more than what the choice of K may cost. No: slower for sure.
    """
    if interval[0] > 1 or (interval[0] >= 1 - MAX_LOSS and value >= 1 - MAX_LOSS / 2):
        return "yes"
    return "no" if interval[1] < 1 else "open"


def more_prompts(documents: int, pay: float, interval: list[float], timing: float) -> int | None:
    """How many more prompts would decide in four studies of five like this one; None where no number would.

    `pay` and its `interval` come from `documents` prompts; `timing` is the half-width that the timings' noise alone gives.
    Where the truth lies is what such a study does not know, so `pay` does not stand for it: with `pay` as the truth and 2.8
    standard errors to the nearest border, 67 to 96 % of later studies would decide, by where it fell. This is the number
    whose predictive power is POWER (Spiegelhalter, Abrams & Myles 2004, section 6.5; assurance in O'Hagan et al. 2005): the
    truth is Student's t around `pay`; a later study scatters around the truth, with a half-width h of its own, and decides
    where it clears a border of `pays` by h. The prompts' part of h falls as the root of their number, the timings' stays.

    The share is over all that the truth may be, each as likely before the study as any other. A truth beside a border
    takes more than this number and is decided less often, one far from it more often.
    """
    half = (interval[1] - interval[0]) / 2
    if not np.isfinite(half):
        return None
    prompts = (half**2 - timing**2) * documents / (documents - 1)  # a bootstrap's variance is divided by D, not D - 1

    def power(number: int) -> float:
        own = np.sqrt(prompts * documents / number + timing**2)
        spread = np.sqrt(prompts + timing**2 + own**2) / NORMAL
        yes, no = min(1 + own, max(1 - MAX_LOSS + own, 1 - MAX_LOSS / 2)), 1 - own
        open_ = stdtr(documents - 1, (yes - pay) / spread) - stdtr(documents - 1, (no - pay) / spread)
        return 1 - max(0.0, open_)

    if power(MOST) < POWER:
        return None
    numbers = range(documents + 1, MOST + 1)
    return numbers[bisect_left(numbers, POWER, key=power)] - documents


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
