"""Measured cycles beside the replay of the very token ids they emitted.

Both sides count positions 1..T-1 of every response (0 is prefill's token): whether a cycle ended at the last one is not
seen where the length limit or EOS cut it. Measured, N ends and A_k accepted k-th drafts over n positions give
emitted = n / N and S_k = A_k / N. Predicted, the chain of `specq.chain` gives the same from a and b.

The joint test asks whether the engine's cycles are those the chain says, given the text. With the literal b in place of a,
the chain's sums are conditional means of A_k given the whole text, so A_k minus them has mean 0 for every document;
Hotelling's T^2 over documents tests all k at once (N follows, since N + sum A_k = n). A greedy draft leaves no chance:
the text alone tells its cycles, and A_k must be met exactly wherever both sides agree on the draft's argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import fdtrc

from specq import chain, stats
from specq.analysis import by_text
from specq.config import DRAWS
from specq.vllm.protocol import RequestLog


@dataclass(frozen=True)
class Observed:
    """Per request [R]: positions counted; cycle ends; accepted k-th drafts [R, K]."""

    positions: np.ndarray
    ends: np.ndarray
    accepted: np.ndarray


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
    """Per request: expected ends [R] and accepted k-th drafts [R, K]; `literal` is their mean given the text [R, K]."""

    ends: np.ndarray
    accepted: np.ndarray
    literal: np.ndarray


def predict(a: np.ndarray, b: np.ndarray, positions: np.ndarray, k: int) -> Predicted:
    """Run the chain over the first `positions` of every text; a, b [sum over texts of positions + 1] (the last unused)."""
    whole = positions.astype(int) + 1
    at, bt = by_text(a, whole), by_text(b, whole)
    expected = chain.run_chain(at, bt, positions, k)
    literal = chain.run_chain(bt, bt, positions, k)
    return Predicted(expected.ends[:, k - 1], expected.accepted[:, k - 1, :k], literal.accepted[:, k - 1, :k])


def hotelling(x: np.ndarray) -> tuple[float | None, float | None]:
    """(T^2, p) that the mean of rows x [documents, K] is 0.

    Directions without spread decide by themselves: a constant other than 0 is impossible (p = 0), zeros throughout are
    what was expected. None where there are no more documents than directions left.
    """
    n, flat = len(x), x.std(0) == 0
    if n < 2:
        return None, None
    if (x[0, flat] != 0).any():
        return None, 0.0
    x = x[:, ~flat]
    if not x.shape[1]:
        return 0.0, 1.0
    if n <= x.shape[1]:
        return None, None
    mean, covariance = x.mean(0), np.atleast_2d(np.cov(x, rowvar=False))
    rank = int(np.linalg.matrix_rank(covariance))
    t2 = float(n * mean @ np.linalg.pinv(covariance) @ mean)
    return t2, float(fdtrc(rank, n - rank, t2 * (n - rank) / (rank * (n - 1))))


def _ratio(resampler: stats.Resampler, parts: list[tuple[float, np.ndarray, np.ndarray]]) -> dict:
    terms = [(c, stats.Sums(top, below[:, None])) for c, top, below in parts]
    return resampler.combination(terms, 1).as_dict()


def compare(documents: Sequence[str], observed: Observed, predicted: Predicted, seed: int) -> dict:
    """Measured, predicted and measured - predicted with paired intervals over documents, and the joint test.

    `documents` [R] names every request's document.
    """
    groups = stats.Documents.of(list(documents))
    resampler = stats.Resampler(groups.count, DRAWS, seed)
    n, ends, hits = (groups.sum(x) for x in (observed.positions, observed.ends, observed.accepted))
    ends_p, hits_p = groups.sum(predicted.ends), groups.sum(predicted.accepted)
    both = [("emitted", n, n), *((f"S_{i + 1}", hits[:, i], hits_p[:, i]) for i in range(hits.shape[1]))]
    blocks = {
        name: {
            "measured": _ratio(resampler, [(1.0, top, ends)]),
            "predicted": _ratio(resampler, [(1.0, top_p, ends_p)]),
            "difference": _ratio(resampler, [(1.0, top, ends), (-1.0, top_p, ends_p)]),
        }
        for name, top, top_p in both
    }
    gaps = hits - groups.sum(predicted.literal)
    t2, p = hotelling(gaps)
    return {
        "requests": len(documents),
        "documents": groups.count,
        "positions": int(n.sum()),
        "cycles": int(ends.sum()),
        "emitted": blocks["emitted"],
        "marginal_survival": [blocks[f"S_{i + 1}"] for i in range(hits.shape[1])],
        "joint_test": {
            "hotelling_t2": t2,
            "p_value": p,
            "directions": hits.shape[1],
            "accepted_minus_expected": gaps.sum(0).tolist(),
        },
    }


def serving_tokens_needed(one: dict, other: dict, se: float | None) -> int | None:
    """Emitted tokens that two counter-read servers would need together for a shift with standard error `se`.

    `one`, `other`: blocks of `compare` of two formats at one K; their errors fall as the root of their tokens.
    """
    errors = [block["emitted"]["measured"]["se"] for block in (one, other)]
    if not se or not np.isfinite(errors).all():
        return None
    return int(np.ceil((one["positions"] + other["positions"]) * (errors[0] ** 2 + errors[1] ** 2) / se**2))
