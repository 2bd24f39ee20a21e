"""What counts of cycles say about acceptance, and how surely.

Pooled counters alone carry only the binomial spread of cycles taken as independent, which is too narrow: cycles of one
text resemble each other. Where counts come in stretches (scrapes, requests), their scatter gives the honest interval,
and the ratio of the two variances is reported as overdispersion. A stretch is a request, a log line, a benchmark run, one
engine between two scrapes, or one engine since its start where there is one scrape only. Fewer than three give no interval.

Stretches that happen to agree show no scatter, so no interval is narrower than the sampling error of the pooled counts, and
none has a width of zero.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specq import stats
from specq.counters import CycleCounts
from specq.engines.metrics.difference import Reading
from specq.tune import MAX_LOSS

MIN_CLUSTERS = 3
TOO_NARROW = (
    "the interval under independent cycles is too narrow, since cycles of one text resemble each other; scrape more often"
    " (at least 4 scrapes of one engine) or give per-request histograms for one that can be trusted"
)
NO_POSITIONS = "per-position counters are missing: no rates by position, and no other K can be judged"
WORST_CASE = (
    "what single cycles accepted is not known, so the interval of mu is no narrower than if each had accepted all its drafts"
    " or none"
)
SHORT_CYCLES = (
    "not every cycle drafted the full number of tokens: marginal rates are a lower bound of those of full cycles"
)
SEVERAL_K = (
    "cycles of K = {} are pooled here: S_k is of those that drafted so deep, mu is of all of them and of no single K"
)


def k_measured(counts: CycleCounts) -> int:
    """The largest number of drafts in a cycle that the counts know of; a choice of K never goes beyond it."""
    if counts.per_position:
        return len(counts.per_position)
    return -(-counts.drafted // counts.drafts) if counts.drafts else 0


def independent_se(counts: CycleCounts) -> float | None:
    """Standard error of mu were cycles independent: from the histogram of accepted per cycle; None without positions.

    Var(n) = sum_k (2k - 1) S_k - mu^2, since E n^2 = sum_k (2k - 1) P(n >= k).
    """
    if not counts.per_position or counts.drafts < 2:
        return None
    s = np.array(counts.marginal)
    variance = float(((2 * np.arange(1, len(s) + 1) - 1) * s).sum() - counts.mean_accepted**2)
    return float(np.sqrt(max(variance, 0.0) / counts.drafts))


class Floor(NamedTuple):
    """The narrowest interval that counts allow, were cycles independent: standard error and ends."""

    se: float
    lo: float
    hi: float


def wilson(successes: float, trials: int) -> Floor:
    """Wilson's interval (1927) of a share, and its half width over NORMAL as standard error: never 0, not even at 0 and 1."""
    p, z2 = successes / trials, stats.NORMAL**2 / trials
    half = float(stats.NORMAL * np.sqrt(p * (1 - p) / trials + z2 / (4 * trials))) / (1 + z2)
    centre = (p + z2 / 2) / (1 + z2)
    return Floor(half / stats.NORMAL, centre - half, centre + half)


def binomial_floor(successes: float, trials: int) -> Floor:
    """The wider of the plain standard error's interval, below which a share's sampling error is not, and Wilson's."""
    p, found = successes / trials, wilson(successes, trials)
    se = float(np.sqrt(p * (1 - p) / trials))
    return Floor(max(se, found.se), min(p - stats.NORMAL * se, found.lo), max(p + stats.NORMAL * se, found.hi))


def mean_floor(counts: CycleCounts) -> Floor:
    """The narrowest interval of mu: from the histogram of accepted per cycle, else from the largest variance there can be.

    Without positions, and where all cycles were alike, the variance of a cycle is taken as mu (K - mu), the largest of any
    numbers within 0..K of that mean (Bhatia & Davis 2000): every cycle accepts all K drafts or none, a binomial share mu / K
    of them all. K is `k_measured`: of cycles of unequal depth without positions, their mean rounded up.
    """
    mu = counts.mean_accepted
    if se := independent_se(counts):
        return Floor(se, mu - stats.NORMAL * se, mu + stats.NORMAL * se)
    k = k_measured(counts)
    return Floor(*(k * x for x in binomial_floor(counts.accepted / k, counts.drafts)))


def _ratio(clusters: Sequence[CycleCounts], numerators: Sequence[int]) -> stats.Estimate | None:
    """sum of numerators / sum of drafts with the interval from the clusters' scatter; None with too few of them."""
    if len(clusters) < MIN_CLUSTERS:
        return None
    sums = stats.Sums(np.array(numerators, float), np.array([[c.drafts] for c in clusters], float))
    return stats.Resampler(len(clusters)).emitted(sums, 1)


def _block(value: float, estimate: stats.Estimate | None, floor: Floor, limits: tuple[float, float]) -> dict:
    """Value with the wider of the clustered interval and its floor, cut at what the value can be."""
    if estimate is None:
        return {"value": value, "se": None, "ci95": [None, None]}
    lo, hi = min(estimate.lo, floor.lo), max(estimate.hi, floor.hi)
    return {
        "value": value,
        "se": max(estimate.se, floor.se),
        "ci95": [max(limits[0], lo), min(limits[1], hi)],
    }


def summarise(reading: Reading) -> dict[str, Any]:
    """The JSON block of one reading: accepted and emitted per cycle, rates by position, and what is known of their error."""
    counts, clusters = reading.total, reading.clusters
    notes = list(reading.notes)
    common = {"source": reading.source, "unit": reading.unit, "clusters": len(clusters), "counts_exact": reading.exact}
    common |= {"drafts": counts.drafts, "drafted": counts.drafted, "accepted": counts.accepted}
    if not counts.drafts:
        return common | {"notes": [*notes, "no cycle drafted anything in this time: there is no acceptance to report"]}
    k, se = k_measured(counts), independent_se(counts)
    mu = _ratio(clusters, [c.accepted for c in clusters])
    if mu is None:
        notes.append(TOO_NARROW)
    if counts.per_position is None:
        notes += [NO_POSITIONS] if mu is None else [NO_POSITIONS, WORST_CASE]
    depths = sorted({len(c.per_position or ()) for c in clusters if c.drafts})
    if counts.per_position and counts.drafted < sum(c.drafts * len(c.per_position or ()) for c in clusters):
        notes.append(SHORT_CYCLES)
    if counts.per_position and len(depths) > 1:
        notes.append(SEVERAL_K.format(", ".join(map(str, depths))))
    survival, conditional = [], []
    for i in range(len(counts.per_position or ())):
        deep = [c for c in clusters if len(c.per_position or ()) > i]
        parts, drafts = [c.per_position[i] for c in deep], sum(c.drafts for c in deep)
        before = sum(c.per_position[i - 1] if i else c.drafts for c in deep)
        s = sum(parts) / drafts
        survival.append(_block(s, _ratio(deep, parts), binomial_floor(sum(parts), drafts), (0.0, 1.0)))
        conditional.append(sum(parts) / before if before else None)
    value = counts.mean_accepted
    block = _block(value, mu, mean_floor(counts), (0.0, float(k)))
    emitted = {**block, "value": value + 1, "ci95": [None if x is None else x + 1 for x in block["ci95"]]}
    narrow = None if se is None else {"se": se, "ci95": [value - stats.NORMAL * se, value + stats.NORMAL * se]}
    return common | {
        "num_speculative_tokens_measured": k,
        "acceptance_rate": counts.acceptance_rate,
        "mu_accepted": block,
        "mean_emitted": emitted,
        "marginal_survival": survival,
        "conditional_survival": conditional,
        "mu_if_cycles_were_independent": narrow,
        "overdispersion": (mu.se / se) ** 2 if mu is not None and se else None,
        "notes": notes,
    }


def shift(one: dict, other: dict) -> dict | None:
    """mu of `other` minus mu of `one`, two separate readings: standard errors add in quadrature. None without errors."""
    a, b = one.get("mu_accepted"), other.get("mu_accepted")
    if a is None or b is None:
        return None
    value = b["value"] - a["value"]
    if a["se"] is None or b["se"] is None:
        return {"value": value, "se": None, "ci95": [None, None], "significant": None}
    se = float(np.hypot(a["se"], b["se"]))
    freedom = max(1, min(one["clusters"], other["clusters"]) - 1)
    half = float(stats.stdtrit(freedom, (1 + stats.LEVEL) / 2)) * se
    return {"value": value, "se": se, "ci95": [value - half, value + half], "significant": abs(value) > half}


def choose_k(survival: Sequence[float], draft_cost: float) -> dict:
    """K that measured S_k supports when a draft step costs `draft_cost` plain target steps: never beyond the measured K.

    speedup(K) = (1 + sum_{k <= K} S_k) / (1 + draft_cost K), verification taken as one plain step (Leviathan et al. 2023,
    theorem 3.8); the smallest K within 1 % of the best. S_k is taken to be the same at smaller K.
    """
    emitted = 1 + np.concatenate([[0.0], np.cumsum(survival)])
    speed = emitted / (1 + draft_cost * np.arange(len(emitted)))
    return {
        "draft_cost": draft_cost,
        "num_speculative_tokens": int((speed >= (1 - MAX_LOSS) * speed.max()).argmax()),
        "largest_measured": len(survival),
        "speedup": {str(k): float(s) for k, s in enumerate(speed)},
    }
