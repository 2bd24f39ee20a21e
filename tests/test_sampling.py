"""Transforms and samplers: exact supports, no overflow, ties and couplings."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import chisquare

from specq.rules import Transform
from specq.sampling import fit_width, gumbel_choice, inverse_cdf, log_probs, stream

logits_strategy = st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=12)


def test_s05_greedy_takes_the_lowest_of_equal_maxima():
    """S-05: T = 0 is argmax, ties go to the lowest id, every run; no inf minus inf anywhere."""
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1e30, 1e30, 0.0, 1e30]])
    out = log_probs(x, Transform(temperature=0.0)).exp()
    assert out.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]


@settings(max_examples=200, deadline=None)
@given(logits=logits_strategy, scale=st.sampled_from([1.0, 1e3, 1e30]))
def test_s05_tiny_temperatures_never_overflow_and_agree_with_greedy(logits, scale):
    """S-05: T = 1e-6 gives finite probabilities that sum to 1, and the greedy choice when the margin is over 1e-3."""
    x = torch.tensor(logits) * scale
    for temperature in (1e-6, 2e-5):
        p = log_probs(x, Transform(temperature=temperature)).exp()
        assert torch.isfinite(p).all() and float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    top = x.sort(descending=True).values
    if top[0] - top[1] > 1e-3:
        assert torch.equal(log_probs(x, Transform(temperature=1e-6)), log_probs(x, Transform(temperature=0.0)))


@settings(max_examples=200, deadline=None)
@given(logits=logits_strategy, k=st.integers(1, 12), top_p=st.floats(0.01, 1.0), t=st.floats(0.1, 3.0))
def test_transform_keeps_a_normalised_prefix_of_the_ranking(logits, k, top_p, t):
    """Top-k then top-p: what stays is the top of the ranking, its mass reaches top_p, and it sums to 1."""
    x = torch.tensor(logits)
    p = log_probs(x, Transform(t, k, top_p)).exp()
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    kept = p > 0
    if kept.all():
        return
    shifted = x - x.max()  # what the transform ranks: differences below its rounding are ties
    assert shifted[kept].min() >= shifted[~kept].max()
    within_k = log_probs(x, Transform(t, k)).exp()
    if top_p < 1:
        assert float(within_k[kept].sum()) >= top_p - 1e-5
        dropped_one_more = within_k[kept].sum() - within_k[kept].min()
        assert float(dropped_one_more) < top_p + 1e-5


def test_top_p_edge_cases():
    """top_p keeps the id that crosses the threshold, always at least one, and composes with top_k by renormalising."""
    x = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (log_probs(x, Transform(top_p=0.5)).exp() > 0).tolist() == [True, False, False, False]
    assert (log_probs(x, Transform(top_p=0.6)).exp() > 0).tolist() == [True, True, False, False]
    assert (log_probs(x, Transform(top_p=1e-9)).exp() > 0).tolist() == [True, False, False, False]
    both = log_probs(x, Transform(top_k=3, top_p=0.8)).exp()
    assert (both > 0).tolist() == [True, True, False, False]  # .8/.95 of the top 3 is reached by two
    assert both[:2].tolist() == pytest.approx([0.625, 0.375])


def test_nan_rows_stay_nan():
    """A NaN logit is never turned into a token: the row's log-probabilities are NaN for the caller to refuse."""
    x = torch.zeros(2, 4)
    x[1, 2] = float("nan")
    for t in (Transform(), Transform(0.0), Transform(1.0, 2, 0.5)):
        out = log_probs(x, t)
        assert not out[0].isnan().any() and out[1].isnan().any()


def test_fit_width_cuts_and_pads():
    """Ids beyond the tokenizer are cut; ids a model has no logit for get probability 0."""
    x = torch.arange(4.0)
    assert fit_width(x, 3).tolist() == [0, 1, 2]
    padded = log_probs(fit_width(x, 6), Transform()).exp()
    assert padded[4:].tolist() == [0, 0] and torch.allclose(padded[:4], x.softmax(-1))


def test_inverse_cdf_never_draws_the_impossible():
    """Ids of probability 0 are not drawn, at u = 0, at u just below 1, or between."""
    p = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(5, 5)
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(p, u).tolist() == [1, 1, 3, 3, 3]


def test_samplers_follow_their_distribution():
    """Both samplers draw from p (chi-square at 5e4 draws)."""
    n, p = 50_000, torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    noise = torch.empty(n, 4, dtype=torch.float64).exponential_(generator=g)
    for drawn in (
        gumbel_choice(p.log().expand(n, 4), noise),
        inverse_cdf(p.expand(n, 4), torch.rand(n, generator=g, dtype=torch.float64)),
    ):
        assert chisquare(torch.bincount(drawn, minlength=4).numpy(), (p * n).numpy()).pvalue > 0.001


def test_gumbel_coupling_parts_only_where_distributions_do():
    """Shared noise: equal distributions give equal tokens; close ones agree at least with probability 1 - 2 TV."""
    g = torch.Generator().manual_seed(1)
    noise = torch.empty(20_000, 50).exponential_(generator=g)
    x = torch.randn(50, generator=g)
    p, q = x.log_softmax(-1), (x + 0.05 * torch.randn(50, generator=g)).log_softmax(-1)
    a, b = (gumbel_choice(d.expand(20_000, 50), noise) for d in (p, q))
    assert torch.equal(a, gumbel_choice(p.expand(20_000, 50), noise))
    tv = 0.5 * float((p.exp() - q.exp()).abs().sum())
    assert float((a != b).float().mean()) <= 2 * tv


def test_streams_are_named_and_repeatable():
    """The same names give the same numbers, other names other numbers, whatever was drawn before."""
    a, b = torch.rand(4, generator=stream(0, "text", "x")), torch.rand(4, generator=stream(0, "text", "x"))
    assert torch.equal(a, b)
    assert not torch.equal(a, torch.rand(4, generator=stream(0, "text", "y")))
    assert not torch.equal(a, torch.rand(4, generator=stream(1, "text", "x")))
