"""Counts of literal cycles, as rollouts log them and servers export them, and the rates that follow from them.

Cycles need not draft the same number of tokens (end of output, length limits), so every rate names its denominator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specq.errors import SpecqError


@dataclass(frozen=True)
class CycleCounts:
    """drafts: cycles that drafted; drafted, accepted: tokens; per_position: cycles whose first i+1 drafts were accepted.

    `per_position` is empty where it was not counted.
    """

    drafts: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]

    def __post_init__(self) -> None:
        falling = all(a >= b for a, b in zip(self.per_position, self.per_position[1:], strict=False))
        first = self.per_position[0] if self.per_position else 0
        if min(self.drafts, self.drafted, self.accepted, *self.per_position, 0) < 0:
            raise SpecqError("inconsistent counts: a count is negative")
        if self.per_position and (not falling or sum(self.per_position) != self.accepted or first > self.drafts):
            raise SpecqError(
                f"inconsistent counts: per-position {list(self.per_position)} must not rise, must start at most at"
                f" {self.drafts} drafts and must sum to {self.accepted} accepted"
            )
        if self.accepted > self.drafted or (self.drafted and not self.drafts):
            raise SpecqError(
                f"inconsistent counts: {self.accepted} accepted of {self.drafted} drafted in {self.drafts} cycles"
            )

    @classmethod
    def of_cycles(cls, verdicts: Sequence[Sequence[bool]]) -> "CycleCounts":
        """From raw per-position verdicts of every cycle, of unequal length; what follows a failure does not count."""
        prefixes = [next((i for i, ok in enumerate(v) if not ok), len(v)) for v in verdicts]
        longest = max((len(v) for v in verdicts), default=0)
        per_position = tuple(sum(n > i for n in prefixes) for i in range(longest))
        return cls(sum(len(v) > 0 for v in verdicts), sum(map(len, verdicts)), sum(prefixes), per_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens per drafted token."""
        return self.accepted / self.drafted

    @property
    def mean_accepted(self) -> float:
        """mu: accepted tokens per cycle."""
        return self.accepted / self.drafts

    @property
    def mean_emitted(self) -> float:
        """Accepted + 1 per cycle: vLLM's mean acceptance length."""
        return 1 + self.mean_accepted

    @property
    def marginal(self) -> list[float]:
        """S_k: share of cycles whose first k drafts were all accepted."""
        return [n / self.drafts for n in self.per_position]

    @property
    def conditional(self) -> list[float | None]:
        """S_k / S_(k-1), None where no cycle came that far."""
        before = (self.drafts, *self.per_position)
        return [n / b if b else None for n, b in zip(self.per_position, before, strict=False)]
