"""Counts of literal cycles, as rollouts log them and servers export them, and the rates that follow from them.

Cycles need not draft the same number of tokens (end of output, length limits), so every rate names its denominator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specq.errors import SpecqError


@dataclass(frozen=True)
class CycleCounts:
    """drafts: cycles that drafted; drafted, accepted: tokens; per_position: cycles whose first i+1 drafts were accepted.

    `per_position` is None where the source does not tell it.
    """

    drafts: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...] | None

    def __post_init__(self) -> None:
        positions = self.per_position or ()
        falling = all(a >= b for a, b in zip(positions, positions[1:], strict=False))
        first = positions[0] if positions else 0
        if min(self.drafts, self.drafted, self.accepted, *positions, 0) < 0:
            raise SpecqError("inconsistent counts: a count is negative")
        known = self.per_position is not None
        if not falling or (known and sum(positions) != self.accepted) or first > self.drafts:
            raise SpecqError(
                f"inconsistent counts: per-position {list(positions)} must not rise, must start at most at"
                f" {self.drafts} drafts and must sum to {self.accepted} accepted"
            )
        if self.accepted > self.drafted or bool(self.drafted) != bool(self.drafts):
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

    @classmethod
    def sum(cls, parts: "Sequence[CycleCounts]") -> "CycleCounts":
        """Totals; positions that one part lacks count 0 there, and none are known where a part with drafts knows none."""
        positions = [p.per_position for p in parts if p.drafts]
        longest = max((len(p) for p in positions if p is not None), default=0)
        known = all(p is not None for p in positions)
        per = tuple(sum(p[i] for p in positions if i < len(p)) for i in range(longest)) if known else None
        return cls(sum(p.drafts for p in parts), sum(p.drafted for p in parts), sum(p.accepted for p in parts), per)

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
        """S_k: share of cycles whose first k drafts were all accepted; empty where positions are not known."""
        return [n / self.drafts for n in self.per_position or ()]

    @property
    def conditional(self) -> list[float | None]:
        """S_k / S_(k-1), None where no cycle came that far."""
        positions = self.per_position or ()
        before = (self.drafts, *positions)[: len(positions)]
        return [n / b if b else None for n, b in zip(positions, before, strict=True)]
