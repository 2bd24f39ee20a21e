"""Prompt groups (code, chat, ...) and mixtures of them, always from each group's measured curve.

Tokens of a mixture that spends the share s_g of its tokens in group g take cycles 1 / emitted(K) = sum_g s_g / emitted_g(K):
no pooled alpha^k has that value. A mixture is an Analysis like any other, whose texts count with weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from specq import chain, stats
from specq.analysis import BASE, Analysis, ArmResult, resampler_of
from specq.config import DRAWS
from specq.cost import CostModel
from specq.decision import Decision, StudyFacts
from specq.errors import SpecqError
from specq.tune import Curve, quantile_interval, speed_curve


@dataclass
class GroupChoice:
    """One group's own decision at the study's operating point.

    mu_bf16 and mu are accepted per cycle at `k`; `best` is the group's own K; `loss` the share of its speed lost by the
    common K, with a 95 % interval.
    """

    name: str
    documents: int
    k: int
    mu_bf16: float
    mu: float
    best: int
    loss: float
    loss_ci95: list[float]


def group_names(analysis: Analysis) -> list[str]:
    """The groups that the prompt file names, in order of the alphabet."""
    return sorted({t.prompt.group for t in analysis.texts if t.prompt.group})


def _has_positions(analysis: Analysis, name: str) -> bool:
    """Whether every arm has a position in the texts of a group."""
    mine = np.array([t.prompt.group == name for t in analysis.texts])
    return all(r.lengths[mine].any() for r in analysis.arms.values())


def of_group(analysis: Analysis, name: str, seed: int) -> Analysis:
    """The analysis of one group's texts alone, with bootstrap draws over its documents."""
    mine = np.array([t.prompt.group == name for t in analysis.texts])
    documents = stats.Documents.of([t.prompt.document for t in analysis.texts if t.prompt.group == name])
    return _part(analysis, mine, documents, seed, lambda r: np.ones(len(r.lengths)))


def _part(
    analysis: Analysis,
    kept: np.ndarray,
    documents: stats.Documents,
    seed: int,
    weigh: Callable[[ArmResult], np.ndarray],
    strata: np.ndarray | None = None,
) -> Analysis:
    """The `kept` [N] texts of an analysis, where those of an arm count with its weights [N]: arms differ in their lengths."""

    def part(r: ArmResult) -> ArmResult:
        weight, rows = weigh(r)[kept], np.repeat(kept, r.lengths)
        sums = (getattr(r.result, f.name)[kept] for f in fields(chain.ChainResult))
        result = chain.ChainResult(*(x * weight.reshape(-1, *[1] * (x.ndim - 1)) for x in sums))
        per_document = stats.Sums(documents.sum(result.tokens), documents.sum(result.ends))
        return ArmResult(r.name, r.lengths[kept], result, per_document, r.a[rows], r.b[rows])

    texts = [t for t, keep in zip(analysis.texts, kept, strict=True) if keep]
    arms = {n: part(r) for n, r in analysis.arms.items()}
    draws = resampler_of(arms, documents, DRAWS, seed, strata)
    return replace(analysis, texts=texts, documents=documents, resampler=draws, arms=arms)


def mixture(analysis: Analysis, shares: Mapping[str, float], seed: int) -> Analysis:
    """The analysis of traffic that spends `shares` of its tokens in the groups; others do not count.

    Every text's sums are weighed so that the groups have their shares, and documents are resampled within their group:
    the shares are the user's and have no spread. Raises SpecqError for unknown groups and shares that make no sense.
    """
    names = group_names(analysis)
    if unknown := sorted(set(shares) - set(names)):
        has = f"has {', '.join(names)}" if names else "names no groups"
        raise SpecqError(f"no group {unknown[0]!r} in this study; its prompt file {has}")
    total = sum(shares.values())
    if min(shares.values()) < 0 or not np.isfinite(total) or total <= 0:
        raise SpecqError("the shares of a mixture must be positive numbers")
    groups = np.array([t.prompt.group or "" for t in analysis.texts])
    kept = {n: s / total for n, s in shares.items() if s > 0}
    if empty := [n for n in kept if not _has_positions(analysis, n)]:
        raise SpecqError(f"the texts of group {empty[0]!r} end at their first token: its acceptance is not known")
    counted = np.isin(groups, list(kept))
    texts = [t for t, keep in zip(analysis.texts, counted, strict=True) if keep]
    documents = stats.Documents.of([f"{t.prompt.group}\n{t.prompt.document}" for t in texts])
    strata = np.zeros(documents.count, dtype=int)
    strata[documents.index] = np.unique(groups[counted], return_inverse=True)[1]

    def weigh(r: ArmResult) -> np.ndarray:
        weight = np.zeros(len(groups))
        for name, share in kept.items():
            weight[groups == name] = share * r.lengths[counted].sum() / r.lengths[groups == name].sum()
        return weight

    return _part(analysis, counted, documents, seed, weigh, strata)


def lonely_groups(analysis: Analysis, shares: Mapping[str, float]) -> list[str]:
    """Groups of a mixture with one document only that has positions, whose spread nobody knows."""
    texts = [t for t in analysis.texts if t.positions]
    found = {n: {t.prompt.document for t in texts if t.prompt.group == n} for n, s in shares.items() if s > 0}
    return sorted(n for n, documents in found.items() if len(documents) < 2)


def group_choices(facts: StudyFacts, analysis: Analysis, cost: CostModel, made: Decision) -> list[GroupChoice]:
    """Every group's own best K and what the common one costs it, at the operating point decided for.

    Groups whose texts all end at their first token are left out.
    """
    arm = f"{made.format.name}+bf16"
    out = []
    for name in filter(lambda n: _has_positions(analysis, n), group_names(analysis)):
        part = of_group(analysis, name, facts.config.seed)
        mine = _curve(part, arm, cost, made.curve)
        best, common, k = mine.best, made.recommended, made.reference_k
        loss = 1 - mine.draws[:, common] / mine.draws[:, best]
        out.append(
            GroupChoice(
                name,
                part.resampler.documents,
                k,
                part.arms[BASE].emitted(k) - 1,
                part.arms[arm].emitted(k) - 1,
                best,
                float(1 - mine.point[common] / mine.point[best]),
                quantile_interval(loss),
            )
        )
    return out


def _curve(analysis: Analysis, arm: str, cost: CostModel, like: Curve) -> Curve:
    return speed_curve(analysis.emitted_curve(arm), analysis.emitted_draws(arm), cost, like.at, like.limit)
