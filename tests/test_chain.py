"""The estimator against real speculative sampling, exact laws and closed forms."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specq import chain
from specq.acceptance import score_positions
from specq.analysis import analyse
from specq.prompts import Prompt, Text
from specq.rules import Rule, acceptance_terms

K_MAX = 8
PROBABILISTIC = toys.RULES[0]

# A toy with the shape of docs/method.md, "Another arm on the same text": the arm p + EPS * TILT accepts less (by 0.045
# tokens at K = 3), its own b on the baseline's text gives nearly twice that, and b alone gives the other sign.
P = np.array([[0.38, 0.31, 0.31], [0.36, 0.20, 0.44], [0.27, 0.20, 0.53]])
Q = np.array([[0.28, 0.56, 0.16], [0.29, 0.31, 0.40], [0.52, 0.15, 0.33]])
TILT = np.array([[-0.23, -0.12, 0.35], [0.04, 0.08, -0.12], [-0.03, -0.04, 0.07]])
EPS = 0.25


def whole(values):
    """Lengths of texts that all fill [T, N]."""
    return np.full(values.shape[1], values.shape[0])


def constant(rate, tokens, texts=1):
    """a_t = c_t = rate."""
    return np.full((tokens, texts), rate)


def assert_agree(got, expected, what, sigmas=4.0):
    """Estimates (or exact numbers) within `sigmas` standard errors of each other, both errors combined."""
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        y = y if isinstance(y, toys.Estimate) else toys.Estimate(float(y), 0.0)
        gap, se = x.value - y.value, np.hypot(x.se, y.se)
        assert abs(gap) <= sigmas * se, f"{what}, {'emitted' if i == 0 else f'S_{i}'}: {x.value} vs {y.value}, se {se}"


def library_rates(result, k):
    """[emitted, S_1..S_K] of the chain with standard errors over texts."""
    return toys.rates(result.tokens[0], result.ends[:, k - 1], result.accepted[:, k - 1, :k])


# ---------------------------------------------------------------- real speculative sampling


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rule", toys.RULES, ids="-".join)
def test_chain_equals_real_speculative_sampling(rule, seed):
    """Emitted and every S_k of the chain on the target's text equal those of running the cycles, for K = 1..8.

    2e5 tokens each; both also agree with the exact law of (last token, state) at this length. S-02, S-04.
    """
    rng = np.random.default_rng(seed)
    vocabulary, texts, tokens = 3 + seed, 2000, 100
    p = toys.random_kernel(rng, vocabulary)
    q = 0.6 * p + 0.4 * toys.random_kernel(rng, vocabulary)
    start = toys.stationary(p)
    terms = toys.acceptance(p, q, rule)
    a, b = toys.along(toys.sample_text(p, texts, tokens, rng, start), terms.a, terms.b)
    result = chain.run_chain(a, b, whole(a), K_MAX)
    for k in range(1, K_MAX + 1):
        _, origin = toys.simulate(p, q, rule, k, texts, tokens, rng, start)
        simulated = toys.rates(tokens, *toys.counts(origin, k))
        ends, accepted = toys.expect(p, terms.a, terms.b, k, tokens, start)
        exact = [tokens / ends, *accepted / ends]
        estimated = library_rates(result, k)
        assert_agree(estimated, simulated, f"K={k} chain and simulation")
        assert_agree(estimated, exact, f"K={k} chain and exact law")
        assert_agree(simulated, exact, f"K={k} simulation and exact law")


def test_proposals_that_depend_on_depth_equal_real_speculative_sampling():
    """With another draft law at each depth of the cycle, a and b by depth give what running the cycles gives."""
    rng = np.random.default_rng(11)
    texts, tokens, k = 2000, 100, 5
    p = toys.random_kernel(rng, 4)
    q = np.stack([(0.8 - 0.15 * j) * p + (0.2 + 0.15 * j) * toys.random_kernel(rng, 4) for j in range(k)])
    start = toys.stationary(p)
    for rule in toys.RULES:
        terms = toys.acceptance(p, q, rule)
        a, b = toys.along(toys.sample_text(p, texts, tokens, rng, start), terms.a, terms.b)
        _, origin = toys.simulate(p, q, rule, k, texts, tokens, rng, start)
        simulated = toys.rates(tokens, *toys.counts(origin, k))
        ends, accepted = toys.expect(p, terms.a, terms.b, k, tokens, start)
        estimated = library_rates(chain.run_chain(a, b, whole(a), k), k)
        assert_agree(estimated, simulated, f"{rule} chain and simulation")
        assert_agree(estimated, [tokens / ends, *accepted / ends], f"{rule} chain and exact law")


@pytest.mark.parametrize("rule", toys.RULES, ids="-".join)
def test_the_simulator_emits_the_targets_own_law(rule):
    """Control of the yardstick: speculative sampling emits text whose transitions follow p, whatever the draft. S-06."""
    rng = np.random.default_rng(21)
    p, q = toys.random_kernel(rng, 5), toys.random_kernel(rng, 5)
    text, _ = toys.simulate(p, q, rule, 3, 2000, 100, rng, toys.stationary(p))
    seen = np.zeros((5, 5))
    np.add.at(seen, (text[:-1].ravel(), text[1:].ravel()), 1)
    visits = seen.sum(1, keepdims=True)
    z = (seen / visits - p) / np.sqrt(p * (1 - p) / visits)
    assert np.abs(z).max() < 4


@pytest.mark.parametrize("rule", toys.RULES, ids="-".join)
def test_expectation_over_every_text_is_the_exact_law(rule):
    """Averaged over all 3^7 texts with their probabilities, the chain is the law of real cycles, to rounding.

    No sampling is involved: T = 6, K = 1..8 (beyond the text's end too), a start that is not stationary.
    """
    start = np.array([0.7, 0.1, 0.2])
    terms = toys.acceptance(P, Q, rule)
    texts, weight = toys.every_text(P, 6, start)
    a, b = toys.along(texts, terms.a, terms.b)
    result = chain.run_chain(a, b, whole(a), K_MAX)
    for k in range(1, K_MAX + 1):
        ends, accepted = toys.expect(P, terms.a, terms.b, k, 6, start)
        assert weight @ result.ends[:, k - 1] == pytest.approx(ends, rel=1e-12)
        np.testing.assert_allclose(weight @ result.accepted[:, k - 1, :k], accepted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rule", toys.RULES, ids="-".join)
def test_scored_terms_are_the_rules_definition(rule):
    """a and b that specq scores from log-probabilities equal the definitions the toys are built on, for every rule."""
    rng = np.random.default_rng(31)
    p, q = toys.random_kernel(rng, 6), toys.random_kernel(rng, 6)
    terms = toys.acceptance(p, q, rule)
    last, token = (x.ravel() for x in np.indices((6, 6)))
    logp, logq = (torch.from_numpy(np.log(m[last])).float() for m in (p, q))
    tokens = torch.from_numpy(token)
    scores = score_positions(logp, logq, tokens, logp, torch.full((36,), 0.5), Rule(*rule))
    a, b = acceptance_terms(vars(scores), tokens, Rule(*rule))
    np.testing.assert_allclose(a, terms.a[last], rtol=2e-6)
    np.testing.assert_allclose(b, terms.b[last, token], rtol=2e-6)


# ---------------------------------------------------------------- identities


def test_equal_distributions_accept_everything():
    """p = q: emitted is exactly K + 1 and every S_k exactly 1, for texts of whole cycles. S-16; first of five checks."""
    rng = np.random.default_rng(41)
    tokens, texts = 2520, 3  # divisible by 2..9
    logp = torch.from_numpy(rng.normal(size=(tokens * texts, 7))).float().log_softmax(-1)
    token = torch.from_numpy(rng.integers(0, 7, tokens * texts))
    scores = score_positions(logp, logp.clone(), token, logp, torch.zeros(tokens * texts), Rule())
    a, b = (x.reshape(tokens, texts) for x in acceptance_terms(vars(scores), token, Rule()))
    result = chain.run_chain(a, b, whole(a), K_MAX)
    assert chain.emitted(result.tokens, result.ends).tolist() == [k + 1 for k in range(1, K_MAX + 1)]
    assert chain.survival(result.ends, result.accepted).tolist() == np.tri(K_MAX).tolist()


def test_nothing_accepted_emits_one():
    """a = 0: every cycle emits the correction token alone, for every K."""
    a = constant(0.0, 37, 2)
    result = chain.run_chain(a, a, whole(a), K_MAX)
    assert (chain.emitted(result.tokens, result.ends) == 1).all()
    assert not result.accepted.any()


@st.composite
def chains(draw, low, high, same=False):
    """(a, c, lengths, k_max): a in [0, 1], c in [low, high] or equal to a, ragged lengths, with or without depth."""
    tokens, texts, k_max = draw(st.integers(1, 14)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    shape = (tokens, texts, k_max) if draw(st.booleans()) else (tokens, texts)
    a = draw(arrays(float, shape, elements=st.floats(0, 1, width=32)))
    c = a if same else draw(arrays(float, shape, elements=st.floats(low, high, width=32)))
    lengths = draw(arrays(int, texts, elements=st.integers(0, tokens)))
    return a, c, lengths, k_max


@settings(deadline=None, derandomize=True, max_examples=200)
@given(chains(-0.5, 1.5))
def test_survival_sums_to_mu(case):
    """Every position is an accepted draft or ends a cycle: sum_k S_k = mu for any a and c, c outside [0, 1] included.

    Fifth of the five checks; S-01.
    """
    a, c, lengths, k_max = case
    result = chain.run_chain(a, c, lengths, k_max)
    scale = 1 + np.abs(result.accepted).max() + np.abs(result.ends).max()
    np.testing.assert_allclose(
        result.ends + result.accepted.sum(-1), np.repeat(lengths[:, None], k_max, 1), rtol=0, atol=1e-12 * scale
    )
    assert (result.accepted[:, ~np.tri(k_max, dtype=bool)] == 0).all()
    if (np.abs(result.ends.sum(0)) > 0.1).all():
        mu = chain.emitted(result.tokens, result.ends) - 1
        survival = chain.survival(result.ends, result.accepted).sum(-1)
        np.testing.assert_allclose(survival, mu, rtol=1e-9, atol=1e-11 * scale)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(chains(0, 1, same=True))
def test_counts_fall_with_depth(case):
    """With c = a in [0, 1] the chain is a probability: accepted counts fall with depth, and lie within [0, T].

    P_{t+1}(k) = a_t P_t(k-1), so what is accepted at depth k + 1 was accepted at depth k one position earlier. Fifth check.
    """
    a, c, lengths, k_max = case
    result = chain.run_chain(a, c, lengths, k_max)
    assert (np.diff(result.accepted, axis=-1) <= 1e-12).all()
    assert (result.accepted >= -1e-12).all() and (result.accepted <= lengths[:, None, None] + 1e-12).all()
    assert (result.ends >= -1e-12).all() and (result.ends <= lengths[:, None] + 1e-12).all()


@settings(deadline=None, derandomize=True, max_examples=200)
@given(chains(0, 1, same=True))
def test_longer_drafts_never_need_more_cycles(case):
    """With c = a in [0, 1] that does not depend on depth, expected cycles fall with K: the same coins, later ends."""
    a, _, lengths, k_max = case
    a = a[..., 0] if a.ndim == 3 else a
    assert (np.diff(chain.run_chain(a, a, lengths, k_max).ends, axis=-1) <= 1e-12).all()


@settings(deadline=None, derandomize=True, max_examples=100)
@given(chains(-0.5, 1.5), st.randoms(use_true_random=False))
def test_texts_do_not_touch_each_other(case, random):
    """N texts in one call, in any order, equal N calls of one text, bit for bit. Fourth of the five checks."""
    a, c, lengths, k_max = case
    together = chain.run_chain(a, c, lengths, k_max)
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = chain.run_chain(a[:, order], c[:, order], lengths[order], k_max)
    for at, n in enumerate(order):
        one = [n]
        alone = chain.run_chain(a[: lengths[n], one], c[: lengths[n], one], lengths[one], k_max)
        for field in ("tokens", "ends", "accepted", "left"):
            np.testing.assert_array_equal(getattr(together, field)[n], getattr(alone, field)[0])
            np.testing.assert_array_equal(getattr(shuffled, field)[at], getattr(alone, field)[0])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(chains(-0.5, 1.5), st.sampled_from([np.nan, 1e300, -7.0]))
def test_padding_is_ignored(case, garbage):
    """What lies beyond a text's length changes nothing, NaN included."""
    a, c, lengths, k_max = case
    padded = []
    for x in (a, c):
        x = x.copy()
        x[np.arange(len(x))[:, None] >= lengths] = garbage
        padded.append(x)
    with np.errstate(all="ignore"):
        dirty = chain.run_chain(*padded, lengths, k_max)
    clean = chain.run_chain(a, c, lengths, k_max)
    for field in ("tokens", "ends", "accepted", "left"):
        np.testing.assert_array_equal(getattr(dirty, field), getattr(clean, field))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(chains(-0.5, 1.5))
def test_every_k_is_its_own_chain(case):
    """The results for K do not depend on k_max, and values by depth that do not vary equal values without depth."""
    a, c, lengths, k_max = case
    if a.ndim == 2:
        spread = [np.repeat(x[..., None], k_max, -1) for x in (a, c)]
        np.testing.assert_array_equal(
            chain.run_chain(*spread, lengths, k_max).ends, chain.run_chain(a, c, lengths, k_max).ends
        )
    full = chain.run_chain(a, c, lengths, k_max)
    for k in range(1, k_max + 1):
        one = chain.run_chain(a[..., :k] if a.ndim == 3 else a, c[..., :k] if a.ndim == 3 else c, lengths, k)
        np.testing.assert_allclose(one.ends[:, -1], full.ends[:, k - 1], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(one.accepted[:, -1], full.accepted[:, k - 1, :k], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.7, 0.95])
def test_constant_acceptance_is_a_renewal_process(alpha):
    """a_t = c_t = alpha: ends equal the renewal recursion at every T to rounding, and the rate in between is exactly
    (1 - alpha^{K+1}) / (1 - alpha) once the start is forgotten."""
    tokens = 1200
    lengths = np.array([1, 2, 5, 40, 600, tokens])
    a = constant(alpha, tokens, len(lengths))
    result = chain.run_chain(a, a, lengths, K_MAX)
    for k in range(1, K_MAX + 1):
        ends = np.cumsum(toys.renewal_ends(np.full(k, alpha), tokens))
        np.testing.assert_allclose(result.ends[:, k - 1], ends[lengths - 1], rtol=1e-12, atol=1e-13)
        emitted = (1 - alpha ** (k + 1)) / (1 - alpha)
        later = result.ends[-1, k - 1] - result.ends[-2, k - 1]
        assert 600 / later == pytest.approx(emitted, rel=1e-10)
        hits = result.accepted[-1, k - 1, :k] - result.accepted[-2, k - 1, :k]
        np.testing.assert_allclose(hits / later, alpha ** np.arange(1, k + 1), rtol=1e-10)


def test_acceptance_by_depth_is_the_sum_of_products():
    """a_j at depth j: emitted(K) = 1 + a_0 + a_0 a_1 + ... + a_0..a_{K-1}, and S_k = a_0..a_{k-1}, free of the start."""
    by_depth = np.array([0.9, 0.5, 0.8, 0.1])
    tokens, k_max = 2000, len(by_depth)
    a = np.tile(by_depth, (tokens, 2, 1))
    lengths = np.array([1000, tokens])
    result = chain.run_chain(a, a, lengths, k_max)
    products = np.cumprod(by_depth)
    for k in range(1, k_max + 1):
        ends = np.cumsum(toys.renewal_ends(by_depth[:k], tokens))
        np.testing.assert_allclose(result.ends[:, k - 1], ends[lengths - 1], rtol=1e-12)
        later = result.ends[1, k - 1] - result.ends[0, k - 1]
        assert 1000 / later == pytest.approx(1 + products[:k].sum(), rel=1e-10)
        hits = result.accepted[1, k - 1, :k] - result.accepted[0, k - 1, :k]
        np.testing.assert_allclose(hits / later, products[:k], rtol=1e-10)


def test_a_smaller_k_takes_the_first_depths():
    """Terms by depth made for K = 5 serve K <= 3 as well: what later drafts would do is not looked at."""
    rng, lengths = np.random.default_rng(0), np.array([9, 4, 7])
    a, c = rng.random((2, 9, 3, 5))
    deep, cut = chain.run_chain(a, c, lengths, 3), chain.run_chain(a[..., :3], c[..., :3], lengths, 3)
    assert np.array_equal(deep.ends, cut.ends) and np.array_equal(deep.accepted, cut.accepted)
    assert np.array_equal(deep.ends, chain.run_chain(a, c, lengths, 5).ends[:, :3])


def test_certain_pattern_by_hand():
    """Accept, accept, reject, again and again: cycles are cut by the pattern and by K, as counted by hand.

    K = 1: accepted + bonus, then a rejection: 2 cycles per 3 tokens. K = 2 and 3: one cycle of 3 tokens, whose third is
    the bonus at K = 2 and the correction at K = 3.
    """
    a = np.tile([1.0, 1.0, 0.0], 4)[:, None]
    result = chain.run_chain(a, a, np.array([12]), 3)
    assert result.ends.tolist() == [[8, 4, 4]]
    assert result.accepted.tolist() == [[[4, 0, 0], [4, 4, 0], [4, 4, 0]]]
    assert chain.emitted(result.tokens, result.ends).tolist() == [1.5, 3, 3]


def test_mixture_of_prompts_is_not_pooled():
    """T-04: half the prompts accept 0.9, half 0.5, K = 4. Accepted is 2.016 in the mean over prompts and 1.630 by token
    over texts of equal length; the pooled rate's formula gives 1.773, which is neither."""
    tokens, k = 1000, 4
    a = np.tile([0.9, 0.5], (2 * tokens, 1))
    # the second thousand positions of each text, where its start is forgotten
    ends = chain.run_chain(a, a, whole(a), k).ends - chain.run_chain(a[:tokens], a[:tokens], whole(a[:tokens]), k).ends
    counted = np.full(2, tokens)
    assert round(chain.emitted_prompt_mean(counted, ends)[k - 1] - 1, 3) == 2.016
    assert round(chain.emitted(counted, ends)[k - 1] - 1, 3) == 1.630
    pooled = a.mean()
    assert round((1 - pooled ** (k + 1)) / (1 - pooled) - 1, 3) == 1.773


def test_texts_outside_the_chain_do_not_count():
    """A text that ended at its first token belongs to no cycle: every emitted figure is as if it were not there."""
    a = constant(0.5, 9, 3)
    with_empty = chain.run_chain(a, a, np.array([9, 0, 4]), 3)
    without = chain.run_chain(a[:, :2], a[:, :2], np.array([9, 4]), 3)
    for figure in (chain.emitted, chain.emitted_prompt_mean):
        np.testing.assert_array_equal(figure(with_empty.tokens, with_empty.ends), figure(without.tokens, without.ends))


# ---------------------------------------------------------------- text that ends by EOS


@pytest.mark.parametrize("tokens", range(1, 13))
def test_useful_emitted_of_certain_acceptance(tokens):
    """S-14: draft = target and the text ends by EOS after T chain positions: ceil(T / (K + 1)) cycles were paid for.

    Answers of 4 tokens (the first from prefill, so T = 3) emit 3 per cycle at K = 5, not 6; without EOS the last cycle is
    cut by the length limit and only whole cycles are counted.
    """
    texts = 100
    a = constant(1.0, tokens, texts)
    result = chain.run_chain(a, a, whole(a), K_MAX)
    useful = chain.emitted_useful(result, np.ones(texts, dtype=bool))
    assert useful.tolist() == [tokens / -(-tokens // (k + 1)) for k in range(1, K_MAX + 1)]
    if tokens == 3:
        assert useful[5 - 1] == 3
    cut = chain.run_chain(a, a, whole(a), 1)
    if tokens >= 2:
        assert chain.emitted_useful(cut, np.zeros(texts, dtype=bool)).tolist() == [tokens / (tokens // 2)]


def test_useful_emitted_counts_every_cycle_begun():
    """Constant acceptance: the cycles of a text that ends by EOS are those begun, 1 + ends before its last token."""
    alpha, lengths = 0.6, np.array([1, 3, 10])
    a = constant(alpha, 10, 3)
    result = chain.run_chain(a, a, lengths, 4)
    ended = np.array([True, True, False])
    for k in range(1, 5):
        ends = np.concatenate([[0.0], np.cumsum(toys.renewal_ends(np.full(k, alpha), 10))])
        cycles = (1 + ends[0]) + (1 + ends[2]) + ends[10]
        assert chain.emitted_useful(result, ended)[k - 1] == pytest.approx(14 / cycles, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.985, 1.0])
def test_cut_cycles_counted_whole_give_the_steady_value_at_any_length(alpha):
    """Where every draft is accepted with alpha, (T + R) / (sum e + 1) is the sum of alpha^k exactly, at every length and K.
    T / sum e is not: its shift from 1 to 0.985 is 0.8 to 1.2 of the true one, by where in a cycle the texts end."""
    k_max = 5
    for lengths in ([7], [383], [384], [6, 30, 96]):
        a = np.full((max(lengths), len(lengths)), alpha)
        tokens, cycles = chain.whole(chain.run_chain(a, a, np.array(lengths), k_max))
        truth = [sum(alpha**i for i in range(k + 1)) for k in range(1, k_max + 1)]
        np.testing.assert_allclose(tokens.sum(0) / cycles.sum(0), truth, rtol=1e-12)
    plain = []
    for n in range(378, 384):
        one, most = (chain.run_chain(*np.full((2, n, 1), x), np.array([n]), k_max).ends[0, -1] for x in (1.0, 0.985))
        plain.append((n / most - n / one) / (sum(0.985**i for i in range(6)) - 6))
    assert min(plain) < 0.85 and max(plain) > 1.19


def test_cut_cycles_counted_whole_agree_with_real_cycles():
    """Cycles run on texts of 8 positions, the last one to its end, for every K. The texts accept unlike, and a cut cycle goes
    on at the rates of all: that leaves at most an eighth of the 2 to 5 % that T / sum e is off by."""
    rng = np.random.default_rng(5)
    n, length, k_max = 200_000, 8, 4
    a = rng.uniform(0.3, 1.0, n)
    result = chain.run_chain(*np.broadcast_to(a, (2, length, n)), np.full(n, length), k_max)
    tokens, cycles = (x.sum(0) for x in chain.whole(result))
    for k in range(1, k_max + 1):
        done, count = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
        while (running := done < length).any():
            kept = (rng.random((n, k)) < a[:, None]).cumprod(1).sum(1)
            done, count = done + np.where(running, kept + 1, 0), count + running
        truth = done.sum() / count.sum()
        steady = chain.emitted(result.tokens, result.ends)[k - 1]
        assert abs(tokens[k - 1] / cycles[k - 1] - truth) < abs(steady - truth) / 8 and steady > 1.02 * truth


def until(token, text):
    """Positions up to and with the first `token` of each text; all of them where it does not occur."""
    found = text[1:] == token
    return np.where(found.any(0), found.argmax(0) + 1, len(found))


def cycles_begun(result):
    """Expected cycles of each text [N, K], each taken as ended by EOS."""
    return np.stack(
        [
            n / chain.emitted_useful(replace(result, tokens=n, ends=ends, left=left), np.array([True]))
            for n, ends, left in zip(*(x[:, None] for x in (result.tokens, result.ends, result.left)), strict=True)
        ]
    )


def test_useful_emitted_is_exact_over_every_text_that_stops():
    """Texts stop at EOS, by a law that a cycle's end depends on: averaged over all texts, useful emitted charges exactly
    the cycles begun in them, P(state 0 and not stopped) summed over positions. S-14."""
    eos, tokens, k_max = 2, 6, 4
    start = np.array([0.6, 0.4, 0.0])
    terms = toys.acceptance(P, Q)
    texts, weight = toys.every_text(P, tokens, start)
    texts, weight = texts[:, weight > 0], weight[weight > 0]
    a, b = toys.along(texts, terms.a, terms.b)
    result = chain.run_chain(a, b, until(eos, texts), k_max)
    begun, ends = weight @ cycles_begun(result), weight @ result.ends
    running = np.array([1.0, 1.0, 0.0])
    for k in range(1, k_max + 1):
        law, opened, ended = [start] + [np.zeros(3)] * k, 0.0, 0.0
        for _ in range(tokens):
            opened += law[0].sum()
            moved = [law[j] @ (P * terms.b) for j in range(k)]
            new = sum(law) @ P - sum(moved)
            ended += new.sum()
            law = [x * running for x in (new, *moved)]
        assert ends[k - 1] == pytest.approx(ended, rel=1e-12)
        assert begun[k - 1] == pytest.approx(opened, rel=1e-12)


def test_useful_emitted_equals_real_cycles_cut_at_eos():
    """Texts that stop at an EOS token: useful emitted is tokens up to it over cycles begun, and steady emitted over cycles
    ended, as running real cycles counts them. S-14."""
    rng = np.random.default_rng(51)
    p, q = toys.random_kernel(rng, 4), toys.random_kernel(rng, 4)
    eos, texts, longest, k = 3, 4000, 120, 4
    p[:, eos] = 0.15
    p[:, :eos] *= 0.85 / p[:, :eos].sum(1, keepdims=True)
    start = np.array([1.0, 0.0, 0.0, 0.0])
    terms = toys.acceptance(p, q)

    text, origin = toys.simulate(p, q, PROBABILISTIC, k, texts, longest, rng, start)
    lengths = until(eos, text)
    position = np.arange(1, longest + 1)[:, None]
    ended, begun = (((origin == 0) & (position <= lengths - cut)).sum(0) + cut for cut in (0, 1))
    simulated = [toys.ratio(lengths, ended), toys.ratio(lengths, begun)]

    text = toys.sample_text(p, texts, longest, rng, start)
    lengths = until(eos, text)
    assert lengths.max() < longest
    a, b = toys.along(text, terms.a, terms.b)
    result = chain.run_chain(a, b, lengths, k)
    begun = cycles_begun(result)[:, k - 1]
    useful = chain.emitted_useful(result, np.ones(texts, dtype=bool))[k - 1]
    assert lengths.sum() / begun.sum() == pytest.approx(useful, rel=1e-12)
    assert_agree([toys.ratio(lengths, result.ends[:, k - 1])], simulated[:1], "steady")
    assert_agree([toys.ratio(lengths, begun)], simulated[1:], "useful")


# ---------------------------------------------------------------- an arm on the baseline's text


def shifts(epsilon, k):
    """Exact shifts of the arm P + epsilon * TILT at K = k, minus the change of contexts where there is a true one.

    Returns (true shift, change of contexts, control form, own b, b alone). The change of contexts is the baseline's
    emitted on the arm's text, by the same control form, minus its emitted on its own.
    """
    arm, base = P + epsilon * TILT, toys.own_text(P, Q, k)
    return (
        toys.own_text(arm, Q, k) - base,
        toys.other_text(arm, P, Q, k) - base,
        toys.other_text(P, arm, Q, k) - base,
        toys.own_b(P, arm, Q, k) - base,
        toys.b_alone(P, arm, Q, k) - base,
    )


@pytest.mark.parametrize("k", [1, 3, 5])
def test_control_form_recovers_the_shift(k):
    """On the baseline's text the control form has the true shift's sign, and with the change of contexts its value; the
    arm's own b gives well over 1.5 times the shift, and b in both places the wrong sign."""
    true, contexts, control, own_b, b_alone = shifts(EPS, k)
    assert true < 0 and control < 0
    left, left_own_b, left_b_alone = (abs(true - contexts - x) for x in (control, own_b, b_alone))
    assert left < 0.05 * abs(true)
    assert own_b / true > 1.5 and left_own_b > 20 * left
    assert b_alone > 0 and left_b_alone > 20 * left
    assert abs(true - control) < abs(contexts)  # what the same text leaves out is the change of contexts


@pytest.mark.parametrize("k", [1, 3, 5])
def test_control_form_errs_at_second_order_only(k):
    """As the perturbation halves, the control form's error falls to a quarter; the wrong forms' to a half, staying a fixed
    share of the shift itself."""
    large, small = shifts(1 / 64, k), shifts(1 / 128, k)

    def errors(s):
        true, contexts, *forms = s
        return np.array([true - contexts - x for x in forms])

    ratio = errors(small) / errors(large)
    assert ratio[0] == pytest.approx(0.25, abs=0.005)
    np.testing.assert_allclose(ratio[1:], 0.5, atol=0.02)
    share = np.abs(errors(small) / small[0])
    assert share[0] < 0.005
    assert (share[1:] > 0.4).all()
    assert small[4] > 0 > small[0]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_control_form_is_exact_when_contexts_are_alike(k):
    """Where every context accepts alike there is no change of contexts: the control form gives the whole shift exactly, by
    the closed form, at any size of the perturbation; the wrong forms do not."""
    p, q, arm = (toys.circulant(np.array(r)) for r in ([0.5, 0.3, 0.2], [0.3, 0.2, 0.5], [0.6, 0.15, 0.25]))
    alpha = np.minimum(arm[0], q[0]).sum()
    emitted = sum(alpha**j for j in range(k + 1))
    assert toys.own_text(arm, q, k) == pytest.approx(emitted, rel=1e-12)
    assert toys.other_text(p, arm, q, k) == pytest.approx(emitted, rel=1e-12)
    shift = emitted - toys.own_text(p, q, k)
    assert abs(toys.own_b(p, arm, q, k) - emitted) > 0.1 * abs(shift)
    assert abs(toys.b_alone(p, arm, q, k) - emitted) > 0.1 * abs(shift)


def test_mean_of_the_control_is_a():
    """Given the prefix, c averages to a(arm) over the baseline's text for every rule; the arm's own b does not."""
    arm = P + EPS * TILT
    for rule in toys.RULES:
        base, other = toys.acceptance(P, Q, rule), toys.acceptance(arm, Q, rule)
        c = chain.control(base.b, base.a[:, None], other.a[:, None])
        np.testing.assert_allclose((P * c).sum(-1), other.a, rtol=1e-14)
        if rule[1] == "standard":
            assert np.abs((P * other.b).sum(-1) - other.a).max() > 0.01


def test_expectation_over_every_text_is_the_control_form():
    """Averaged over all texts, the chain with control values is the exact expectation to rounding, c outside [0, 1] and
    not clipped; so is the wrong form's, which keeps the two apart."""
    arm, start = P + 2 * EPS * TILT, np.array([0.2, 0.5, 0.3])
    base, other = toys.acceptance(P, Q), toys.acceptance(arm, Q)
    c = toys.control(base, other)
    assert c.max() > 1  # b is 1 where q exceeds p, and some context accepts more under the arm
    texts, weight = toys.every_text(P, 6, start)
    a0, b0 = toys.along(texts, base.a, base.b)
    a, b = toys.along(texts, other.a, other.b)
    right = chain.run_chain(a, chain.control(b0, a0, a), whole(a), 5)
    wrong = chain.run_chain(a, b, whole(a), 5)
    for k in range(1, 6):
        ends, accepted = toys.expect(P, other.a, c, k, 6, start)
        assert weight @ right.ends[:, k - 1] == pytest.approx(ends, rel=1e-12)
        np.testing.assert_allclose(weight @ right.accepted[:, k - 1, :k], accepted, rtol=1e-12)
        ends, _ = toys.expect(P, other.a, other.b, k, 6, start)
        assert weight @ wrong.ends[:, k - 1] == pytest.approx(ends, rel=1e-12)


def test_sampled_text_converges_to_the_control_form():
    """On 2e5 sampled tokens the chain with control values agrees with the exact expectation, within 4 standard errors of
    the paired shift, and those are small enough to tell it from the wrong forms."""
    rng = np.random.default_rng(61)
    texts, tokens, k_max = 400, 500, 5
    arm, start = P + EPS * TILT, toys.stationary(P)
    base, other = toys.acceptance(P, Q), toys.acceptance(arm, Q)
    text = toys.sample_text(P, texts, tokens, rng, start)
    a0, b0 = toys.along(text, base.a, base.b)
    a, b = toys.along(text, other.a, other.b)
    ends0 = chain.run_chain(a0, b0, whole(a), k_max).ends
    ends = chain.run_chain(a, chain.control(b0, a0, a), whole(a), k_max).ends
    wrong = chain.run_chain(a, b, whole(a), k_max).ends
    for k in (1, 3, 5):
        before, _ = toys.expect(P, base.a, base.b, k, tokens, start)
        after, _ = toys.expect(P, other.a, toys.control(base, other), k, tokens, start)
        gap = ends[:, k - 1] - ends0[:, k - 1]
        se = gap.std(ddof=1) / np.sqrt(texts)
        assert abs(gap.mean() - (after - before)) < 4 * se
        assert abs((wrong - ends0)[:, k - 1].mean() - (after - before)) > 8 * se


def test_analysis_gives_every_arm_the_baselines_b():
    """`analyse` moves arms by control values, except those that sampled the text themselves, which keep their own b.

    Texts are ragged and unsorted; figures equal chains run by hand from the toy's kernels.
    """
    rng = np.random.default_rng(71)
    arm, draft = P + EPS * TILT, 0.5 * Q + 0.5 * P
    kernels = {"bf16+bf16": (P, Q), "fp8+bf16": (arm, Q), "bf16+fp8": (P, draft)}
    lengths = [7, 30, 1, 12]
    responses = [toys.sample_text(P, 1, n, rng, toys.stationary(P))[:, 0] for n in lengths]
    texts = [
        Text(Prompt(str(i), f"doc{i % 2}", None, (0,)), tuple(int(x) for x in r), "bf16+bf16", False)
        for i, r in enumerate(responses)
    ]
    last = np.concatenate([r[:-1] for r in responses])
    token = np.concatenate([r[1:] for r in responses])
    columns = {}
    for name, (p, q) in kernels.items():
        logp, logq = (torch.from_numpy(np.log(m[last])) for m in (p, q))
        scores = score_positions(logp, logq, torch.from_numpy(token), logp, torch.zeros(len(token)), Rule())
        columns[name] = {k: v.numpy() for k, v in vars(scores).items()}
    done = analyse(texts, columns, "bf16+bf16", Rule(), 3, seed=0, draws=50)

    terms = {name: toys.acceptance(p, q) for name, (p, q) in kernels.items()}
    moves = {
        "bf16+bf16": terms["bf16+bf16"].b,
        "fp8+bf16": toys.control(terms["bf16+bf16"], terms["fp8+bf16"]),
        "bf16+fp8": terms["bf16+fp8"].b,
    }
    for name, c in moves.items():
        for i, r in enumerate(responses):
            a_t, c_t = toys.along(r[:, None], terms[name].a, c)
            alone = chain.run_chain(a_t, c_t, whole(a_t), 3)
            np.testing.assert_allclose(done.arms[name].result.ends[i], alone.ends[0], rtol=1e-12)
        by_hand = done.arms[name].result.ends.sum(0)
        np.testing.assert_allclose(done.arms[name].sums.ends.sum(0), by_hand, rtol=1e-12)
        assert done.arms[name].emitted(0) == 1
        assert done.arms[name].emitted(3) == pytest.approx(sum(lengths) / by_hand[2], rel=1e-12)
        assert done.shift(name, 3).value == pytest.approx(
            done.arms[name].emitted(3) - done.arms["bf16+bf16"].emitted(3)
        )
    assert done.arms["bf16+bf16"].sums.tokens.tolist() == [8, 42]


def test_by_hand_enumeration_of_coins():
    """With coins 0 or 1 for a and c, the chain counts the very cycles of a loop that walks the text. S-01."""
    for coins in itertools.product([0.0, 1.0], repeat=7):
        a = np.array(coins)[:, None]
        result = chain.run_chain(a, a, np.array([7]), 3)
        for k in (1, 2, 3):
            ends, accepted, state = 0, [0] * k, 0
            for coin in coins:
                if state < k and coin:
                    accepted[state] += 1
                    state += 1
                else:
                    ends, state = ends + 1, 0
            assert result.ends[0, k - 1] == ends
            assert result.accepted[0, k - 1, :k].tolist() == accepted
