"""Intervals: coverage on synthetic studies with known truth, exact identities, and independent references."""

from dataclasses import dataclass

import numpy as np
import pytest
import toys
from scipy.stats import norm
from scipy.stats import t as student

from specq import chain
from specq.stats import (
    Documents,
    Estimate,
    Resampler,
    Sums,
    bootstrap_weights,
    documents_needed,
    mean_excess,
    ratio_terms,
    significant,
)

K_MAX = 4
STUDIES, DOCUMENTS, DRAWS = 400, 30, 500


# ---------------------------------------------------------------- synthetic studies


@dataclass(frozen=True)
class Population:
    """Documents to draw studies from: acceptance rate, text length and the arm's shift of acceptance, each [D]."""

    rate: np.ndarray
    length: np.ndarray
    shift: np.ndarray

    def emitted(self, shift):
        """Exact emitted for K = 1..K_MAX over the whole population, rates shifted by `shift`.

        Positions of a document are independent given its rate and their values enter the chain linearly, so expected
        ends are those of a constant rate: a renewal recursion.
        """
        ends = []
        for k in range(1, K_MAX + 1):
            sums = np.cumsum(toys.renewal_ends(np.tile(self.rate + shift, (k, 1)), self.length.max()), axis=0)
            ends.append(sums[self.length - 1, np.arange(len(self.length))].sum())
        return self.length.sum() / np.array(ends)


def population(law):
    """2000 documents: rates Beta(6, 3), lengths 16..256 that grow with the rate, shifts of a few thousandths."""
    rng = np.random.default_rng(7)
    rate = rng.beta(6, 3, 2000)
    length = np.exp(rng.normal(4.2 + 2 * (rate - 0.66), 0.5)).clip(16, 256).astype(int)
    shift = rng.normal(-0.006, 0.012, 2000) if law == "normal" else -rng.exponential(0.01, 2000)
    return Population(rate, length, shift)


@dataclass(frozen=True)
class Study:
    """One synthetic study: per-document sums of the baseline, a shifted arm, the null arm and its twin."""

    base: Sums
    arm: Sums
    null: Sums
    twin: Sums


def run_studies(pop, seed):
    """STUDIES studies of DOCUMENTS documents, all scored by the chain on the same texts within a study.

    a_t is Beta around the document's rate, b_t a coin of that mean, and every arm but the baseline has rounding noise of
    its own at every position, widest where acceptance is undecided. The null arm and its twin have no shift.
    """
    rng = np.random.default_rng(seed)
    pick = rng.integers(0, len(pop.rate), STUDIES * DOCUMENTS)
    rate, lengths = pop.rate[pick], pop.length[pick]
    shape = (lengths.max(), len(pick))
    a0 = rng.beta(8 * rate, 8 * (1 - rate), shape)
    b0 = (rng.random(shape) < a0).astype(float)

    def score(shift, noise):
        a = a0 + shift + noise * a0 * (1 - a0) * rng.standard_normal(shape)
        return chain.run_chain(a, chain.control(b0, a0, a), lengths, K_MAX).ends.reshape(STUDIES, DOCUMENTS, K_MAX)

    tokens = lengths.reshape(STUDIES, DOCUMENTS).astype(float)
    arms = (score(0.0, 0.0), score(pop.shift[pick], 0.12), score(0.0, 0.12), score(0.0, 0.12))
    return [Study(*(Sums(tokens[s], ends[s]) for ends in arms)) for s in range(STUDIES)]


@pytest.fixture(scope="module", params=["normal", "skewed"])
def studied(request):
    """(population, its studies): document effects on the shift are normal or one-sided."""
    pop = population(request.param)
    return pop, run_studies(pop, seed=8)


def share(events):
    """Share of studies per K, [K_MAX], from a list of [K_MAX] verdicts."""
    return np.mean(events, axis=0)


def covers(estimate, truth):
    return estimate.lo <= truth <= estimate.hi


KS = range(1, K_MAX + 1)


def test_interval_of_the_shift_covers_the_truth(studied):
    """Over 400 studies of 30 documents the 95 % interval holds the true shift in 92 to 98 %, for every K, whether or not
    the null arm is taken off; the truth is exact."""
    pop, studies = studied
    truth = pop.emitted(pop.shift) - pop.emitted(0.0)
    assert (np.abs(truth) < 0.06).all() and (truth < 0).all()
    plain, beyond = [], []
    for seed, s in enumerate(studies):
        r = Resampler(DOCUMENTS, DRAWS, seed)
        plain.append([covers(r.shift(s.arm, s.base, k), truth[k - 1]) for k in KS])
        beyond.append([covers(r.shift(s.arm, s.null, k), truth[k - 1]) for k in KS])
    for what in (plain, beyond):
        assert ((share(what) >= 0.92) & (share(what) <= 0.98)).all(), share(what)


def test_interval_of_emitted_covers_the_truth(studied):
    """The interval of an absolute emitted, with unequal lengths that go with acceptance, covers in 92 to 98 % as well."""
    pop, studies = studied
    truth = pop.emitted(0.0)
    held = [
        [covers(r.emitted(s.base, k), truth[k - 1]) for k in KS]
        for s, r in ((s, Resampler(DOCUMENTS, DRAWS, seed)) for seed, s in enumerate(studies))
    ]
    assert ((share(held) >= 0.92) & (share(held) <= 0.98)).all(), share(held)


FEW_LAWS = {  # shifts of documents, in units of the mean shift; name: (law, least and largest coverage of 5 to 12 documents)
    "normal": (lambda rng, n: rng.normal(1.0, 1.0, n), (0.92, 0.99)),
    "exponential": (lambda rng, n: rng.exponential(1.0, n), (0.92, 0.99)),
    "log-normal": (lambda rng, n: rng.lognormal(-(1.5**2) / 2, 1.5, n), (0.80, 0.90)),
    "one in ten": (lambda rng, n: (rng.random(n) < 0.1) * rng.gamma(4, 2.5, n) + rng.normal(0, 0.25, n), (0.40, 0.75)),
}


@pytest.mark.parametrize("law", FEW_LAWS)
def test_coverage_with_few_documents_is_as_documented(law):
    """docs/method.md: 5 to 12 documents serve where shifts differ moderately; where rare documents carry all, they do not."""
    draw, (least, largest) = FEW_LAWS[law]
    rng, mean = np.random.default_rng(1), -0.01
    for n in (5, 8, 12):
        r, held = Resampler(n, 500, 0), []
        tokens, ends = np.full(n, 256.0), np.full((n, 1), 100.0)
        for _ in range(400):
            shifted = tokens[:, None] / (tokens[:, None] / ends + mean * draw(rng, n)[:, None])
            truth = mean  # equal baselines: the mean of documents' shifts, to first order
            held.append(covers(r.shift(Sums(tokens, shifted), Sums(tokens, ends), 1), truth))
        assert least <= np.mean(held) <= largest, (n, np.mean(held))


def test_noise_alone_is_seldom_significant(studied):
    """An arm that only has noise is called significant in at most 6 % of studies, against the baseline or a null. S-17."""
    _, studies = studied
    against_base, against_null = [], []
    for seed, s in enumerate(studies):
        r = Resampler(DOCUMENTS, DRAWS, seed)
        against_base.append([r.shift(s.null, s.base, k).excludes_zero for k in KS])
        against_null.append([significant(r.shift(s.twin, s.base, k), r.shift(s.twin, s.null, k)) for k in KS])
    for what in (against_base, against_null):
        assert (share(what) <= 0.06).all(), share(what)


# ---------------------------------------------------------------- independent references


def sums(rng, documents, noise=0.1):
    """Two arms of one study: tokens shared, ends that go with them, unequal documents."""
    tokens = rng.integers(30, 200, documents).astype(float)
    per_cycle = rng.uniform(1.5, 4.0, (documents, 1)) * np.array([0.7, 1.0])
    base = tokens[:, None] / per_cycle
    return Sums(tokens, base * (1.02 + noise * rng.standard_normal((documents, 1)))), Sums(tokens, base)


def emitted_of(s, k, weights=None):
    w = np.ones(len(s.tokens)) if weights is None else weights
    return (w @ s.tokens) / (w @ s.ends[:, k - 1])


@pytest.mark.parametrize("k", [1, 2])
def test_standard_error_agrees_with_bootstrap_and_jackknife(k):
    """With 100 documents the delta method's standard error is the jackknife's within 2 % and the bootstrap's spread within
    5 %, for an absolute value and for a paired shift. Both references are computed here."""
    arm, base = sums(np.random.default_rng(1), 100)
    r = Resampler(100, draws=20_000, seed=2)
    left_out = 1.0 - np.eye(100)
    for estimate, value in (
        (r.emitted(base, k), lambda w: emitted_of(base, k, w)),
        (r.shift(arm, base, k), lambda w: emitted_of(arm, k, w) - emitted_of(base, k, w)),
    ):
        assert estimate.value == pytest.approx(value(None), rel=1e-12)
        jackknife = np.array([value(w) for w in left_out])
        assert estimate.se == pytest.approx(np.sqrt(99 / 100 * ((jackknife - jackknife.mean()) ** 2).sum()), rel=0.02)
        assert estimate.se == pytest.approx(value(r.weights).std(), rel=0.05)


def test_residuals_are_what_leaving_a_document_out_changes():
    """The leverage-corrected residual of a document is M minus M without it, exactly; residuals before correction sum to
    0, so no document's influence is lost."""
    _, base = sums(np.random.default_rng(3), 12)
    m, residuals = ratio_terms(base.tokens, base.ends[:, 0], np.ones((1, 12)))
    without = np.array([emitted_of(base, 1, w) for w in 1.0 - np.eye(12)])
    np.testing.assert_allclose(residuals[0], m[0] - without, rtol=1e-10)
    rest = base.ends[:, 0].sum() - base.ends[:, 0]
    assert (residuals[0] * rest).sum() == pytest.approx(0, abs=1e-9 * base.tokens.sum())


def test_interval_is_at_least_students():
    """Both sides reach at least Student's t times the standard error, with documents - 1 degrees of freedom."""
    quantile = {5: 2.7764451, 30: 2.0452296}  # t tables, 0.975
    for documents, t in quantile.items():
        arm, base = sums(np.random.default_rng(4), documents)
        e = Resampler(documents, DRAWS, 5).shift(arm, base, 2)
        assert e.lo <= e.value - t * e.se * (1 - 1e-7)
        assert e.hi >= e.value + t * e.se * (1 - 1e-7)


def test_interval_reaches_further_on_the_side_of_the_tail():
    """Documents with a long tail to the right may lack their largest ones, so the truth is more likely above: the interval
    of their mean reaches further up, and mirrored documents' further down by the same."""
    tokens = np.random.default_rng(17).exponential(100, 30)
    one, mirrored = (Sums(t, np.full((30, 1), 50.0)) for t in (tokens, 1000 - tokens))
    r = Resampler(30, DRAWS, 0)
    up, down = r.emitted(one, 1), r.emitted(mirrored, 1)
    assert up.hi - up.value > 1.1 * (up.value - up.lo)
    assert down.value - down.lo == pytest.approx(up.hi - up.value, rel=1e-9)
    assert down.hi - down.value == pytest.approx(up.value - up.lo, rel=1e-9)


def test_pairing_cancels_what_documents_share():
    """An arm whose documents all need (1 + d) times the cycles shifts emitted by -M d / (1 + d), and its standard error is
    that share of the baseline's, not the root of two sums: exact."""
    d = 0.01
    _, base = sums(np.random.default_rng(6), 40)
    r = Resampler(40, DRAWS, 0)
    whole, shift = r.emitted(base, 1), r.shift(Sums(base.tokens, base.ends * (1 + d)), base, 1)
    assert shift.value == pytest.approx(-whole.value * d / (1 + d), rel=1e-9)
    assert shift.se == pytest.approx(whole.se * d / (1 + d), rel=1e-9)


# ---------------------------------------------------------------- identities


def test_identical_arms_shift_by_exactly_nothing():
    """The same sums give a shift of exactly 0 with standard error 0, and it is not significant. Second of the five checks;
    S-17(c)."""
    _, base = sums(np.random.default_rng(7), 30)
    again = Sums(base.tokens.copy(), base.ends.copy())
    estimate = Resampler(30, DRAWS, 0).shift(again, base, 1)
    assert estimate == Estimate(0.0, 0.0, 0.0, 0.0)
    assert not significant(estimate, estimate)
    off = Estimate(-1e-4, 1e-6, -1.1e-4, -0.9e-4)  # a null arm away from 0 makes no shift out of an exact 0
    assert not significant(estimate, off)


def test_exact_null_does_not_break_significance():
    """A null arm equal to the baseline leaves the shift beyond it equal to the plain shift, bit for bit, still
    significant when the shift is clear and not when it is not."""
    arm, base = sums(np.random.default_rng(8), 30, noise=0.005)
    noisy, _ = sums(np.random.default_rng(8), 30, noise=0.5)
    null = Sums(base.tokens.copy(), base.ends.copy())
    r = Resampler(30, DRAWS, 0)
    assert r.shift(null, base, 2) == Estimate(0.0, 0.0, 0.0, 0.0)
    assert r.shift(arm, null, 2) == r.shift(arm, base, 2)
    assert significant(r.shift(arm, base, 2), r.shift(arm, null, 2))
    assert not significant(r.shift(noisy, base, 2), r.shift(noisy, null, 2))


def test_documents_without_spread_give_the_value_itself():
    """Documents that are all alike leave nothing to doubt: the interval closes on the value, without NaN."""
    tokens = np.full(20, 128.0)
    base, arm = Sums(tokens, np.full((20, 1), 64.0)), Sums(tokens, np.full((20, 1), 32.0))
    estimate = Resampler(20, DRAWS, 0).shift(arm, base, 1)
    assert estimate == Estimate(2.0, 0.0, 2.0, 2.0)
    assert significant(estimate, estimate)


def test_one_document_has_an_infinite_interval():
    """One document teaches nothing about spread: the interval is infinite, nothing is NaN, nothing significant."""
    arm, base = sums(np.random.default_rng(9), 1)
    r = Resampler(1, DRAWS, 0)
    for estimate in (r.emitted(base, 1), r.shift(arm, base, 1)):
        assert np.isfinite(estimate.value)
        assert (estimate.se, estimate.lo, estimate.hi) == (np.inf, -np.inf, np.inf)
        assert not significant(estimate, estimate)


def test_shift_is_antisymmetric():
    """shift(a, b) = -shift(b, a), with the interval mirrored, although it is not symmetric about the value."""
    arm, base = sums(np.random.default_rng(10), 25)
    r = Resampler(25, DRAWS, 0)
    one, other = r.shift(arm, base, 1), r.shift(base, arm, 1)
    assert (one.value, one.se) == (-other.value, other.se)
    assert one.lo == pytest.approx(-other.hi, rel=1e-12)
    assert one.hi == pytest.approx(-other.lo, rel=1e-12)
    assert abs((one.hi - one.value) - (one.value - one.lo)) > 1e-3 * one.se


def test_order_of_documents_does_not_matter():
    """Permuted documents give the same value and standard error; the interval too once the draws are permuted alike."""
    arm, base = sums(np.random.default_rng(11), 25)
    order = np.random.default_rng(12).permutation(25)
    moved_arm, moved_base = (Sums(s.tokens[order], s.ends[order]) for s in (arm, base))
    r, moved = Resampler(25, DRAWS, 0), Resampler(25, DRAWS, 0)
    a, b = r.shift(arm, base, 1), moved.shift(moved_arm, moved_base, 1)
    assert (b.value, b.se) == (pytest.approx(a.value, rel=1e-12), pytest.approx(a.se, rel=1e-12))
    moved.weights = r.weights[:, order]
    b = moved.shift(moved_arm, moved_base, 1)
    assert (b.lo, b.hi) == (pytest.approx(a.lo, rel=1e-9), pytest.approx(a.hi, rel=1e-9))


def test_scale_of_sums_does_not_matter():
    """Every document twice as long, with twice the cycles, is the same study."""
    arm, base = sums(np.random.default_rng(13), 25)
    double = [Sums(2 * s.tokens, 2 * s.ends) for s in (arm, base)]
    r = Resampler(25, DRAWS, 0)
    assert r.shift(arm, base, 1) == r.shift(*double, 1)


def test_texts_of_a_document_are_one_cluster():
    """Splitting every document into texts, in any order, changes nothing: sums per document are what is resampled.

    Were each text its own document instead, the standard error would shrink although nothing was learnt.
    """
    _, base = sums(np.random.default_rng(14), 20)
    names = [f"d{i}" for i in range(20)] * 2
    docs = Documents.of(names)
    half = Sums(docs.sum(np.tile(base.tokens / 2, 2)), docs.sum(np.tile(base.ends / 2, (2, 1))))
    assert docs.count == 20
    r = Resampler(20, DRAWS, 0)
    assert r.emitted(half, 1) == r.emitted(base, 1)
    apart = Resampler(40, DRAWS, 0).emitted(Sums(np.tile(base.tokens / 2, 2), np.tile(base.ends / 2, (2, 1))), 1)
    assert apart.se < 0.75 * r.emitted(base, 1).se


def test_documents_are_numbered_by_first_appearance():
    """Names map to 0, 1, ... in order of appearance, and sums go to the right document for any trailing shape."""
    docs = Documents.of(["b", "a", "b", "c", "a"])
    assert (docs.index.tolist(), docs.count) == ([0, 1, 0, 2, 1], 3)
    assert docs.sum(np.array([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [5, 18, 8]
    assert docs.sum(np.arange(10.0).reshape(5, 2)).tolist() == [[4, 6], [10, 12], [6, 7]]


def test_no_speculation_emits_exactly_one():
    """K = 0 is plain decoding: emitted exactly 1 without spread, a shift of exactly 0, and 1 in every draw."""
    arm, base = sums(np.random.default_rng(15), 10)
    r = Resampler(10, DRAWS, 0)
    assert r.emitted(base, 0) == Estimate(1.0, 0.0, 1.0, 1.0)
    assert r.shift(arm, base, 0) == Estimate(0.0, 0.0, 0.0, 0.0)
    assert (r.emitted_draws(base)[:, 0] == 1).all()


def test_draws_are_shared_and_repeatable():
    """Every draw takes as many documents as there are; the same seed gives the same draws, another seed others; emitted
    of a draw is the ratio of its weighted sums."""
    _, base = sums(np.random.default_rng(16), 10)
    weights = bootstrap_weights(10, 50, 3)
    assert (weights.sum(1) == 10).all() and (weights >= 0).all()
    r = Resampler(10, 50, 3)
    np.testing.assert_array_equal(r.weights, weights)
    assert (bootstrap_weights(10, 50, 4) != weights).any()
    draws = r.emitted_draws(base)
    for k in (1, 2):
        np.testing.assert_allclose(draws[:, k], emitted_of(base, k, weights), rtol=1e-12)


def test_documents_without_positions_are_as_if_they_were_not_there():
    """Documents with neither tokens nor cycles in any arm change no estimate and no draw; those that one arm has and another
    lacks stay, and no draw is without tokens of an arm."""
    arm, base = sums(np.random.default_rng(18), 3)
    at = [1, 2, 5]

    def among_six(s):
        tokens, ends = np.zeros(6), np.zeros((6, 2))
        tokens[at], ends[at] = s.tokens, s.ends
        return Sums(tokens, ends)

    wide = [among_six(s) for s in (arm, base)]
    r, alone = Resampler(6, DRAWS, 3, tokens=np.stack([s.tokens for s in wide])), Resampler(3, DRAWS, 3)
    assert (r.documents, r.counted.tolist()) == (3, at)
    assert r.shift(*wide, 2) == alone.shift(arm, base, 2) and r.emitted(wide[0], 1) == alone.emitted(arm, 1)
    assert np.array_equal(r.emitted_draws(wide[1]), alone.emitted_draws(base))
    lacking = among_six(arm)
    lacking.tokens[[1, 2]] = lacking.ends[[1, 2]] = 0.0
    r = Resampler(6, DRAWS, 3, tokens=np.stack([lacking.tokens, wide[1].tokens]))
    assert r.documents == 3 and (r.weights[:, 2] > 0).all() and len(r.weights) == DRAWS
    assert np.isfinite(r.emitted_draws(lacking)).all()


def test_a_draw_in_which_no_cycle_ends_accepted_all_it_had(recwarn):
    """Short texts whose every draft is accepted end no cycle of 4 drafts: a draw of them alone emits K + 1, the most there is,
    and makes no interval infinite."""
    tokens = np.array([3.0, 3.0, 60.0])
    s = Sums(tokens, np.array([[1.5, 1.0, 0.0, 0.0], [1.5, 1.0, 0.0, 0.0], [40.0, 30.0, 28.0, 27.0]]))
    r = Resampler(3, DRAWS, 0, tokens=tokens[None])
    draws, short = r.emitted_draws(s), r.weights[:, 2] == 0
    assert short.any() and (draws[short][:, [3, 4]] == [4, 5]).all() and np.isfinite(draws).all()
    assert np.isfinite([r.emitted(s, 4).lo, r.emitted(s, 4).hi]).all() and not recwarn.list


@pytest.mark.parametrize(("se", "documents", "effect"), [(0.02, 25, 0.01), (0.0008, 27, -0.0016), (0.03, 10, 0.001)])
def test_documents_needed_is_the_least_number_that_resolves(se, documents, effect):
    """With n documents the standard error is se sqrt(documents / n); n is the least for which Student's quantile and the
    normal's of 80 %, both times that, are within the effect, and never fewer than there are."""
    n = documents_needed(se, documents, effect)

    def resolves(count):
        return (student.ppf(0.975, count - 1) + norm.ppf(0.8)) * se * np.sqrt(documents / count) <= abs(effect)

    assert n >= documents and resolves(n)
    assert n == documents or not resolves(n - 1)


@pytest.mark.parametrize("shift", [-0.013, -0.007])
def test_four_fresh_studies_of_five_resolve_with_the_documents_needed(shift):
    """Documents whose own shift is `shift` with a spread of .02: from the standard error of 12 of them follows a number of
    which 80 % of 1,000 fresh studies find the shift."""
    rng = np.random.default_rng(0)

    def drawn(count):
        tokens = rng.integers(80, 240, count).astype(float)
        ends = tokens / np.clip(rng.normal(2.4, 0.3, count), 1.2, None)
        own = rng.normal(shift, 0.02, count) * ends.sum() / tokens.sum()
        return Sums(tokens, (ends * (1 - own))[:, None]), Sums(tokens, ends[:, None])

    pilots = [Resampler(12, 2, 0).shift(*drawn(12), 1).se for _ in range(400)]
    se = np.sqrt(np.mean(np.square(pilots)))
    n = documents_needed(se, 12, shift)
    assert n > 12
    found = [Resampler(n, 200, seed).shift(*drawn(n), 1).excludes_zero for seed in range(1000)]
    assert 0.75 <= np.mean(found) <= 0.85, np.mean(found)


def test_documents_needed_has_no_answer_without_effect_or_spread():
    """No number of documents resolves an effect of 0, and one document's infinite error predicts nothing."""
    assert documents_needed(0.1, 20, 0.0) is None
    assert documents_needed(float("inf"), 1, 0.1) is None


def test_mean_excess_by_hand():
    """Mean of (1, 2, 6) is 3 with standard error sqrt(7 / 3); one document has an infinite one."""
    mean, se = mean_excess(np.array([1.0, 2.0, 6.0]))
    assert (mean, se) == (3.0, pytest.approx(np.sqrt(7 / 3)))
    assert mean_excess(np.array([0.5])) == (0.5, float("inf"))


def test_estimate_as_json():
    """Value, standard error and interval keep their places; an interval that touches 0 does not exclude it."""
    assert Estimate(1.0, 0.5, 0.0, 2.0).as_dict() == {"value": 1.0, "se": 0.5, "ci95": [0.0, 2.0]}
    assert not Estimate(1.0, 0.5, 0.0, 2.0).excludes_zero
    assert Estimate(1.0, 0.5, 0.1, 2.0).excludes_zero
    assert Estimate(-1.0, 0.5, -2.0, -0.1).excludes_zero
