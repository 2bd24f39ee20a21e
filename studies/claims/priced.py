"""What prices a point (a pair, a batch, a context): steps timed on a GPU where they have it, else a roofline."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from studies.common.curves import System

FP8, INT8 = "fp8_e4m3", "int8_per_token_head"
FORMATS = ("bf16", FP8, INT8)
MATTERS = 0.02  # of speed: a margin chosen here


@dataclass(frozen=True)
class Priced:
    """A pair, the batches it is looked at, and its costs: the first that has a point gives it, the last has every point."""

    batches: Sequence[int]
    systems: Sequence[System]

    @classmethod
    def of(cls, entry: Mapping[str, Any], folder: Path) -> "Priced":
        """From {batches, costs}; files of the costs lie relative to `folder`."""
        return cls(entry["batches"], [System.of(cost, folder) for cost in entry["costs"]])

    def at(self, batch: int, context: int, k: int) -> System:
        """The first cost that has the point in every format for K = 0..k."""
        return next(s for s in self.systems if s is self.systems[-1] or s.knows(batch, context, FORMATS, k))

    def curves(self, alphas: Sequence[float], batch: int, context: int, k_max: int) -> tuple[System, list[np.ndarray]]:
        """(cost, BF16's speedup for K = 0.. per alpha), of the first cost that reaches past the fastest K of every alpha."""
        for system in self.systems:
            top = min(k_max, system.k_timed or k_max)
            if not system.knows(batch, context, ["bf16"], top):
                continue
            curves = [system.speedup(a, batch, context, "bf16", top) for a in alphas]
            if all(c.argmax() < top for c in curves):
                return system, curves
        raise ValueError(f"no cost of {self.systems[0].pair} at batch {batch} reaches past its fastest K")


def points(priced: Sequence[Priced], contexts: Sequence[int], k: int) -> Iterator[tuple[System, int, int]]:
    """(cost, batch, context) over all pairs, their batches and the contexts."""
    for pair in priced:
        for batch, context in itertools.product(pair.batches, contexts):
            yield pair.at(batch, context, k), batch, context


def timed(priced: Sequence[Priced]) -> System:
    """The first system whose steps were timed."""
    return next(s for p in priced for s in p.systems if s.k_timed is not None)


def where_from(priced: Sequence[Priced], where: str, shown: bool = False) -> str:
    """The note below a table whose rows take measured steps where they have the point; `shown`: with their intervals."""
    steps = timed(priced)
    interval = "with 95 % intervals of each point's repeats, which do not hold what differs" if shown else "no interval"
    return (
        f"*Steps measured*: {steps.steps_told} ([step times](../llama70b-1b/README.md)), up to K = {steps.k_timed},"
        " interpolated between the numbers of new tokens that were timed, times that fall with more of them evened out (noise),"
        f" {interval}{' between points' if shown else ''}; taken where"
        f" {where}. *Roofline*: a closed form, with assumed efficiencies or, where a file is named, with those fitted to its"
        " step times."
    )


def counts(change: float, system: System) -> bool | None:
    """Whether a change of speed counts: above MATTERS and, by timed steps, above what points not timed together are off by;
    None between the two, where it is undecided."""
    if change <= MATTERS:
        return False
    return True if change > system.drift else None


def margin_told(priced: Sequence[Priced]) -> str:
    """The margins in words."""
    return (
        f"Counted is a change of more than {MATTERS:.0%}, a margin chosen here; by measured steps one of more than"
        f" {timed(priced).drift:.1%}, since points that were not timed together, as two formats' are not, are off by as much"
        " ([step times](../llama70b-1b/README.md), last section). Between the two a case is undecided and not judged. A"
        " roofline does not scatter, but is off by what the same page's section on it shows: its cases are predictions."
    )
