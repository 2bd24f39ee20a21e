"""From scored positions to emitted, mu, survival and shifts with intervals. Pure numpy; no model is needed here.

`analyse` takes the columns that positions.parquet holds, so a study can be analysed again without running it again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specq import chain, stats
from specq.prompts import Text
from specq.rules import Rule, acceptance_terms

# the baseline, and its repetition under another order of arithmetic
BASE, NULL = "bf16+bf16", "null"
Columns = Mapping[str, np.ndarray]


def by_text(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum of lengths, ...] -> [longest, N, ...], time first, zero beyond each text's length."""
    out = np.zeros((int(lengths.max()), len(lengths), *values.shape[1:]))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for i, n in enumerate(lengths):
        out[:n, i] = values[starts[i] : starts[i + 1]]
    return out


@dataclass
class ArmResult:
    """One arm's chain and per-document sums over its texts of `lengths` [N] positions; a and b (of a cycle's first draft) lie
    text after text, [sum of lengths]."""

    name: str
    lengths: np.ndarray
    result: chain.ChainResult
    sums: stats.Sums
    a: np.ndarray
    b: np.ndarray

    @cached_property
    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, cycles) per text and K with cut cycles counted whole, see `chain.whole`."""
        return chain.whole(self.result)

    def emitted(self, k: int) -> float:
        """Token-weighted steady emitted at K = k."""
        return 1.0 if k == 0 else float(chain.emitted(self.result.tokens, self.result.ends)[k - 1])


@dataclass
class Analysis:
    """All arms with the shared bootstrap draws.

    `texts` are those of all arms, but where arms on own text are paired: then they are the format's, and the baseline and the
    null arm have their own on the same prompts.
    """

    texts: Sequence[Text]
    documents: stats.Documents
    resampler: stats.Resampler
    arms: dict[str, ArmResult]
    base: str
    k_max: int

    @property
    def lengths(self) -> np.ndarray:
        """Positions of `texts`, [N]."""
        return np.array([t.positions for t in self.texts])

    def shift(self, arm: str, k: int) -> stats.Estimate:
        """mu(arm) - mu(base) at K = k, paired."""
        return self.resampler.shift(self.arms[arm].sums, self.arms[self.base].sums, k)

    def shift_minus_null(self, arm: str, k: int, null: str | None) -> stats.Estimate:
        """The shift beyond the null arm's own: mu(arm) - mu(null), paired; the plain shift when there is no null arm."""
        return self.resampler.shift(self.arms[arm].sums, self.arms[null or self.base].sums, k)

    def whole(self, arm: str, k: int) -> stats.Sums:
        """An arm's sums at K = k alone, with the cycles that texts' ends cut counted whole (`chain.whole`)."""
        tokens, cycles = (x[:, k - 1] for x in self.arms[arm].whole)
        return stats.Sums(self.documents.sum(tokens), self.documents.sum(cycles)[:, None])

    def shift_of_whole_cycles(self, arm: str, k: int) -> stats.Estimate:
        """The shift with cut cycles counted whole, paired; the rates they go on with are taken as known."""
        return self.resampler.shift(self.whole(arm, k), self.whole(self.base, k), 1)

    def emitted_curve(self, arm: str) -> np.ndarray:
        """Emitted for K = 0..k_max, [k_max + 1]."""
        r = self.arms[arm].result
        return np.concatenate([[1.0], chain.emitted(r.tokens, r.ends)])

    def emitted_draws(self, arm: str) -> np.ndarray:
        """Emitted for K = 0..k_max in every bootstrap draw, [draws, k_max + 1]."""
        return self.resampler.emitted_draws(self.arms[arm].sums)

    def survival(self, arm: str) -> np.ndarray:
        """Marginal S_k, [k_max, k_max] at [K-1, k-1]."""
        result = self.arms[arm].result
        return chain.survival(result.ends, result.accepted)

    def excess(self, arm: str) -> tuple[float, float, float]:
        """(mean, standard error, z) over documents of sum(b - a): far from 0 when `arm`'s target did not write the text."""
        r = self.arms[arm]
        per_text = by_text(r.b - r.a, r.lengths).sum(0)
        mean, se = stats.mean_excess(self.documents.sum(per_text))
        return mean, se, mean / se if se > 0 and np.isfinite(se) else 0.0


def analyse(
    texts: Sequence[Text],
    columns: Mapping[str, Columns],
    base: str,
    rule: Rule,
    k_max: int,
    *,
    seed: int,
    draws: int,
) -> Analysis:
    """Run the chain for every arm.

    `base` sampled the texts: its b carries all arms (the control form). An arm with the same target format and another
    draft's would have sampled them as well, so its own b applies.
    """
    lengths = np.array([t.positions for t in texts])
    tokens = np.concatenate([np.array(t.response[1:], dtype=np.int64) for t in texts])
    documents = stats.Documents.of([t.prompt.document for t in texts])
    a0, b0 = acceptance_terms(columns[base], tokens, rule)
    arms = {}
    for name, cols in columns.items():
        a, b = (a0, b0) if name == base else acceptance_terms(cols, tokens, rule)
        c = b if name.split("+")[0] == base.split("+")[0] else chain.control(b0, a0, a)
        result = chain.run_chain(by_text(a, lengths), by_text(c, lengths), lengths, k_max)
        sums = stats.Sums(documents.sum(result.tokens), documents.sum(result.ends))
        arms[name] = ArmResult(name, lengths, result, sums, *(x if x.ndim == 1 else x[:, 0] for x in (a, b)))
    return Analysis(texts, documents, resampler_of(arms, documents, draws, seed), arms, base, k_max)


def resampler_of(
    arms: Mapping[str, ArmResult], documents: stats.Documents, draws: int, seed: int, strata: np.ndarray | None = None
) -> stats.Resampler:
    """The draws that these arms share, of documents in which any of them has a position."""
    return stats.Resampler(documents.count, draws, seed, strata, np.stack([r.sums.tokens for r in arms.values()]))


def summarise(analysis: Analysis, arm: str, columns: Columns) -> dict:
    """The JSON block of one arm: mu(K) with intervals, survival, acceptance, health and group figures."""
    r = analysis.arms[arm]
    result, ks = r.result, range(1, analysis.k_max + 1)
    ended = np.array([t.ended for t in analysis.texts])
    surv = chain.survival(result.ends, result.accepted)
    prompt_mean = chain.emitted_prompt_mean(result.tokens, result.ends) - 1
    useful = chain.emitted_useful(result, ended) - 1
    tokens, cycles = r.whole
    estimates = {k: analysis.resampler.emitted(r.sums, k) for k in ks}
    kl = np.asarray(columns["kl"], dtype=float)
    groups = {}
    names = np.array([t.prompt.group or "" for t in analysis.texts])
    for g in sorted(set(names) - {""}):
        mine = names == g
        emitted = chain.emitted(result.tokens[mine], result.ends[mine])
        groups[g] = {"prompts": int(mine.sum()), "mu_accepted": _by_k(emitted - 1)}
    return {
        "mu_accepted": {str(k): _mu_block(e, k) for k, e in estimates.items()},
        "mu_accepted_prompt_mean": _by_k(prompt_mean),
        "mu_accepted_useful": _by_k(useful),
        "mu_accepted_whole_cycles": _by_k(tokens.sum(0) / cycles.sum(0) - 1),
        "marginal_survival": {str(k): surv[k - 1, :k].tolist() for k in ks},
        "alpha_mean": float(r.a.mean()),
        "ratio_mean": float(np.asarray(columns["ratio"], dtype=float).mean()),
        "kl_from_baseline_mean": float(kl.mean()),
        "top1_agreement_with_baseline": float(np.asarray(columns["top1_agrees"]).mean()),
        "entropy_mean": float(np.asarray(columns["entropy"], dtype=float).mean()),
        "groups": groups,
    }


def _mu_block(emitted: stats.Estimate, k: int) -> dict:
    """mu(K) from emitted(K); its interval is cut at the values mu can take, 0 and K."""
    lo, hi = (float(np.clip(x - 1, 0, k)) if np.isfinite(x) else x for x in (emitted.lo, emitted.hi))
    return {"value": emitted.value - 1, "se": emitted.se, "ci95": [lo, hi]}


def _by_k(values: np.ndarray) -> dict[str, float]:
    return {str(k): float(v) for k, v in enumerate(values, 1)}
