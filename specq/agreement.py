"""Does replay say of a rollout's own text what the rollout did? One joint test over cycles and every S_k.

Given the text, the rollout's cycles are random only in what the text does not show. Per document and k = 1..K

    D_k = (drafts accepted as their cycle's k-th) - sum_t b_t P_t(k - 1)     given the text, are as many accepted?
    E_k = sum_t (b_t - a_t) P_t(k - 1)                                       is a the mean of b, as S_k takes it?

both have mean 0; D_k + E_k is rollout minus replay's own S_k times cycles. Cycle ends need no entry: tokens = ends + accepted
in both. For one-hot drafts the text shows everything and D_k is 0 exactly. Hotelling's T-squared tests all means at once over
documents (Anderson 2003, 5.2); independent rollouts are joined by turning p-values into chi-square values of as many degrees
of freedom (Lancaster 1961).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

from specq.analysis import by_text
from specq.chain import ChainResult, run_chain
from specq.replay import ReplayResult
from specq.rollout import Rollout
from specq.rules import Rule, acceptance_terms

ERROR = 0.02  # relative error of every expected count whose detection `power` tells
LEVEL = 0.01
RARE = 20  # depths that fewer drafts were accepted at are added to the one before: a test of means needs some counts
_RNG_SEED, _POWER_DRAWS = 0, 4000


@dataclass(frozen=True)
class Agreement:
    """One rollout against its replay: counts, and Hotelling's F with (`dof`, `documents` - `dof`) degrees of freedom.

    `exact`: D is 0 in every document, so no count is off. Otherwise `noncentrality` is that of F if the rollout's accepted
    counts were all off by ERROR.
    """

    ends: float
    ends_expected: float
    accepted: np.ndarray
    accepted_expected: np.ndarray
    documents: int
    dof: int
    statistic: float
    p_value: float
    noncentrality: float
    exact: bool

    @property
    def tested(self) -> bool:
        """Whether there were enough documents and counts for a test, or all agrees exactly."""
        return self.exact or 0 < self.dof < self.documents

    @property
    def power(self) -> float:
        """Probability that this test at LEVEL finds a relative error of ERROR in all accepted counts."""
        if self.exact or not self.tested:
            return float(self.exact)
        rest = self.documents - self.dof
        return float(scipy_stats.ncf.sf(scipy_stats.f.isf(LEVEL, self.dof, rest), self.dof, rest, self.noncentrality))


def compare(rollout: Rollout, replay: ReplayResult, rule: Rule) -> Agreement:
    """Compare a rollout with the replay of its texts under its arm (one text per document)."""
    k, lengths = rollout.k, np.array([t.positions for t in rollout.texts])
    tokens = np.concatenate([np.array(t.response[1:], dtype=np.int64) for t in rollout.texts])
    a, b = (
        by_text(x if x.ndim == 1 else x[:, :k], lengths)
        for x in acceptance_terms(replay.arms[rollout.arm.name].columns, tokens, rule)
    )
    told, given_text = (run_chain(x, b, lengths, k) for x in (a, b))
    return of_counts(rollout.ends, rollout.accepted, told, given_text, k)


def of_counts(
    ends: np.ndarray,
    accepted: np.ndarray,
    told: ChainResult,
    given_text: ChainResult,
    k: int,
    by_document: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> Agreement:
    """The test for counted cycles of N texts: `ends` [N], `accepted` [N, K] beside the chain run on (a, b) and on (b, b).

    `by_document` sums rows of texts to rows of documents, where one has several.
    """
    expected = by_document(told.accepted[:, k - 1, :k])
    given = by_document(given_text.accepted[:, k - 1, :k])
    d, e = by_document(accepted) - given, given - expected
    exact = bool(np.abs(d).max() < 1e-6)
    starts = np.arange(max(1, int((expected.sum(0) >= RARE).sum())))
    d, e, off = (np.add.reduceat(x, starts, axis=1) for x in (d, e, ERROR * expected))
    error = np.concatenate([off.mean(0), np.zeros(len(starts))])
    enough = exact or expected.sum() >= RARE
    dof, statistic, p_value, noncentrality = _hotelling(np.concatenate([d, e], axis=1) * enough, error)
    return Agreement(
        ends=float(ends.sum()),
        ends_expected=float(told.ends[:, k - 1].sum()),
        accepted=accepted.sum(0),
        accepted_expected=expected.sum(0),
        documents=len(d),
        dof=dof,
        statistic=statistic,
        p_value=p_value,
        noncentrality=noncentrality,
        exact=exact,
    )


def _hotelling(gap: np.ndarray, error: np.ndarray) -> tuple[int, float, float, float]:
    """(degrees of freedom, F, p-value, noncentrality if the mean were `error` [M]) for rows `gap` [documents, M]."""
    noisy = np.ptp(gap, axis=0) > 1e-6
    if len(gap) > 1 and np.abs(gap[:, ~noisy]).max(initial=0.0) > 1e-6:
        return 1, np.inf, 0.0, 0.0  # off by the same in every document
    gap, error, n = (
        gap[:, noisy],
        error[noisy],
        len(gap),
    )  # depths no cycle reached, and exact ones, leave nothing to test
    dof = gap.shape[1]
    if dof == 0 or n <= dof:
        return dof, 0.0, 1.0, 0.0
    precision = np.linalg.pinv(np.atleast_2d(np.cov(gap.T)), hermitian=True)
    mean = gap.mean(0)
    statistic = float(n * mean @ precision @ mean) * (n - dof) / (dof * (n - 1))
    return dof, statistic, float(scipy_stats.f.sf(statistic, dof, n - dof)), float(n * error @ precision @ error)


@dataclass(frozen=True)
class JointTest:
    """p-value of many independent agreements together, and the power against an error of ERROR in all that are not exact."""

    p_value: float
    power: float
    dof: int
    tests: int


def joint(agreements: Sequence[Agreement]) -> JointTest:
    """Lancaster's combination; its power by drawing every F from its noncentral law."""
    used = [a for a in agreements if 0 < a.dof < a.documents]
    total = sum(a.dof for a in used)
    if not used:
        return JointTest(1.0, float(bool(agreements) and all(a.exact for a in agreements)), 0, 0)
    statistic = sum(scipy_stats.chi2.isf(max(a.p_value, 1e-300), a.dof) for a in used)
    rng = np.random.default_rng(_RNG_SEED)
    drawn = np.zeros(_POWER_DRAWS)
    for a in used:
        rest = a.documents - a.dof
        top = rng.noncentral_chisquare(a.dof, a.noncentrality, _POWER_DRAWS) / a.dof
        f = top / (rng.chisquare(rest, _POWER_DRAWS) / rest)
        drawn += scipy_stats.chi2.isf(np.maximum(scipy_stats.f.sf(f, a.dof, rest), 1e-300), a.dof)
    return JointTest(
        p_value=float(scipy_stats.chi2.sf(statistic, total)),
        power=float((drawn > scipy_stats.chi2.isf(LEVEL, total)).mean()),
        dof=total,
        tests=len(used),
    )
