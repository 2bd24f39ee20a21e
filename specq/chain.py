"""The estimator: from acceptance probabilities along a text to tokens per cycle, for every K at once.

Speculative sampling emits text distributed as the target's own, so cycles need not be run: they are laid over the text.
A chain holds P_t(j), the probability that j = 0..K drafts of the running cycle were accepted before position t:

    e_t          = (1 - a_t) sum_{j<K} P_t(j) + P_t(K)                 expected cycle ends at t
    P_{t+1}(j+1) = c_t P_t(j) for j < K,   P_{t+1}(0) = 1 - sum_{j>0} P_{t+1}(j)
    emitted(K)   = T / sum_t e_t,   mu(K) = emitted(K) - 1
    S_k          = sum_t a_t P_t(k-1) / sum_t e_t,   so that sum_k S_k = mu exactly

The end of a text cuts its last cycle: T counts its tokens, sum e not its end. For cycles of mean M and variance s^2 that
lifts emitted by (M^2 - M - s^2) / 2MT in relative terms, little where cycles vary; where nearly all have K + 1 tokens, by up
to K / T or not at all, by where in a cycle the texts end. `whole` counts the cut cycle whole.

with c_t(A) = b_t(0) + a_t(A) - a_t(0) (see `control`): b knows from the text's own token whether the position was an
accepted draft of the arm that sampled it, and the difference of the a's carries it over to arm A. c may leave [0, 1]
and is not clipped; its mean given the prefix is a_t(A).

Where a proposal depends on its depth in the cycle (n-gram lookup), a and c carry j as a second index: every function
takes `[T, N]` or `[T, N, K]`, time first, N texts.
"""

from dataclasses import dataclass

import numpy as np


def control(b_base: np.ndarray, a_base: np.ndarray, a_arm: np.ndarray) -> np.ndarray:
    """c_t(A) = b_t(0) + a_t(A) - a_t(0), elementwise.

    Using the arm's own b on a text that another arm sampled would be wrong at first order, since its mean over the
    text's token is not a(A).
    """
    return b_base + (a_arm - a_base)


@dataclass(frozen=True)
class ChainResult:
    """Sums per text, all that intervals need (N texts, K = 1..k_max in the order of the last axes).

    tokens: [N] positions T.
    ends: [N, k_max] expected cycles, sum_t e_t.
    accepted, verified: [N, k_max, k_max] sum_t a_t P_t(k-1) and sum_t P_t(k-1) at [n, K-1, k-1]; 0 for k > K.
    left: [N, k_max, k_max + 1] the chain's law behind the text's last position at [n, K-1, j]: j drafts of a cycle that the
        end cuts, or (j = 0) a cycle that ended there. Given the last token, unlike e_T: where EOS decides that the text
        stops here, it is known. 0 for a text without positions.
    """

    tokens: np.ndarray
    ends: np.ndarray
    accepted: np.ndarray
    verified: np.ndarray
    left: np.ndarray


def run_chain(a: np.ndarray, c: np.ndarray, lengths: np.ndarray, k_max: int) -> ChainResult:
    """Run the chain for K = 1..k_max over N texts.

    Args:
        a, c: acceptance and transition values, `[T, N]` or `[T, N, k_max or more]` (last axis: drafts accepted so far).
        lengths: positions that count per text, [N], each at most T; what lies beyond is ignored.
        k_max: largest K.
    """
    steps, texts = a.shape[:2]
    depth = a.ndim == 3
    # state[n, K-1, j] = P_t(j) of text n at that K; j = 0..K, unused above K
    state = np.zeros((texts, k_max, k_max + 1))
    state[:, :, 0] = 1.0
    drafting = np.arange(k_max)[None, :] < np.arange(1, k_max + 1)[:, None]  # [K-1, j]: j < K
    full = np.arange(k_max)  # index of j = K for each K is K = row + 1
    ends = np.zeros((texts, k_max))
    accepted, verified = np.zeros((2, texts, k_max, k_max))
    left = np.zeros_like(state)
    for t in range(steps):
        live = t < lengths
        if not live.any():
            break
        at = (a[t][:, :k_max] if depth else a[t][:, None])[:, None, :]  # [N, 1, k_max or 1]
        ct = (c[t][:, :k_max] if depth else c[t][:, None])[:, None, :]
        open_state = np.where(drafting, state[:, :, :k_max], 0.0)
        hits = at * open_state
        end = open_state.sum(-1) - hits.sum(-1) + state[:, full, full + 1]
        if live.all():
            ends += end
            accepted += hits
            verified += open_state
        else:
            ends[live] += end[live]
            accepted[live] += hits[live]
            verified[live] += open_state[live]
        state[:, :, 1:] = ct * open_state
        state[:, :, 0] = 1.0 - state[:, :, 1:].sum(-1)
        is_last = t == lengths - 1
        if is_last.any():
            left[is_last] = state[is_last]
    return ChainResult(np.asarray(lengths, dtype=float), ends, accepted, verified, left)


def emitted(tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Steady emitted per cycle, T / sum e over all texts (token-weighted). tokens [N], ends [N, K] -> [K]."""
    return per_cycle(tokens.sum(), ends.sum(0))


def per_cycle(tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """T / sum e, [..., K] from totals tokens [...] and ends [..., K].

    Where no cycle ended every draft was accepted, in texts too short for more: K + 1, the most there is. NaN without tokens.
    """
    tokens = np.asarray(tokens)[..., None]
    most = np.where(tokens > 0, np.arange(2.0, ends.shape[-1] + 2), np.nan)
    return np.divide(tokens, ends, out=most, where=ends != 0)


def emitted_prompt_mean(tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Mean over texts of each text's own T / sum e, [K]: prompts weigh alike, however many cycles they took.

    Texts without a position in the chain (tokens = 0) are left out. Infinite where a text is so short that no cycle of K
    drafts can end in it.
    """
    some = tokens > 0
    with np.errstate(divide="ignore"):
        return (tokens[some, None] / ends[some]).mean(0)


def emitted_useful(result: ChainResult, ended: np.ndarray) -> np.ndarray:
    """Emitted per cycle counting only tokens up to EOS, [K].

    A text that ends by EOS cuts its last cycle, which still costs a whole one: T / (sum e + P(the end cuts a cycle)).
    `ended` [N] says which texts ended by EOS; for the others the cut is an artefact of the length limit and is not charged.
    """
    cut = np.where(ended[:, None], result.left[:, :, 1:].sum(-1), 0.0)
    return result.tokens.sum() / (result.ends + cut).sum(0)


def survival(ends: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Marginal S_k over all texts, [k_max, k_max] at [K-1, k-1]; conditional rates are S_k / S_{k-1}."""
    return accepted.sum(0) / ends.sum(0)[:, None]


def whole(result: ChainResult) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, cycles) per text, both [N, k_max], with the cycle that a text's end cuts counted whole.

    A cut cycle that has j drafts goes on for R_j = 1 + r_{j+1} R_{j+1} more tokens on average (R_K = 1), r_k being the rate
    at which k-th drafts that were verified are accepted, over all texts. tokens = T + R, cycles = sum e + 1: their ratio
    is Wald's equation, exact for texts of any length where cycles are alike, and what a server's counters count.
    """
    k_max = result.ends.shape[1]
    begun = result.left.sum(-1)  # 1, or a text's weight in a mixture
    accepted, verified = result.accepted.sum(0), result.verified.sum(0)
    rates = np.divide(accepted, verified, out=np.zeros((k_max, k_max)), where=verified > 0)
    more = np.zeros_like(result.ends)
    for k in range(1, k_max + 1):
        rest = np.ones(k + 1)
        for j in range(k - 1, -1, -1):
            rest[j] = 1 + rates[k - 1, j] * rest[j + 1]
        more[:, k - 1] = result.left[:, k - 1, : k + 1] @ rest
    return result.tokens[:, None] + more, result.ends + begun


CUT_WARNING = 0.02  # relative change of mu by cut last cycles worth a word,
CUT_SHIFT, CUT_LEAST = 0.5, 0.001  # and what they do to a shift: more than a share of its standard error, and than this
