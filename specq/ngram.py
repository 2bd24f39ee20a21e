"""N-gram prompt lookup: a draft without a model, for text that repeats its prompt.

The longest run of last tokens, between `shortest` and `longest`, that occurred before is looked up, at its earliest
occurrence, and what followed it there is proposed (vLLM's method "ngram"; Saxena 2023). q is one-hot.

A proposal is made when a cycle begins, so what is proposed at a position depends on how many drafts the running cycle
has had accepted: replay scores it with the chain's second index (`proposals_along`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class NgramLookup:
    """Lengths of the n-grams looked up, longest first. Ends with the longest that occurred before."""

    shortest: int = 2
    longest: int = 5


class NgramIndex:
    """The n-grams of a growing text with the earliest place each of them ends at."""

    def __init__(self, lookup: NgramLookup, tokens: Sequence[int] = ()) -> None:
        self.lookup, self.tokens = lookup, []
        self._ends: dict[tuple[int, ...], int] = {}
        self._match: int | None = None
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            end, self._match = len(self.tokens), None
            for n in range(min(self.lookup.longest, end), self.lookup.shortest - 1, -1):
                gram = tuple(self.tokens[end - n :])
                first = self._ends.setdefault(gram, end)
                if self._match is None and first < end:
                    self._match = first

    def propose(self, k: int) -> list[int]:
        """At most `k` tokens that followed the longest known n-gram at the end; none where there is none."""
        return [] if self._match is None else self.tokens[self._match : self._match + k]


def proposals_along(lookup: NgramLookup, tokens: Sequence[int], start: int, k: int) -> np.ndarray:
    """What is proposed for each token from `start` on, by the drafts the running cycle had accepted before it.

    Returns [len(tokens) - start, k] int64: entry [t, j] is the (j + 1)th token of the proposal made when a cycle began at
    token start + t - j, -1 where that one was shorter or the cycle would have begun before `start`.
    """
    index = NgramIndex(lookup, tokens[:start])
    out = np.full((len(tokens) - start, k), -1, dtype=np.int64)
    for t in range(len(out)):
        for j, token in enumerate(index.propose(min(k, len(out) - t))):
            out[t + j, j] = token
        index.extend(tokens[start + t : start + t + 1])
    return out
