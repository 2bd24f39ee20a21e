"""Acceptance rules against values worked out by hand and against brute force."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specq.acceptance import (
    accepted_prefix,
    residual,
    score_positions,
    verify_cycle,
)
from specq.counters import CycleCounts
from specq.errors import SpecqError
from specq.rules import Rule, Transform, acceptance_terms
from specq.sampling import inverse_cdf, log_probs

PROBABILISTIC, GREEDY = Rule(), Rule("greedy")
STRICT, STRICT_GREEDY = Rule("probabilistic", "strict"), Rule("greedy", "strict")
RULES = [PROBABILISTIC, GREEDY, STRICT, STRICT_GREEDY]


def log(values):
    return torch.tensor(values, dtype=torch.float32).log()


def scores(p, q, tokens=(0,), rule=PROBABILISTIC, u=None):
    """Scores of one (p, q) at the given text tokens."""
    n = len(tokens)
    logp, logq = log([p] * n), log([q] * n)
    uniforms = torch.full((n,), 0.5) if u is None else u
    return score_positions(logp, logq, torch.tensor(tokens), logp, uniforms, rule)


def alpha(p, q, rule):
    s = scores(p, q, rule=rule)
    return acceptance_terms(vars(s), torch.tensor([0]), rule)[0].item()


def test_s01_only_the_accepted_prefix_counts():
    """S-01: coin flips [[1,0,1],[1,1,1]] accept 1 and 3, total 4, per position [2,1,1]; emitted 3.0 on average."""
    coins = torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.bool)
    assert accepted_prefix(coins).tolist() == [1, 3]
    counts = CycleCounts.of_cycles(coins.tolist())
    assert (counts.accepted, counts.per_position) == (4, (2, 1, 1))
    assert (counts.mean_accepted, counts.mean_emitted) == (2.0, 3.0)


def test_s02_a_greedy_draft_is_one_hot():
    """S-02: logits [2,1.5,1,.5] against uniform p: sampled draft 0.7689, argmax draft 0.25, never 0.25/0.4551."""
    q = torch.tensor([2.0, 1.5, 1.0, 0.5]).softmax(-1).tolist()
    p = [0.25] * 4
    assert alpha(p, q, PROBABILISTIC) == pytest.approx(0.7689, abs=5e-5)
    assert alpha(p, q, GREEDY) == pytest.approx(0.25)
    greedy = scores(p, q, rule=GREEDY)
    assert float(greedy.ratio) == pytest.approx(0.25) and int(greedy.draft_token) == 0


def test_s03_the_transform_applies_to_both_sides():
    """S-03: top_k=2 on both sides gives 0.375, on one 0.5, on none 0.7; T=0.5 on both 0.4474, on p alone 0.5421."""
    p, q = log([0.5, 0.3, 0.2]), log([0.2, 0.3, 0.5])

    def a(tp, tq):
        return float(1 - 0.5 * (log_probs(p, tp).exp() - log_probs(q, tq).exp()).abs().sum())

    none, top2, cold = Transform(), Transform(top_k=2), Transform(temperature=0.5)
    assert a(top2, top2) == pytest.approx(0.375)
    assert a(top2, none) == pytest.approx(0.5)
    assert a(none, none) == pytest.approx(0.7)
    assert a(cold, cold) == pytest.approx(0.4474, abs=5e-5)
    assert a(cold, none) == pytest.approx(0.5421, abs=5e-5)


def test_s03_a_draft_outside_the_targets_support_has_ratio_zero():
    """S-03: p' = (.625,.375,0), q' = (0,.375,.625): drafting token 2 logs ratio exactly 0, not NaN; b stays in [0,1]."""
    s = scores([0.625, 0.375, 0.0], [0.0, 0.375, 0.625], tokens=(0, 1), u=torch.tensor([0.99, 0.99]))
    assert s.draft_token.tolist() == [2, 2] and s.ratio.tolist() == [0.0, 0.0]
    a, b = acceptance_terms(vars(s), torch.tensor([0, 1]), PROBABILISTIC)
    assert a.tolist() == pytest.approx([0.375, 0.375]) and b.tolist() == [0.0, 1.0]


def test_text_outside_the_support_gives_limits_and_no_nan():
    """A token the target could not have emitted (rank flipped at the edge of top-k): b is 1 if q has it, else 0."""
    s = scores([1.0, 0.0, 0.0], [0.5, 0.5, 0.0], tokens=(1, 2))
    for rule in RULES:
        a, b = acceptance_terms(vars(s), torch.tensor([1, 2]), rule)
        assert np.isfinite(a).all() and np.isfinite(b).all()
    assert acceptance_terms(vars(s), torch.tensor([1, 2]), PROBABILISTIC)[1].tolist() == [1.0, 0.0]


def test_s04_three_rules_three_numbers():
    """S-04: p=(.6,.3,.1), q=(.3,.6,.1): probabilistic .70, one-hot draft .30, strict .37, strict with one-hot .30."""
    p, q = [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]
    assert [alpha(p, q, r) for r in RULES] == pytest.approx([0.70, 0.30, 0.37, 0.30])
    assert len({r.name for r in RULES}) == 4


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_b_averages_to_a_over_the_targets_own_token(rule):
    """E over x ~ p of b(x) is a, for every rule: what makes b usable on text that the target sampled."""
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        p, q = (torch.rand(6, generator=g, dtype=torch.float64).pow(2) for _ in range(2))
        p, q = p / p.sum(), q / q.sum()
        s = score_positions(
            p.log().repeat(6, 1), q.log().repeat(6, 1), torch.arange(6), p.log().repeat(6, 1), torch.rand(6), rule
        )
        a, b = acceptance_terms(vars(s), torch.arange(6), rule)
        assert float((p.numpy() * b).sum()) == pytest.approx(float(a[0]), abs=1e-12)


def test_all_rules_agree_at_temperature_zero():
    """S-04, S-05: at T = 0 both sides are one-hot and a, b are 0 or 1 under every rule, the same ones."""
    g = torch.Generator().manual_seed(2)
    zero = Transform(temperature=0.0)
    logp, logq = (log_probs(torch.randn(50, 7, generator=g), zero) for _ in range(2))
    tokens = logp.argmax(-1)
    s = score_positions(logp, logq, tokens, logp, torch.rand(50, generator=g), PROBABILISTIC)
    results = [acceptance_terms(vars(s), tokens, r) for r in RULES]
    for a, b in results:
        assert set(a.tolist()) <= {0.0, 1.0} and np.array_equal(a, results[0][0])
        assert np.array_equal(a, b)
    assert 0 < results[0][0].sum() < 50 and set(s.ratio.tolist()) == {0.0, 1.0}


def test_equal_p_and_q_accept_exactly():
    """Check 1 at one position: bit-equal distributions give alpha and ratio of exactly 1, not 1 - 1e-7."""
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(3)) * 4
    logp = log_probs(logits, Transform())
    s = score_positions(logp, logp, logits.argmax(-1), logp, torch.rand(200), PROBABILISTIC)
    assert (s.alpha == 1).all() and (s.ratio == 1).all() and (s.kl == 0).all() and s.top1_agrees.all()


def test_columns_against_naive_definitions():
    """alpha, strict, entropy and KL against sums written out in float64."""
    g = torch.Generator().manual_seed(4)
    x, y, z = (torch.randn(30, 40, generator=g, dtype=torch.float64) for _ in range(3))
    p, q, base = (t.softmax(-1) for t in (x, y, z))
    s = score_positions(p.log(), q.log(), torch.zeros(30, dtype=torch.long), base.log(), torch.rand(30), PROBABILISTIC)
    assert torch.allclose(s.alpha, torch.minimum(p, q).sum(-1))
    assert torch.allclose(s.alpha_strict, (p * q).sum(-1))
    assert torch.allclose(s.alpha_greedy, p[torch.arange(30), q.argmax(-1)])
    assert torch.allclose(s.entropy, -(p * p.log()).sum(-1))
    assert torch.allclose(s.kl, (base * (base / p).log()).sum(-1))


def test_s06_residual_is_normalised_not_softmaxed():
    """S-06: p=(.6,.3,.1), q=(.3,.6,.1): the residual is (1,0,0)."""
    r = residual(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.6, 0.1]))
    assert r.tolist() == [1.0, 0.0, 0.0]
    assert residual(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_s06_the_first_emitted_token_follows_p(rule):
    """S-06: over 1e5 one-step runs the first emitted token is distributed as p (chi-square), under every rule."""
    n = 100_000
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.35, 0.3, 0.2, 0.1, 0.05], [0.1, 0.15, 0.2, 0.25, 0.3]))
    g = torch.Generator().manual_seed(5)
    if rule.draft_sampling == "greedy":
        drafted = torch.full((n, 1), int(q.argmax()))
    else:
        drafted = inverse_cdf(q.expand(n, 5), torch.rand(n, generator=g, dtype=torch.float64))[:, None]
    accepted, final = verify_cycle(p.expand(n, 2, 5), q.expand(n, 1, 5), drafted, rule, g)
    first = torch.where(accepted > 0, drafted[:, 0], final)
    assert chisquare(torch.bincount(first, minlength=5).numpy(), (p * n).numpy()).pvalue > 0.001
    a = alpha(p.tolist(), q.tolist(), rule)
    assert abs(accepted.double().mean() - a) < 4 * math.sqrt(a * (1 - a) / n)


def test_s06_the_correction_comes_from_the_position_of_the_rejection():
    """S-06: p_i one-hot on token i, draft [0,1,9,3]: two accepted, and the correction is token 2."""
    p = torch.eye(10)[None, :5]
    q = torch.full((1, 4, 10), 0.1)
    accepted, final = verify_cycle(p, q, torch.tensor([[0, 1, 9, 3]]), PROBABILISTIC, torch.Generator().manual_seed(0))
    assert (accepted.item(), final.item()) == (2, 2)
    accepted, final = verify_cycle(p, q, torch.tensor([[0, 1, 2, 3]]), PROBABILISTIC, torch.Generator().manual_seed(0))
    assert (accepted.item(), final.item()) == (4, 4)


def test_s28_unequal_cycles_keep_their_denominators():
    """S-28: 87 drafts, 259 drafted, 167 accepted, per position 70, 55, 42."""
    c = CycleCounts(87, 259, 167, (70, 55, 42))
    assert c.acceptance_rate == pytest.approx(0.6448, abs=5e-5)
    assert c.mean_emitted == pytest.approx(2.9195, abs=5e-5)
    assert c.marginal == pytest.approx([0.805, 0.632, 0.483], abs=5e-4)
    assert c.conditional[1] == pytest.approx(55 / 70)
    built = CycleCounts.of_cycles([[True, True, False], [True], [], [False, True]])
    assert (built.drafts, built.drafted, built.accepted, built.per_position) == (3, 6, 3, (2, 1, 0))


@pytest.mark.parametrize(
    "counts",
    [(10, 30, 9, (5, 6)), (10, 30, 9, (5, 3)), (4, 30, 5, (5,)), (10, 4, 5, (5,)), (10, 30, -1, ())],
)
def test_counts_that_contradict_themselves_are_refused(counts):
    """Check 5: per-position counts never rise and sum to the accepted total; otherwise no number, but an error."""
    with pytest.raises(SpecqError, match="inconsistent"):
        CycleCounts(*counts)
