"""What a cost model is: seconds of one forward step of the draft or the target.

A cycle with K drafted tokens costs K draft steps of one token, one target step over K + 1 positions and a fixed term;
plain decoding costs one target step over one position (docs/method.md, "From acceptance to K").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

Kind = Literal["draft", "target"]


class CostModel(Protocol):
    """Step times in seconds; `source` names where they come from and `details` what a reader needs to judge them."""

    source: str
    details: dict
    fixed: float

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds of one step of `batch` rows with `context` cached tokens each and `new_tokens` new ones per row."""
        ...

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """The same under resampled measurements, one value per bootstrap draw; one value in all where none is noisy."""
        ...

    def caveats(self, points: "Sequence[Operating]", k_max: int) -> list[str]:
        """A sentence for each thing that makes its step times for K = 0..k_max at `points` less than what they seem."""
        ...


class FreeDraft:
    """A cost model whose draft steps take no time, for drafts that run no model (n-gram lookup)."""

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.source, self.fixed = cost, cost.source, cost.fixed
        note = "n-gram lookup runs no model: its time is taken as 0; a cycle it finds nothing for is charged K + 1 positions"
        self.details = cost.details | {"draft": note}

    def step_time(self, kind: Kind, *case: object) -> float:
        """See CostModel."""
        return 0.0 if kind == "draft" else self.cost.step_time(kind, *case)

    def step_time_draws(self, kind: Kind, *case: object) -> np.ndarray:
        """See CostModel."""
        return np.zeros(1) if kind == "draft" else self.cost.step_time_draws(kind, *case)

    def caveats(self, points: "Sequence[Operating]", k_max: int) -> list[str]:
        """Those of the target's step times: no format's draft steps are asked for."""
        return self.cost.caveats([replace(at, draft_format="none") for at in points], k_max)


@dataclass(frozen=True)
class Scaled:
    """Another cost model with the draft's step times multiplied: a what-if."""

    cost: CostModel
    draft: float

    @property
    def source(self) -> str:
        """Where the step times come from."""
        return self.cost.source

    @property
    def details(self) -> dict:
        """The other model's, and the factor."""
        return self.cost.details | {"draft_factor": self.draft}

    @property
    def fixed(self) -> float:
        """Seconds per cycle beside the steps."""
        return self.cost.fixed

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds."""
        return self._factor(kind) * self.cost.step_time(kind, batch, context, new_tokens, kv_format)

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """Seconds per draw."""
        return self._factor(kind) * self.cost.step_time_draws(kind, batch, context, new_tokens, kv_format)

    def caveats(self, points: "Sequence[Operating]", k_max: int) -> list[str]:
        """The other model's."""
        return self.cost.caveats(points, k_max)

    def _factor(self, kind: Kind) -> float:
        return self.draft if kind == "draft" else 1.0


@dataclass(frozen=True)
class Operating:
    """Where the speed is asked for: rows in the batch, cached tokens per row, KV formats of target and draft."""

    batch: int
    context: int
    target_format: str
    draft_format: str


def _cycle(cost: CostModel, at: Operating, k_max: int, step: Callable[..., np.ndarray | float]) -> np.ndarray:
    draft = step("draft", at.batch, at.context, 1, at.draft_format)
    times = [step("target", at.batch, at.context, k + 1, at.target_format) for k in range(k_max + 1)]
    return np.stack([t + (k * draft + cost.fixed if k else 0.0) for k, t in enumerate(times)], axis=-1)


def cycle_times(cost: CostModel, at: Operating, k_max: int) -> np.ndarray:
    """Seconds of a cycle for K = 0..k_max, [k_max + 1]; entry 0 is a plain decoding step."""
    return _cycle(cost, at, k_max, lambda *case: np.asarray(cost.step_time(*case)))


def cycle_time_draws(cost: CostModel, at: Operating, k_max: int) -> np.ndarray:
    """Cycle times under resampled measurements, [draws, k_max + 1] ([1, k_max + 1] for a cost without noise)."""
    return _cycle(cost, at, k_max, cost.step_time_draws)


def speedup(emitted: np.ndarray, times: np.ndarray) -> np.ndarray:
    """speedup(K) = emitted(K) T_AR / cycle time(K) over plain decoding at the same format.

    emitted [..., k_max + 1] with emitted(0) = 1, times [..., k_max + 1] from `cycle_times` -> [..., k_max + 1].
    """
    return emitted * times[..., :1] / times
