"""Paired estimates from a finished study's files: shifts of mu, and means of what was logged per position."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specq import files, finished
from specq.analysis import BASE, NULL, Analysis
from specq.pairs import SELF
from specq.stats import Estimate, Sums

LOGGED = ("alpha", "kl", "top1_agrees", "position")


@dataclass
class Measured:
    """One finished study; `columns` holds LOGGED per arm, [positions of all texts]."""

    name: str
    about: str
    study: dict
    analysis: Analysis
    columns: dict[str, dict[str, np.ndarray]]

    @classmethod
    def load(cls, name: str, about: str, folder: Path) -> "Measured":
        """From the study's directory."""
        done = finished.load(folder)
        rows = files.read_parquet(folder / "positions.parquet", [*LOGGED, "arm", "text"])
        mine = {a: (rows["arm"] == a) & (rows["text"] == done.material.kind) for a in done.material.main.arms}
        columns = {a: {c: rows[c][at].astype(float) for c in LOGGED} for a, at in mine.items()}
        return cls(name, about, done.study, done.material.main, columns)

    @property
    def k(self) -> int:
        """The K that shifts of this study are reported at."""
        return self.study["configuration"]["current_k"]

    @property
    def formats(self) -> list[str]:
        """The formats compared with BF16."""
        return self.study["configuration"]["dtypes"]

    @property
    def kl_is_finite(self) -> bool:
        """Whether KL says anything: at temperature 0, or under top-k and top-p, one other token makes it infinite."""
        return all(np.isfinite(c["kl"]).all() for c in self.columns.values())

    @property
    def size(self) -> str:
        """Texts and their lengths, for a page."""
        c = self.study["configuration"]
        return f"{self.study['prompts']['kept']} x ({c['prompt_tokens']} + {c['output_tokens']})"

    @property
    def documents(self) -> list[str]:
        """Names of the documents, in the order of the resampling."""
        return list(dict.fromkeys(t.prompt.document for t in self.analysis.texts))

    @property
    def counts_cut_cycles(self) -> bool:
        """Whether cycles that texts' ends cut count whole: where a target drafts for itself nearly all have K + 1 tokens,
        so that it matters where in a cycle a text ends (docs/method.md)."""
        return self.study["configuration"]["draft"] == SELF

    def cycles(self, arm: str) -> Sums:
        """Tokens and cycles per document at K = k."""
        if self.counts_cut_cycles:
            return self.analysis.whole(arm, self.k)
        sums = self.analysis.arms[arm].sums
        return Sums(sums.tokens, sums.ends[:, self.k - 1 : self.k])

    def mu(self, arm: str = BASE) -> float:
        """Accepted per cycle at K = k."""
        sums = self.cycles(arm)
        return float(sums.tokens.sum() / sums.ends.sum() - 1)

    def mu_estimate(self, arm: str) -> Estimate:
        """The same with its interval, cut at the values mu can take."""
        e = self.analysis.resampler.emitted(self.cycles(arm), 1)
        return Estimate(e.value - 1, e.se, max(e.lo - 1, 0.0), min(e.hi - 1, float(self.k)))

    def shift(self, arm: str) -> Estimate:
        """mu(arm) - mu(bf16+bf16), paired."""
        return self.mu_difference(arm, BASE)

    def null(self) -> Estimate:
        """The null arm's shift."""
        return self.mu_difference(NULL, BASE)

    def mu_difference(self, arm: str, other: str) -> Estimate:
        """mu(arm) - mu(other), paired."""
        return self.analysis.resampler.shift(self.cycles(arm), self.cycles(other), 1)

    def mean_difference(self, column: str, arm: str, other: str, where: np.ndarray | None = None) -> Estimate:
        """Mean over positions of a column in `arm` minus that in `other`, paired."""
        return self._mean([(1.0, self._sums(column, arm, where)), (-1.0, self._sums(column, other, where))])

    def mean(self, column: str, arm: str, where: np.ndarray | None = None) -> Estimate:
        """Mean of a column over positions (those of `where`, a mask), clustered by document."""
        return self._mean([(1.0, self._sums(column, arm, where))])

    def ratio(self, column: str, arm: str, other: str) -> Estimate:
        """Sum of a column in `arm` over that in `other`, the same positions, clustered by document."""
        mine, base = (self._sums(column, a, None).tokens for a in (arm, other))
        return self.analysis.resampler.emitted(Sums(mine, base[:, None]), 1)

    def top1_agreement(self, arm: str) -> Estimate:
        """Share of positions at which BF16's most probable token stays the most probable, its interval cut at 0 and 1."""
        e = self.mean("top1_agrees", arm)
        return Estimate(e.value, e.se, max(e.lo, 0.0), min(e.hi, 1.0))

    def share_of_text(self) -> np.ndarray:
        """How far into its text each position lies, in (0, 1]."""
        return self.columns[BASE]["position"] / np.repeat(self.analysis.lengths, self.analysis.lengths)

    def _sums(self, column: str, arm: str, where: np.ndarray | None) -> Sums:
        a = self.analysis
        document = np.repeat(a.documents.index, a.lengths)
        kept = np.ones(len(document)) if where is None else where.astype(float)
        total = np.bincount(document, kept * self.columns[arm][column], a.documents.count)
        return Sums(total, np.bincount(document, kept, a.documents.count)[:, None])

    def _mean(self, parts: Sequence[tuple[float, Sums]]) -> Estimate:
        return self.analysis.resampler.combination(list(parts), 1)


def change_of_shift(now: Measured, before: Measured, arm: str) -> Estimate:
    """Shift of mu in one study minus that in another over the same documents, paired."""
    _same_documents(now, before)
    parts = [(s, m.cycles(a)) for m, sign in ((now, 1.0), (before, -1.0)) for a, s in ((arm, sign), (BASE, -sign))]
    return now.analysis.resampler.combination(parts, 1)


def change_of_mean(now: Measured, before: Measured, column: str, arm: str) -> Estimate:
    """Mean of a column in one study minus that in another over the same documents, paired."""
    _same_documents(now, before)
    return now._mean([(1.0, now._sums(column, arm, None)), (-1.0, before._sums(column, arm, None))])


def change_of_difference(now: Measured, before: Measured, column: str, arm: str) -> Estimate:
    """The same of the difference between `arm` and the baseline."""
    _same_documents(now, before)
    parts = [
        (s, m._sums(column, a, None))
        for m, sign in ((now, 1.0), (before, -1.0))
        for a, s in ((arm, sign), (BASE, -sign))
    ]
    return now._mean(parts)


def _same_documents(a: Measured, b: Measured) -> None:
    counted = np.array_equal(a.analysis.resampler.counted, b.analysis.resampler.counted)
    if a.documents != b.documents or a.k != b.k or not counted:
        raise ValueError(
            f"{a.name} and {b.name} are not over the same documents at the same K, so they cannot be paired"
        )
