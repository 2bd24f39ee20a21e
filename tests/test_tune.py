"""The decision: K from curves and costs, schedules, what is written for vLLM, against numbers worked out by hand."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.cost import Operating, cycle_times, speedup
from specq.cost.table import TableCost, Timing
from specq.errors import SpecqError
from specq.kv import get_format
from specq.tune import Curve, choose_k, draw_choices, retuning, schedule, speed_curve
from specq.vllm_options import vllm_block

AT = Operating(1, 1024, "bf16", "bf16")


def constant_alpha(alpha, k_max):
    """emitted(K) = 1 + alpha + ... + alpha^K, K = 0..k_max."""
    return np.cumsum(alpha ** np.arange(k_max + 1))


def ratio_cost(c, fixed=0.0):
    """Draft step c, target step 1 whatever it verifies."""
    make = lambda kind, s: Timing(kind=kind, batch=1, context=1, new_tokens=1, kv_format="bf16", seconds=s)  # noqa: E731
    return TableCost([make("target", 1.0), make("draft", c)], "file:test", {}, fixed)


def curve(alpha, c, k_max=8, spread=0.0, fixed=0.0, draws=400):
    """A speed curve; `spread` is the relative standard deviation of emitted between draws, common to all K."""
    emitted = constant_alpha(alpha, k_max)
    noise = 1 + spread * np.random.default_rng(0).standard_normal((draws, 1))
    sampled = 1 + (emitted - 1) * noise
    return speed_curve(emitted, sampled, ratio_cost(c, fixed), AT)


def test_t01_too_large_a_k_is_not_recommended():
    """T-01: alpha .7, c .3: speedups 1.308, 1.369, 1.333, 1.261, 1.176 for K = 1..5, so K = 2; c .05 still rises at 5."""
    mine = curve(0.7, 0.3, 5)
    assert mine.point[1:] == pytest.approx([1.308, 1.369, 1.333, 1.261, 1.176], abs=6e-4)
    assert mine.best == 2
    cheap = curve(0.7, 0.05, 5)
    assert cheap.point[5] == pytest.approx(2.353, abs=5e-4) and cheap.best == 5


@pytest.mark.parametrize(("alpha", "c"), [(0.3, 0.5), (0.6, 1.0), (0.95, 2.0)])
def test_t02_nothing_helps_means_zero(alpha, c):
    """T-02: alpha .3 with c .5, or a draft as dear as its target: every K loses, so K = 0."""
    mine = curve(alpha, c)
    assert (mine.point[1:] < 1).all() and mine.point[0] == 1 and mine.best == 0


def test_t03_acceptance_and_time_are_told_apart():
    """T-03: emitted 4.625 -> 4.15 at equal step time is 0.897x; with steps 15 % shorter 1.056x; break-even 0.8973."""
    before, after = 4.625, 4.15

    def over_before(cycle):
        """Speed with the later acceptance and this cycle time over the speed before; plain steps take 1 in both."""
        later, earlier = (
            speedup(np.array([1.0, e]), np.array([1.0, t]))[1] for e, t in ((after, cycle), (before, 1.0))
        )
        return later / earlier

    assert over_before(1.0) == pytest.approx(0.897, abs=5e-4)
    assert over_before(0.85) == pytest.approx(1.056, abs=5e-4)
    assert over_before(0.8973) == pytest.approx(1.0, abs=5e-5)


def test_the_smallest_k_that_cannot_be_told_from_the_best():
    """docs/method.md: a smaller K wins when its paired log-ratio to the best includes 0 and its point loss is <= 1 %."""
    point = np.array([1.0, 1.50, 1.995, 2.0, 1.9])
    rng = np.random.default_rng(1)
    common = 1 + 0.2 * rng.standard_normal((2000, 1))
    blurred = point * common * (1 + 0.01 * rng.standard_normal((2000, 5)))  # 0.25 % apart, 1.4 % noise: not told apart
    assert choose_k(point, blurred) == 2
    tight = point * common  # K = 2 is worse in every draw: told apart, though within 1 %
    assert choose_k(point, tight) == 3
    loose = point * (1 + 0.05 * rng.standard_normal((2000, 5)))
    assert choose_k(point, loose) == 2  # K = 1 loses 25 %: never, however noisy
    assert choose_k(np.array([1.0, 0.999, 0.5]), np.array([[1.0, 1.01, 0.5], [1.0, 0.98, 0.5]])) == 0


def test_draws_that_choose_for_themselves():
    """Each draw's own K is the smallest within 1 % of that draw's best."""
    draws = np.array([[1.0, 1.2, 1.205], [1.0, 1.2, 1.3], [1.0, 0.9, 0.8]])
    assert draw_choices(draws).tolist() == [1, 2, 0]
    assert draw_choices(draws, np.array([True, False, True])).tolist() == [2, 2, 0]
    assert draw_choices(draws, np.zeros(3, bool)).tolist() == [1, 2, 0]  # a limit that nothing meets rules nothing out


def test_retuning_gain_is_the_ratio_of_the_curve():
    """Without noise the gain is exactly speedup(recommended) / speedup(current) - 1, and all draws choose that K."""
    mine = curve(0.7, 0.3, 5)
    gain = retuning(mine, 5, mine.best)
    expected = mine.point[2] / mine.point[5] - 1
    assert gain.value == pytest.approx(expected) and gain.ci95 == pytest.approx([expected] * 2)
    assert gain.choice_shares == {2: 1.0}
    assert retuning(mine, 2, 2).value == 0.0


def test_fixed_time_per_cycle_lowers_speculation_only():
    """A fixed term per cycle is charged to K > 0 and not to plain decoding."""
    times = cycle_times(ratio_cost(0.1, fixed=0.5), AT, 3)
    assert times.tolist() == pytest.approx([1.0, 1.6, 1.7, 1.8])


def test_the_schedule_is_in_vllms_form():
    """Inclusive ranges from 1, gapless, equal neighbours merged, whatever the order of the batch sizes."""
    assert schedule([(8, 3), (1, 5), (32, 3), (128, 0)]) == [[1, 1, 5], [2, 32, 3], [33, 128, 0]]
    assert schedule([(16, 4)]) == [[1, 16, 4]]


@given(st.dictionaries(st.integers(1, 512), st.integers(0, 16), min_size=1, max_size=8))
def test_every_schedule_is_one_that_vllm_takes(best):
    """Ranges are inclusive, start at 1, leave no gap, do not overlap, end at the largest batch, and every batch asked for
    has its own K; no two neighbours are alike, and the largest K is num_speculative_tokens."""
    plan = schedule(list(best.items()))
    assert plan[0][0] == 1 and plan[-1][1] == max(best)
    assert all(a <= b for a, b, _ in plan) and all(y[0] == x[1] + 1 for x, y in pairwise(plan))
    assert all(x[2] != y[2] for x, y in pairwise(plan))
    for batch, k in best.items():
        assert [entry[2] for entry in plan if entry[0] <= batch <= entry[1]] == [k]
    written = block(schedule_=plan).speculative_config
    assert (max(best.values()) == 0) == (written is None)
    if written:
        assert written["num_speculative_tokens"] == max(best.values())


def block(version="0.32", schedule_=((1, 1, 3),), fmt="fp8"):
    return vllm_block(
        version=version, target="T", draft="D", fmt=get_format(fmt), draft_fmt=get_format("bf16"),
        schedule=[list(r) for r in schedule_], draft_sampling="probabilistic", survival=[0.7, 0.5, 0.4],
    )  # fmt: skip


def test_vllm_arguments_by_version():
    """0.24 refuses unknown keys, so the draft's kv_cache_dtype is written from 0.26 on; K = 0 drops the whole config."""
    new, old = block(), block("0.24")
    assert new.speculative_config["kv_cache_dtype"] == "bfloat16" and "kv_cache_dtype" not in old.speculative_config
    assert new.speculative_config["draft_sample_method"] == "probabilistic"
    assert new.speculative_config["num_speculative_tokens"] == 3 == len(new.synthetic_acceptance_rates)
    assert new.serve_args[:3] == ["T", "--kv-cache-dtype", "fp8"]
    assert json.loads(new.serve_args[-1]) == new.speculative_config
    assert "TRITON_ATTN" in block(fmt="int8").serve_args and "TRITON_ATTN" not in new.serve_args
    several = block(schedule_=((1, 8, 3), (9, 64, 0)))
    assert several.speculative_config["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 64, 0]]
    none = block(schedule_=((1, 8, 0),))
    assert none.speculative_config is None and "--speculative-config" not in none.serve_args
    for bad in ("0.9", "new", "0.23.1"):
        with pytest.raises(SpecqError):
            block(bad)


def test_no_gain_is_found_where_all_k_are_alike():
    """With equal K and noisy timings the interval of the gain includes 0 in at least 90 % of 200 studies: choosing a K
    and judging it on the same draw would exclude 0 in most of them."""
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        point = 1 + 0.08 * rng.standard_normal(9)
        draws = point * (1 + 0.08 * rng.standard_normal((500, 9)))
        mine = Curve(AT, np.ones(9), point, draws, np.ones(1))
        low, high = retuning(mine, 5, choose_k(point, draws)).ci95
        hits += low <= 0 <= high
    assert hits >= 180
