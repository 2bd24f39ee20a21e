"""How text is sampled and how drafts are accepted, and what logged positions say under a rule. No torch here.

`Transform` and `Rule` are what a study fixes; `acceptance_terms` turns logged columns into the estimator's a and b, so
that a finished study can be decided again in a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Below this temperature a serving engine samples greedily (vLLM's _SAMPLING_EPS), and so does specq.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Transform:
    """Sampling parameters: temperature (0 = greedy), top_k (0 = off), top_p (1 = off); applied in that order."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether this is argmax decoding."""
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        """Whether top_k or top_p cut the support."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0)

    def without_truncation(self) -> "Transform":
        """Temperature alone: what vLLM applies to a draft."""
        return Transform(self.temperature)


DraftSampling = Literal["probabilistic", "greedy"]
Verify = Literal["standard", "strict"]


@dataclass(frozen=True)
class Rule:
    """How a draft token is proposed and accepted."""

    draft_sampling: DraftSampling = "probabilistic"
    verify: Verify = "standard"

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"{self.draft_sampling} draft, {self.verify} verification"


def acceptance_terms(scores: Mapping[str, np.ndarray], tokens: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) of every position under `rule` in float64, from logged columns [N] (arrays, or tensors on the CPU).

    b has limit values where a token lies outside a support: 1 where p(x) = 0 < q(x), and 0 where both are 0.
    """
    column = lambda name: np.asarray(scores[name], dtype=float)  # noqa: E731
    if rule.draft_sampling == "greedy":
        return column("alpha_greedy"), (np.asarray(tokens) == np.asarray(scores["draft_top1"])).astype(float)
    logq = column("logq")
    if rule.verify == "strict":
        return column("alpha_strict"), np.exp(logq)
    with np.errstate(invalid="ignore"):  # -inf - -inf where both are 0
        ratio = np.exp(np.minimum(logq - column("logp"), 0.0))
    return column("alpha"), np.where(logq == -np.inf, 0.0, ratio)
