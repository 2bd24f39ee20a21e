"""Closed forms for acceptance that is the same at every depth, and step times of a system: what a format does to speed.

emitted(K) = 1 + alpha + ... + alpha^K, so that S_k = alpha^k. Real survival falls faster or slower than that; a study
measures it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from specq import pairs
from specq.capacity import Load, Server
from specq.cost import CostModel, Operating, cycle_time_draws, cycle_times, speedup
from specq.cost.gpus import parse_gpus
from specq.cost.spec import build, parse_cost
from specq.errors import SpecqError
from specq.kv import get_format
from specq.shape import ModelShape
from specq.stats import Estimate
from specq.tune import draw_choices
from studies.common.steps import Steps, drift

Measure = float | Estimate


def measure(value: float, draws: np.ndarray) -> Measure:
    """A value with the 95 % interval of its draws under resampled repeats [draws]; alone where there are none ([1])."""
    if len(draws) == 1:
        return float(value)
    return Estimate(float(value), float(draws.std(ddof=1)), *map(float, np.quantile(draws, [0.025, 0.975])))


def value_of(found: Measure) -> float:
    """Without its interval."""
    return found.value if isinstance(found, Estimate) else found


def emitted(alpha: float, k_max: int) -> np.ndarray:
    """Emitted per cycle for K = 0..k_max, [k_max + 1]."""
    return np.cumsum(alpha ** np.arange(k_max + 1))


def alpha_of(mu: float, k: int) -> float:
    """The alpha with which K = k accepts mu of k drafts, 0 <= mu <= k. Raises SpecqError beyond."""
    if not 0 <= mu <= k:
        raise SpecqError(f"no pair accepts {mu} of {k} drafted tokens")
    return float(brentq(lambda a: emitted(a, k)[-1] - 1 - mu, 0.0, 1.0))


def best_k(curve: np.ndarray) -> int:
    """The smallest K within 1 % of the best (specq.tune's rule, without noise)."""
    return int(draw_choices(curve[None])[0])


@dataclass(frozen=True)
class System:
    """A registered pair and where its step times come from."""

    pair: str
    target: ModelShape
    draft: ModelShape
    cost: CostModel
    server: Server | None
    k_timed: int | None = None  # the largest K that was timed; None where a closed form knows every K
    steps_told: str = ""  # what its timed steps are, in words
    drift: float = 0.0  # by which timed steps that were not timed together are off (studies.common.steps)

    @classmethod
    def of(cls, entry: Mapping[str, str], folder: Path) -> "System":
        """From {pair, cost} or {pair, steps, gpus}: a `--cost`, or measured steps (studies.common.steps).

        Files of either (`roofline:GPU@FILE`, `FILE`) lie relative to `folder`.
        """
        pair = pairs.find(entry["pair"], None, None)
        shapes = [ModelShape.of_registered(side.shape) for side in (pair.target, pair.draft)]
        if "steps" in entry:
            count, gpu = parse_gpus(entry["gpus"])
            steps = Steps.read(
                folder / entry["steps"], entry["gpus"], dict(zip(("target", "draft"), shapes, strict=True))
            )
            k_timed = max(r.new_tokens for r in steps.file.records if r.kind == "target") - 1
            return cls(
                pair.name,
                *shapes,
                steps.cost,
                Server(gpu.name, count, gpu.memory),
                k_timed,
                steps.told,
                drift(steps.file.records),
            )
        roofline, at, timings = entry["cost"].rpartition("@")
        spec = parse_cost(
            entry["cost"] if entry["cost"].startswith("roofline:") and not at else f"{roofline}{at}{folder / timings}"
        )
        return cls(pair.name, *shapes, build(spec, *shapes), spec.server)

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.pair}, {self.cost.source}"

    def knows(self, batch: int, context: int, formats: Iterable[str], k: int) -> bool:
        """Whether its cost has the point for K = 0..k in every format; measured steps end at what was timed."""
        if self.k_timed is not None and k > self.k_timed:
            return False
        try:
            for fmt in formats:
                self.times(batch, context, fmt, k)
        except SpecqError:
            return False
        return True

    def fits(self, batch: int, context: int, fmt: str) -> bool:
        """Whether the server holds the batch beside the weights; a cost that names no server holds everything."""
        return self.server is None or self.sequences(context, fmt) >= batch

    def sequences(self, context: int, fmt: str) -> int:
        """How many sequences the server holds."""
        return Load(self.target, self.draft).sequences(get_format(fmt), context, self.server)

    def times(self, batch: int, context: int, fmt: str, k_max: int) -> np.ndarray:
        """Seconds of a cycle for K = 0..k_max with the target's cache in `fmt` and the draft's in BF16."""
        return cycle_times(self.cost, Operating(batch, context, fmt, "bf16"), k_max)

    def speedup(self, alpha: float, batch: int, context: int, fmt: str, k_max: int) -> np.ndarray:
        """Over plain decoding at the same format, for K = 0..k_max."""
        return speedup(emitted(alpha, k_max), self.times(batch, context, fmt, k_max))

    def gains(self, batch: int, context: int, fmt: str, k: int) -> list[Measure]:
        """Speed over BF16's less 1 of plain decoding and of K = k at equal acceptance."""
        at = Operating(batch, context, "bf16", "bf16"), Operating(batch, context, fmt, "bf16")
        base, mine = (cycle_times(self.cost, x, k) for x in at)
        base_draws, mine_draws = (cycle_time_draws(self.cost, x, k) for x in at)
        return [measure(base[n] / mine[n] - 1, base_draws[:, n] / mine_draws[:, n] - 1) for n in (0, k)]

    def break_even(self, batch: int, context: int, fmt: str, k: int) -> float:
        """The mu at which K = k is as fast as plain decoding at the same format: cycle time / plain step - 1."""
        times = self.times(batch, context, fmt, k)
        return float(times[k] / times[0] - 1)

    def break_even_draws(self, batch: int, context: int, fmt: str, k: int) -> np.ndarray:
        """The same under resampled repeats, [draws]; [1] where the times have none."""
        times = cycle_time_draws(self.cost, Operating(batch, context, fmt, "bf16"), k)
        return times[:, k] / times[:, 0] - 1
