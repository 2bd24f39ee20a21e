"""How many more prompts would decide: closed forms, and later studies simulated, with the truth known and not known."""

import numpy as np
import pytest
from scipy.special import ndtri

from specq import stats
from specq.cost import Operating
from specq.cost.table import TableCost, Timing
from specq.tune import MOST, POWER, more_prompts, pays, quantile_interval, speed_curve, tokens_ratio

Z = ndtri(0.975)
SD = 0.11  # of one document's gain
K_MAX, DRAWS, TOKENS = 8, 300, 300


def around(pay, half):
    return [pay - half, pay + half]


def decides(pay, half):
    return pays(pay, around(pay, half)) != "open"


def gains(rng, truth, sd, documents):
    """(mean of normal gains, half-width of its interval as a bootstrap would have it)."""
    spread = sd * np.sqrt(rng.chisquare(documents - 1) / documents)
    return rng.normal(truth, sd / np.sqrt(documents)), Z * spread / np.sqrt(documents)


# ---------------------------------------------------------------- closed forms


def test_on_the_border_it_takes_sixty_times_as_many():
    """An interval far wider than 1 % around exactly 1, from many documents: a later study of r times as many decides when
    |N(0, 1 + 1/r)| > 1.96 / sqrt(r), which four in five do at 1 + r = (1.96 / 0.253)^2."""
    times = (Z / ndtri(0.6)) ** 2 - 1
    assert more_prompts(10**6, 1.0, around(1.0, 50.0), 0.0) == pytest.approx(1e6 * (times - 1), rel=0.01)


def test_timings_stay_what_they_are():
    """The half-width that decides is the same however much of it is the timings', so N (h^2 - t^2) is the prompts' part."""
    documents, half = 10**5, 0.04
    alone = documents + more_prompts(documents, 1.02, around(1.02, half), 0.0)
    h2 = half**2 * documents / alone
    for timing in (0.005, 0.01):
        expected = documents * (half**2 - timing**2) / (h2 - timing**2)
        assert documents + more_prompts(documents, 1.02, around(1.02, half), timing) == pytest.approx(
            expected, rel=1e-3
        )


def test_no_number_where_timings_or_one_document_hide_the_answer():
    """Timings that alone leave it open, and one document, have no number of prompts; any interval without timing noise has
    one: within half a percent either side of every border, all is decided."""
    assert more_prompts(30, 1.02, around(1.02, 0.04), 0.025) is None
    assert more_prompts(1, 1.0, [np.nan, np.nan], 0.0) is None
    for pay in (0.9925, 0.995, 1.0, 1.005):
        found = more_prompts(30, pay, around(pay, 0.04), 0.0)
        assert 0 < found < 30 * (0.04 / 0.005) ** 2 * 30 / 29 < MOST
    assert more_prompts(30, 1.02, around(1.02, 0.0301), 0.0) >= 1


# ---------------------------------------------------------------- later studies


@pytest.mark.parametrize(("documents", "pay", "half"), [(30, 1.02, 0.04), (12, 0.97, 0.08), (12, 1.0, 0.1)])
def test_given_a_study_four_of_five_later_ones_decide(documents, pay, half):
    """From one study: its documents' variance and the truth drawn from what it says of them, then a study of the number
    asked for. 4,000 later studies, standard error 0.006. With `pay` as the truth and 2.8 standard errors to the border it
    would be 68, 74 and 96 %."""
    rng = np.random.default_rng(1)
    needed = documents + more_prompts(documents, pay, around(pay, half), 0.0)
    variance = (half / Z) ** 2 * documents * documents  # of bootstrap draws, times D^2: (D - 1) s^2 D / (D - 1)
    decided = 0
    for _ in range(4000):
        sd = np.sqrt(variance / rng.chisquare(documents - 1))
        truth = rng.normal(pay, sd / np.sqrt(documents))
        decided += decides(*gains(rng, truth, sd, needed))
    assert decided / 4000 == pytest.approx(POWER, abs=0.02)


@pytest.mark.parametrize("documents", [12, 30])
def test_four_of_five_later_studies_decide_over_all_truths(documents):
    """Normal gains, their truth anywhere within 25 %: of 4,000 first studies that leave it open, each followed by one with
    the number it asks for, four in five later ones decide. Standard error 0.006."""
    rng = np.random.default_rng(2)
    decided = []
    while len(decided) < 4000:
        truth = rng.uniform(0.75, 1.25)
        pay, half = gains(rng, truth, SD, documents)
        if not decides(pay, half):
            more = more_prompts(documents, pay, around(pay, half), 0.0)
            decided.append(decides(*gains(rng, truth, SD, documents + more)))
    assert np.mean(decided) == pytest.approx(POWER, abs=0.02)


def step_times(factor):
    """Draft step 0.1, target step 1 and 3 % for each token verified; `factor` times that in the format."""
    out = [Timing(kind="draft", batch=1, context=1024, new_tokens=1, kv_format="bf16", seconds=0.1)]
    for new in range(1, K_MAX + 2):
        for fmt, seconds in (("bf16", 1.0), ("fp8_e4m3", factor)):
            at = {"batch": 1, "context": 1024, "new_tokens": new}
            out.append(Timing(kind="target", kv_format=fmt, seconds=seconds * (1 + 0.03 * (new - 1)), **at))
    return TableCost(out, "file:test", {}, 0.0)


def speed_study(rng, documents, cost, noise):
    """(pay, its interval) as the product makes them: documents of constant acceptance, another in the format; K of both
    chosen anew, intervals by the paired bootstrap."""
    before = 1 / (1 + np.exp(-rng.normal(1.0, 0.6, documents)))
    after = np.clip(before + noise * rng.standard_normal(documents), 0.02, 0.98)
    resampler = stats.Resampler(documents, DRAWS, int(rng.integers(1 << 31)))
    curves = []
    for alpha, fmt in ((after, "fp8_e4m3"), (before, "bf16")):
        emitted = 1 + np.cumsum(alpha[:, None] ** np.arange(1, K_MAX + 1), axis=1)
        sums = stats.Sums(np.full(documents, float(TOKENS)), TOKENS / emitted)
        point = np.concatenate([[1.0], sums.tokens.sum() / sums.ends.sum(0)])
        curves.append(speed_curve(point, resampler.emitted_draws(sums), cost, Operating(1, 1024, fmt, "bf16")))
    pay, draws = tokens_ratio(*curves, *(c.best for c in curves))
    return pay, quantile_interval(draws)


def test_four_of_five_later_studies_decide_with_k_chosen_anew():
    """Speculation itself: acceptance differs between documents and formats, the format's step takes 0.8 to 1.2 of BF16's,
    and every study chooses both K and bootstraps its interval. 600 first studies of 12 documents, standard error 0.016."""
    rng = np.random.default_rng(3)
    decided = []
    while len(decided) < 600:
        cost = step_times(rng.uniform(0.8, 1.2))
        pay, interval = speed_study(rng, 12, cost, noise=0.06)
        if pays(pay, interval) == "open":
            more = more_prompts(12, pay, interval, 0.0)
            decided.append(pays(*speed_study(rng, 12 + more, cost, noise=0.06)) != "open")
    assert np.mean(decided) == pytest.approx(POWER, abs=0.05)
