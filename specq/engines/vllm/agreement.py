"""Measured cycles beside the replay of the very token ids they emitted.

Both sides count positions 1..T-1 of every response (0 is prefill's token): whether a cycle ended at the last one is not
seen where the length limit or EOS cut it. Measured, N ends and A_k accepted k-th drafts over n positions give
emitted = n / N and S_k = A_k / N. Predicted, the chain of `specq.chain` gives the same from a and b.

The joint test is that of rollouts (`specq.agreement`): given the text, are as many drafts accepted at every depth as the
chain says? For a greedy draft the text alone tells the cycles, and the counts must be met exactly wherever both sides agree
on the draft's argmax.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specq import chain, stats
from specq.agreement import of_counts
from specq.analysis import by_text
from specq.config import DRAWS
from specq.engines.vllm.protocol import RequestLog


@dataclass(frozen=True)
class Observed:
    """Per request [R]: positions counted; cycle ends; accepted k-th drafts [R, K]."""

    positions: np.ndarray
    ends: np.ndarray
    accepted: np.ndarray


def counted(requests: Iterable[RequestLog]) -> list[RequestLog]:
    """The requests that have a position to count: two tokens beyond prefill's, since the last one is left out."""
    return [r for r in requests if len(r.tokens) > 2]


def observe(requests: Sequence[RequestLog], k: int) -> Observed:
    """Count cycles in the steps of every request. A step of n tokens is n - 1 accepted drafts and the token after them."""
    positions, ends = np.zeros(len(requests)), np.zeros(len(requests))
    accepted = np.zeros((len(requests), k))
    for r, request in enumerate(requests):
        positions[r] = max(0, len(request.tokens) - 2)
        cycles = [len(step) for step in request.steps[1:]]
        for i, length in enumerate(cycles):
            last = i == len(cycles) - 1  # its final position is not counted, whether the cycle was cut or not
            ends[r] += not last
            accepted[r, : length - 1] += 1
    return Observed(positions, ends, accepted)


@dataclass(frozen=True)
class Predicted:
    """The chain over the counted positions of every request: on (a, b) as the estimator runs it, and on (b, b)."""

    told: chain.ChainResult
    given_text: chain.ChainResult


def predict(a: np.ndarray, b: np.ndarray, positions: np.ndarray, k: int) -> Predicted:
    """Run the chain over the first `positions` of every text; a, b [sum over texts of positions + 1] (the last unused)."""
    whole = positions.astype(int) + 1
    at, bt = by_text(a, whole), by_text(b, whole)
    return Predicted(*(chain.run_chain(x, bt, positions, k) for x in (at, bt)))


def _ratio(resampler: stats.Resampler, parts: list[tuple[float, np.ndarray, np.ndarray]]) -> dict:
    terms = [(c, stats.Sums(top, below[:, None])) for c, top, below in parts]
    return resampler.combination(terms, 1).as_dict()


def compare(documents: Sequence[str], observed: Observed, predicted: Predicted, seed: int) -> dict:
    """Measured, predicted and measured - predicted with paired intervals over documents, and the joint test.

    `documents` [R] names every request's document.
    """
    groups = stats.Documents.of(list(documents))
    resampler = stats.Resampler(groups.count, DRAWS, seed)
    k = observed.accepted.shape[1]
    told = predicted.told
    n, ends, hits = (groups.sum(x) for x in (observed.positions, observed.ends, observed.accepted))
    ends_p, hits_p = groups.sum(told.ends[:, k - 1]), groups.sum(told.accepted[:, k - 1, :k])
    both = [("emitted", n, n), *((f"S_{i + 1}", hits[:, i], hits_p[:, i]) for i in range(k))]
    blocks = {
        name: {
            "measured": _ratio(resampler, [(1.0, top, ends)]),
            "predicted": _ratio(resampler, [(1.0, top_p, ends_p)]),
            "difference": _ratio(resampler, [(1.0, top, ends), (-1.0, top_p, ends_p)]),
        }
        for name, top, top_p in both
    }
    joint = of_counts(observed.ends, observed.accepted, told, predicted.given_text, k, groups.sum)
    return {
        "requests": len(documents),
        "documents": groups.count,
        "positions": int(n.sum()),
        "cycles": int(ends.sum()),
        "emitted": blocks["emitted"],
        "marginal_survival": [blocks[f"S_{i + 1}"] for i in range(k)],
        "joint_test": {
            "tested": joint.tested,
            "exact": joint.exact,
            "p_value": joint.p_value if joint.tested else None,
            "statistic": joint.statistic,
            "degrees_of_freedom": joint.dof,
            "power_against_2_percent": joint.power,
        },
    }


def counters_error(documents: Sequence[str], observed: Observed, seed: int) -> tuple[int, float]:
    """(positions, standard error of emitted) of counters that saw these requests, scattered as their documents do."""
    groups = stats.Documents.of(list(documents))
    n, ends = groups.sum(observed.positions), groups.sum(observed.ends)
    block = _ratio(stats.Resampler(groups.count, DRAWS, seed), [(1.0, n, ends)])
    return int(n.sum()), block["se"]


def serving_tokens_needed(one: tuple[int, float], other: tuple[int, float], se: float) -> int | None:
    """Emitted tokens, to two digits, that two counter-read servers would need together for a shift with standard error `se`.

    `one`, `other`: `counters_error` of two formats at one K over texts of different documents, as traffic's are: errors fall as
    the root of tokens then. The servers are taken to see independent traffic.
    """
    errors = np.array([one[1], other[1]], dtype=float)
    if not se or not np.isfinite(errors).all():
        return None
    needed = (one[0] + other[0]) * float((errors**2).sum()) / se**2
    return int(float(f"{needed:.1e}"))
