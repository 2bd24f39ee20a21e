"""From acceptance to a decision on studies made of known acceptance: closed forms, mixtures, objectives, verdicts."""

from dataclasses import replace

import numpy as np
import pytest

from specq import pairs, stats
from specq.analysis import BASE, NULL, analyse
from specq.capacity import Server
from specq.conclude import Material, conclude
from specq.config import DRAWS, StudyConfig
from specq.cost.table import TableCost, Timing
from specq.decision import StudyFacts, decide
from specq.errors import SpecqError
from specq.kv import get_format
from specq.mixtures import group_choices, group_names, lonely_groups, mixture, of_group
from specq.prompts import Prompt, Text
from specq.recommendation import recommend
from specq.report.schema import Recommendation
from specq.rules import Rule, Transform
from specq.sensitivity import sensitivity, shifted
from specq.shape import ModelShape
from specq.tune import kept_k_loss, speed_curve
from specq.verdicts import strict_slo

FP8 = get_format("fp8")
ARM, BOTH = "fp8_e4m3+bf16", "fp8_e4m3+fp8_e4m3"
LLAMA = pairs.find("llama70b-1b", None, None)
SHAPES = tuple(ModelShape.of_registered(s.shape) for s in (LLAMA.target, LLAMA.draft))


def study(alphas, fp8=None, groups=None, tokens=3000, k_max=8, draws=400):
    """An analysis of one text per entry whose every position has that acceptance probability, and whose b is its mean:
    emitted is the closed form up to the edge. `fp8` are the format's (the same without), `tokens` one length or each's."""
    fp8 = alphas if fp8 is None else fp8
    groups, tokens = groups or [None] * len(alphas), np.broadcast_to(tokens, len(alphas))
    texts = [
        Text(Prompt(f"p{i}", f"d{i}", g, (1, 2)), tuple(range(n + 1)), BASE, False)
        for i, (g, n) in enumerate(zip(groups, tokens, strict=True))
    ]

    def columns(values):
        alpha = np.repeat(values, tokens)
        zero = np.zeros_like(alpha)
        return {"alpha": alpha, "logq": np.log(alpha), "logp": zero, "alpha_greedy": alpha, "alpha_strict": alpha,
                "draft_top1": zero.astype(int)}  # fmt: skip

    arms = {BASE: columns(alphas), NULL: columns(alphas), ARM: columns(fp8), BOTH: columns(fp8)}
    return analyse(texts, arms, BASE, Rule(), k_max, seed=0, draws=draws)


def table(cost=0.1, times=((("bf16", 1.0), ("fp8_e4m3", 1.0)),), batches=(1,), fixed=0.0):
    """Timings: a target step of the given seconds per format for each batch, a draft step of `cost`."""
    out = []
    for batch, row in zip(batches, times, strict=True):
        at = {"batch": batch, "context": 1024, "new_tokens": 1}
        out += [Timing(kind="target", kv_format=f, seconds=s, **at) for f, s in row]
        out += [Timing(kind="draft", kv_format="bf16", seconds=cost, **at)]
    return TableCost(out, "file:test", {}, fixed)


def facts(server=None, **config):
    settings = {"batch": (1,), "context": (1024,), "k_max": 8, "current_k": 4, "cost": "roofline:h100"} | config
    return StudyFacts(
        StudyConfig(**settings), "pair", "target", "draft", *SHAPES, Transform(), 9, 9, {"fp8_e4m3": "calibration"},
        {None: []}, True, server,
    )  # fmt: skip


def emitted(alpha, k):
    return (1 - alpha ** (k + 1)) / (1 - alpha)


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
def test_constant_acceptance_has_the_closed_form(alpha):
    """Issue: independent acceptance alpha gives (1 - alpha^(K+1)) / (1 - alpha) tokens per cycle, for every K."""
    curve = study([alpha] * 2).emitted_curve(BASE)
    assert curve == pytest.approx([emitted(alpha, k) for k in range(9)], rel=2e-3)


def test_t03_the_two_parts_of_speed_stand_apart():
    """T-03: emitted 4.625 -> 4.15 costs 10.3 % at equal step times and is faster with steps 15 % shorter; the break-even
    cycle-time ratio is the emitted ratio, 0.8973; FP8 is not refused for its mu."""
    k = 8
    alphas = [_alpha_of(e, k) for e in (4.625, 4.15)]
    found = study([alphas[0]] * 4, [alphas[1]] * 4)
    equal = decide(facts(current_k=k), found, FP8, table(cost=1e-9))
    parts = equal.break_even[equal.at]
    assert parts.emitted_ratio == pytest.approx(0.8973, abs=5e-4) and parts.cycle_time_ratio == pytest.approx(1.0)
    assert parts.speed_ratio == pytest.approx(0.897, abs=5e-4) and equal.action == "do_not_enable"
    shorter = decide(facts(current_k=k), found, FP8, table(1e-9, ((("bf16", 1.0), ("fp8_e4m3", 0.85)),)))
    parts = shorter.break_even[shorter.at]
    assert (parts.cycle_time_ratio, parts.speed_ratio) == pytest.approx((0.85, 1.056), abs=5e-4)
    assert shorter.action == "enable_and_retune" or shorter.action == "enable"
    assert "fp8_e4m3" in shorter.sentence and shorter.sentence.startswith("enable")


def _alpha_of(wanted, k):
    """The constant acceptance with this emitted at K = k."""
    low, high = 0.0, 1.0 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if emitted(middle, k) < wanted else (low, middle)
    return low


def test_a_drop_of_mu_from_4_5_to_3_5_is_the_speed_it_costs():
    """Issue: mu 4.5 -> 3.5 at equal step times is 4.5 / 5.5 of the speed, -18.2 %, and the report says that number."""
    found = study([_alpha_of(5.5, 8)] * 3, [_alpha_of(4.5, 8)] * 3)
    made = decide(facts(current_k=8), found, FP8, table(cost=1e-9))
    parts = made.break_even[made.at]
    assert parts.k == 8 and parts.speed_ratio == pytest.approx(4.5 / 5.5, abs=1e-3)
    rec = recommend(facts(current_k=8), found, None, made, table(cost=1e-9), "same")
    assert rec.break_even.speed_ratio == pytest.approx(0.818, abs=1e-3)
    assert rec.mu_shift.value == pytest.approx(-1.0, abs=5e-3) and "-18." in made.sentence


def test_curves_that_fall_want_a_smaller_k_than_pooled_acceptance_says():
    """Issue: rates .9, .8, .6, .4, ... by position against the alpha they pool to: the measured curve's K is smaller."""
    rates = np.array([0.9, 0.8, 0.6, 0.4, 0.25, 0.15, 0.1, 0.05])
    survival = rates.cumprod()
    pooled = survival.sum() / np.concatenate([[1.0], survival[:-1]]).sum()  # accepted over drafted-and-reached
    measured = np.concatenate([[1.0], 1 + survival.cumsum()])
    closed = np.cumsum(pooled ** np.arange(9))
    best = [speed_curve(e, np.repeat(e[None], 10, 0), table(0.12), _at()).best for e in (measured, closed)]
    assert best[0] < best[1], best


def _at():
    from specq.cost import Operating

    return Operating(1, 1024, "bf16", "bf16")


def test_the_break_even_plot_shows_what_is_decided_by():
    """Filled points: emitted and cycle-time ratio each at its best K, whose quotient is the speed of the decision; hollow ones,
    at the K in use now, only where that is not the best K of both."""
    from specq.conclude import _curve
    from specq.report.decision_plots import at_best, at_current

    found = study([0.9] * 3, [0.6] * 3)
    for current in (8, 3):
        made = decide(facts(current_k=current), found, FP8, table(0.1))
        mine, base = made.curve, made.base_curve
        assert mine.best != base.best
        block = _curve(mine, base) | {"break_even": vars(made.break_even[made.at])}
        cycle, more = at_best(block)
        assert more / cycle == pytest.approx(made.pay)
        assert cycle == pytest.approx(mine.times[mine.best] / base.times[base.best])
        assert more == pytest.approx(emitted(0.6, mine.best) / emitted(0.9, base.best), rel=5e-3)
        now = at_current(block)
        assert now == (made.break_even[made.at].cycle_time_ratio, made.break_even[made.at].emitted_ratio)
    same = {"recommended": 3, "recommended_bf16": 3, "break_even": {"k": 3}}
    assert at_current(same) is None


def test_not_retuning_costs_what_the_curves_say():
    """A format whose acceptance falls wants a smaller K: keeping BF16's loses 1 - s(K_old) / s(K_new), with an interval."""
    rng = np.random.default_rng(0)
    high = rng.uniform(0.88, 0.92, 20)
    found = study(high, high - 0.35, tokens=600)
    made = decide(facts(), found, FP8, table(0.15))
    assert made.baseline_recommended > made.recommended
    new, old = (made.curve.point[k] for k in (made.recommended, made.baseline_recommended))
    assert made.kept.k == made.baseline_recommended and made.kept.value == pytest.approx(1 - old / new)
    low, high_ = made.kept.ci95
    assert 0 < low <= made.kept.value <= high_ < 0.6
    same = kept_k_loss(made.base_curve, made.base_curve, made.baseline_recommended, made.baseline_recommended)
    assert (same.value, same.ci95) == (0.0, [0.0, 0.0])


# ---------------------------------------------------------------- groups and mixtures


def test_t04_a_mixture_comes_from_measured_curves():
    """T-04: half of the texts at alpha .9, half at .5, K = 4: 1.630 token-weighted, 2.016 as the mean over prompts, and
    the pooled formula's 1.773 nowhere."""
    found = study([0.9, 0.5], groups=["code", "chat"], k_max=4)
    assert found.arms[BASE].emitted(4) - 1 == pytest.approx(1.630, abs=3e-3)
    result = found.arms[BASE].result
    prompt_mean = (result.tokens / result.ends[:, 3]).mean() - 1
    assert prompt_mean == pytest.approx(2.016, abs=3e-3)
    pooled = emitted(0.7, 4) - 1
    assert pooled == pytest.approx(1.773, abs=1e-3)
    even = mixture(found, {"code": 1, "chat": 1}, 0)
    assert even.emitted_curve(BASE) == pytest.approx(found.emitted_curve(BASE))


def test_a_mixture_has_its_shares_of_tokens():
    """Texts of unequal number and length: 1 / emitted = sum of share / emitted of the group, at every K, for every arm."""
    found = study([0.9, 0.9, 0.8, 0.5], groups=["code", "code", "code", "chat"])
    code, chat = (of_group(found, g, 0) for g in ("code", "chat"))
    for share in (0.25, 0.6, 1.0):
        mixed = mixture(found, {"code": share, "chat": 1 - share}, 0)
        for arm in (BASE, ARM):
            expected = 1 / (share / code.emitted_curve(arm) + (1 - share) / chat.emitted_curve(arm))
            assert mixed.emitted_curve(arm) == pytest.approx(expected)
    assert mixed.emitted_draws(BASE)[:, 4].std() > 0 and mixed.documents.count == 3


def test_groups_and_mixtures_of_own_text_take_every_arms_own_lengths():
    """Arms on own text end where they end: a group's arm is that arm's texts alone, a mixture has its shares of every arm's
    own tokens, and the texts counted are the format's."""
    alphas, groups = [0.9, 0.8, 0.5, 0.4], ["code", "code", "chat", "chat"]
    lengths = {BASE: (300, 40, 200, 90), NULL: (300, 41, 200, 90), ARM: (50, 260, 30, 310)}
    alone = {arm: study(alphas, groups=groups, tokens=n) for arm, n in lengths.items()}
    fmt = replace(alone[ARM], arms={a: alone[ARM].arms[a] for a in (ARM, BOTH)}, base=ARM)
    paired = Material("same", alone[BASE], {}, {NULL: alone[NULL], "fp8_e4m3": fmt}).paired["fp8_e4m3"]
    assert paired.lengths.tolist() == [*lengths[ARM]] and paired.base == BASE
    parts = {g: of_group(paired, g, 0) for g in ("code", "chat")}
    for group, part in parts.items():
        assert part.lengths.sum() == {"code": 310, "chat": 340}[group]
        for arm, whole in alone.items():
            mine, theirs = part.arms[arm], of_group(whole, group, 0).arms[arm]
            assert np.array_equal(mine.sums.tokens, theirs.sums.tokens) and np.array_equal(mine.a, theirs.a)
            assert np.array_equal(mine.sums.ends, theirs.sums.ends) and np.array_equal(mine.b, theirs.b)
    mixed = mixture(paired, {"code": 0.7, "chat": 0.3}, 0)
    for arm in lengths:
        code, chat = (parts[g].emitted_curve(arm) for g in ("code", "chat"))
        assert mixed.emitted_curve(arm) == pytest.approx(1 / (0.7 / code + 0.3 / chat))


def test_groups_are_decided_without_their_texts_of_one_token(recwarn):
    """A text that ends at its first token has no position: its group is decided by the other documents, as if it were not
    there; a group of nothing else is left out, and no mixture can be made of it."""
    found = study([0.7, 0.6, 0.5, 0.4, 0.5], groups=["a", "a", "a", "b", "b"], tokens=(300, 200, 0, 0, 0))
    without = study([0.7, 0.6], groups=["a", "a"], tokens=(300, 200))
    made, alone = (decide(facts(), x, FP8, table(0.1)) for x in (found, without))
    assert (made.pay_ci95, made.gain, made.sentence) == (alone.pay_ci95, alone.gain, alone.sentence)
    assert group_choices(facts(), found, table(0.1), made) == group_choices(facts(), without, table(0.1), alone)
    assert (
        mixture(found, {"a": 1.0}, 0).emitted_draws(ARM).std()
        == mixture(without, {"a": 1.0}, 0).emitted_draws(ARM).std()
    )
    assert lonely_groups(study([0.7, 0.6], groups=["a", "a"], tokens=(300, 0)), {"a": 1}) == ["a"]
    with pytest.raises(SpecqError, match="texts of group 'b' end at their first token"):
        mixture(found, {"a": 0.5, "b": 0.5}, 0)
    limited = facts(max_ms_per_token=1.0)
    (verdict,) = strict_slo(limited, found, decide(limited, found, FP8, table(0.1)))
    assert "nan" not in verdict.evidence and not recwarn.list


def test_a_mixtures_interval_covers_what_its_groups_vary():
    """Documents are resampled within groups: with equal documents in each group the mixture is certain, though the groups
    differ, while the plain bootstrap is not."""
    found = study([0.9] * 4 + [0.5] * 4, groups=["code"] * 4 + ["chat"] * 4, tokens=400)
    mixed = mixture(found, {"code": 0.5, "chat": 0.5}, 0)
    assert mixed.emitted_draws(BASE)[:, 4].std() < 1e-9 < found.emitted_draws(BASE)[:, 4].std()


def test_mixtures_refuse_what_makes_no_sense():
    """Unknown groups, files without groups, shares that are no shares; a group of one document is named."""
    found = study([0.9, 0.5, 0.6], groups=["code", "chat", "chat"], tokens=60)
    with pytest.raises(SpecqError, match="no group 'poetry'.*has chat, code"):
        mixture(found, {"poetry": 1.0}, 0)
    with pytest.raises(SpecqError, match="names no groups"):
        mixture(study([0.5, 0.6], tokens=60), {"code": 1.0}, 0)
    for shares in ({"code": -1.0, "chat": 2.0}, {"code": 0.0}, {"code": float("nan")}):
        with pytest.raises(SpecqError, match="must be positive numbers"):
            mixture(found, shares, 0)
    assert lonely_groups(found, {"code": 1, "chat": 1}) == ["code"]


def test_groups_have_their_own_k_and_what_the_common_one_costs():
    """Code (alpha .9) wants a larger K than prose (.4); each loses by the common K what its own curve says."""
    rng = np.random.default_rng(1)
    alphas = np.concatenate([rng.uniform(0.88, 0.92, 6), rng.uniform(0.38, 0.42, 6)])
    found = study(alphas, groups=["code"] * 6 + ["prose"] * 6, tokens=400)
    made = decide(facts(), found, FP8, table(0.1))
    code, prose = group_choices(facts(), found, table(0.1), made)
    assert group_names(found) == ["code", "prose"] == [code.name, prose.name]
    assert prose.best <= made.recommended < code.best and code.documents == 6
    curve = of_group(found, "code", 0).emitted_curve(ARM) / (1 + 0.1 * np.arange(9))
    assert code.loss == pytest.approx(1 - curve[made.recommended] / curve[code.best])
    assert code.loss_ci95[0] > 0 and code.mu == pytest.approx(code.mu_bf16)


def test_strata_are_resampled_for_themselves():
    """Every draw keeps the number of documents of each stratum; one stratum is the plain bootstrap."""
    strata = np.array([0, 1, 0, 1, 1])
    weights = stats.bootstrap_weights(5, 200, 3, strata)
    assert (weights[:, strata == 0].sum(1) == 2).all() and (weights[:, strata == 1].sum(1) == 3).all()
    assert (stats.bootstrap_weights(5, 200, 3) == stats.bootstrap_weights(5, 200, 3, np.zeros(5, int))).all()
    assert weights.std(0).min() > 0


# ---------------------------------------------------------------- objectives and capacity

GROWING = ((("bf16", 1.0), ("fp8_e4m3", 0.9)), (("bf16", 2.0), ("fp8_e4m3", 1.7)), (("bf16", 40.0), ("fp8_e4m3", 30.0)))


def test_objectives_pick_their_operating_point():
    """latency: the first batch. throughput: most tokens per second. With a limit: most within it; when nothing meets the
    limit, the quickest."""
    found, cost = study([0.8, 0.82], tokens=400), table(0.1, GROWING, (1, 8, 64))
    at = lambda **c: decide(facts(batch=(1, 8, 64), **c), found, FP8, cost)  # noqa: E731
    assert at().at == (1, 1024)
    most = at(objective="throughput")
    assert most.at == (8, 1024) == most.base_at  # 8 / 1.7 beats 64 / 30 and 1 / 0.9
    curve = most.curve
    limit = 1e3 * curve.per_token[curve.best]
    assert at(objective="throughput", max_ms_per_token=limit * 1.001).at == (8, 1024)
    assert at(objective="throughput", max_ms_per_token=limit * 0.8).at == (1, 1024)
    none = at(objective="throughput", max_ms_per_token=1.0)
    assert none.at == (1, 1024) and not none.curve.meets_limit.any()


def test_a_limit_rules_out_smaller_k():
    """The smallest K within 1 % of the best is taken only if it keeps the limit."""
    found, cost = study([0.55] * 3, tokens=400), table(0.25)
    free = decide(facts(), found, FP8, cost).curve
    best = int(free.point.argmax())
    assert free.best < best or free.point[free.best] == free.point.max()
    tight = decide(facts(max_ms_per_token=1e3 * free.per_token[best] * 1.0001), found, FP8, cost)
    assert tight.curve.meets_limit[tight.recommended]


def test_throughput_joins_a_cheaper_cycle_and_a_larger_batch():
    """At 32k tokens 8 x H100 hold 35 BF16 and 65 FP8 sequences of the 70B pair: each runs at what fits, and the ratio of
    tokens per second is the product of both effects."""
    from specq.cost.gpus import get_gpu
    from specq.cost.roofline import Roofline

    server = Server("h100", 8, 80)
    cost = Roofline(get_gpu("h100"), *SHAPES, 8)
    found = study([0.8, 0.8], tokens=400)
    about = facts(server, batch=(1, 128), context=(32768,), objective="throughput")
    made = decide(about, found, FP8, cost)
    assert (made.at, made.base_at) == ((65, 32768), (35, 32768))
    capacity = made.capacity
    assert (capacity.sequences, capacity.bf16_sequences, capacity.batch) == (65, 35, 65) and capacity.limits
    mine, base = made.curve, made.base_curve
    by_hand = (65 / mine.per_token[mine.best]) / (35 / base.per_token[base.best])
    assert made.pay == pytest.approx(by_hand) == capacity.tokens_per_second_over_bf16
    assert "65 sequences of 32768 tokens fit instead of 35" in made.sentence and made.action.startswith("enable")
    rec = recommend(about, found, None, made, cost, "same")
    assert rec.capacity.bf16_sequences == 35 and not any("cannot hold" in w for w in rec.warnings)
    for batch, small, says in (
        (128, server, "batch 128 at 32768 tokens"),
        (1, Server("h100", 1, 80), "not one sequence"),
    ):
        late = facts(small, batch=(batch,), context=(32768,))
        warned = recommend(late, found, None, decide(late, found, FP8, cost), cost, "same")
        assert any("cannot hold" in w and says in w for w in warned.warnings)
    with pytest.raises(SpecqError, match="not one sequence of 32768 tokens fits"):
        decide(replace(about, server=Server("h100", 2, 80)), found, FP8, Roofline(get_gpu("h100"), *SHAPES, 2))


# ---------------------------------------------------------------- measure more

SPREAD = np.linspace(0.9, 1.1, 9)  # repeats of a noisy timing; their median is the truth


def test_measure_more_says_how_many():
    """Documents that disagree about the format: the sentence names the number, and the recommendation carries it."""
    rng = np.random.default_rng(5)
    alphas = rng.uniform(0.6, 0.8, 12)
    found = study(alphas, np.clip(alphas + 0.01 + rng.normal(0.0, 0.06, 12), 0, 1), tokens=300)
    made = decide(facts(), found, FP8, table(0.1))
    assert made.action == "measure_more" and made.more_prompts > 0
    assert f"about {made.more_prompts} more prompt" in made.sentence
    rec = recommend(facts(), found, None, made, table(0.1), "same")
    assert (rec.action, rec.more_prompts) == ("measure_more", made.more_prompts)
    assert Recommendation.model_validate_json(rec.model_dump_json()) == rec


def test_timing_noise_that_decides_nothing_is_named():
    """When the noise of the step times alone hides the answer, more prompts are not asked for."""
    steps = (("target", "bf16", 1.0), ("target", "fp8_e4m3", 1.0), ("draft", "bf16", 0.1))
    noisy = [
        Timing(kind=kind, batch=1, context=1, new_tokens=1, kv_format=fmt, seconds=s, repeats=[s * x for x in SPREAD])
        for kind, fmt, s in steps
    ]
    cost = TableCost(noisy, "measured", {})
    made = decide(facts(), study([0.7, 0.72, 0.74], tokens=300, draws=DRAWS), FP8, cost)
    assert made.action == "measure_more" and made.more_prompts is None
    assert "time them more often" in made.sentence


# ---------------------------------------------------------------- verdicts and sensitivity


def test_strict_slo_by_mean_by_certainty_and_by_prompt():
    """No verdict without a limit or with slack; with one: missed on average, not for sure, or missed by slow prompts."""
    alphas = np.array([0.8] * 18 + [0.2] * 2)
    found, cost = study(alphas, tokens=300), table(0.1)
    free = decide(facts(), found, FP8, cost)
    mean = 1e3 * free.curve.per_token[free.recommended]
    assert strict_slo(facts(), found, free) == []

    def said(limit):
        about = facts(max_ms_per_token=limit)
        return strict_slo(about, found, decide(about, found, FP8, cost))

    assert "no batch and K" in said(0.5 * mean)[0].decision
    assert "not for sure" in said(1.01 * mean)[0].decision
    slow = said(1.3 * mean)[0]
    assert slow.code == "strict_slo" and "slowest prompts" in slow.decision and "95 % of the prompts" in slow.evidence
    assert said(5 * mean) == []


@pytest.mark.parametrize(("verify", "sampled"), [("standard", 0.8), ("strict", 0.3)])
def test_greedy_drafts_are_judged_under_the_studys_verification(verify, sampled):
    """Greedy drafts that accept .5 lose to sampled ones where those accept .8 (standard) and not where they accept .3 (strict):
    the verdict is the quotient of both closed forms, each at its best K, or there is none."""
    greedy, tokens, rng = 0.5, 2000, np.random.default_rng(3)
    texts = study([greedy] * 4, tokens=tokens).texts
    n = 4 * tokens
    token = np.concatenate([t.response[1:] for t in texts])
    flat = {"alpha": 0.8, "alpha_strict": 0.3, "alpha_greedy": greedy, "logq": np.log(0.3), "logp": np.log(0.3 / 0.8)}
    columns = {name: np.full(n, x) for name, x in flat.items()}
    columns["draft_top1"] = np.where(rng.random(n) < greedy, token, -1)
    arms = dict.fromkeys((BASE, NULL, ARM, BOTH), columns)
    main = analyse(texts, arms, BASE, Rule("greedy", verify), 8, seed=0, draws=200)
    about = facts(draft_sampling="greedy", verify=verify)
    made = conclude(about, [FP8], Material("same", main, arms, {}), table(0.1))["fp8_e4m3"]
    verdicts = [v for v in made.recommendation.verdicts if v.code == "draft_greedy"]
    best = [max(emitted(a, k) / (1 + 0.1 * k) for k in range(9)) for a in (sampled, greedy)]
    faster = 100 * (best[0] / best[1] - 1)
    if faster < 0:
        assert verdicts == []
    else:
        assert float(verdicts[0].decision.split(" would be ")[1].split(" %")[0]) == pytest.approx(faster, abs=2)


def test_not_resolved_says_how_many_documents_would():
    """Two prompts of every document: what resolves the shift is counted in documents, by the one rule for both numbers."""
    rng = np.random.default_rng(6)
    alphas = rng.uniform(0.6, 0.8, 12)
    found = study(alphas, alphas + 0.01 + rng.normal(0.0, 0.03, 12), tokens=300)
    texts = [replace(t, prompt=replace(t.prompt, document=f"d{i // 2}")) for i, t in enumerate(found.texts)]
    documents = stats.Documents.of([t.prompt.document for t in texts])
    arms = {
        n: replace(r, sums=stats.Sums(documents.sum(r.result.tokens), documents.sum(r.result.ends)))
        for n, r in found.arms.items()
    }
    clustered = replace(found, texts=texts, documents=documents, resampler=stats.Resampler(6, 400, 0), arms=arms)
    made = decide(facts(), clustered, FP8, table(0.1))
    rec = recommend(facts(), clustered, None, made, table(0.1), "same")
    (verdict,) = (v for v in rec.verdicts if v.code == "not_resolved")
    shift = rec.mu_shift
    needed = stats.documents_needed(shift.se, 6, shift.value)
    assert f"a shift of {stats.resolvable(shift.se, 6, 6):.4f} with 6 documents" in verdict.evidence
    assert verdict.evidence.endswith(f"and one of the size seen with {needed}") and needed > 6
    assert stats.resolvable(shift.se, 6, needed) <= abs(shift.value) < stats.resolvable(shift.se, 6, needed - 1)


def test_shifted_acceptance_is_exact_for_constant_rates():
    """Moving constant rates by d gives the closed form of alpha + d; rates stop at 0 and 1."""
    survival = np.tril(0.7 ** np.arange(1, 9)[None, :].repeat(8, 0))
    moved = shifted(survival, 0.1)
    assert moved == pytest.approx([emitted(0.8, k) / emitted(0.7, k) for k in range(9)])
    assert shifted(survival, 0.0) == pytest.approx(np.ones(9))
    assert shifted(survival, 0.5)[8] == pytest.approx(9 / emitted(0.7, 8))
    assert shifted(survival, -1.0)[8] == pytest.approx(1 / emitted(0.7, 8))


def test_sensitivity_passes_through_the_decision():
    """At no shift, factor 1 and the decided batch all three curves are the decision itself; dearer drafts want smaller K."""
    found, cost = study([0.8, 0.82, 0.78], [0.78, 0.8, 0.77], tokens=400), table(0.1, GROWING, (1, 8, 64))
    about = facts(batch=(1, 8, 64))
    made = decide(about, found, FP8, cost)
    out = sensitivity(about, found, FP8, cost, made)
    for key, here in (("alpha", 0.0), ("draft_cost", 1.0), ("batch", 1)):
        entry = next(e for e in out[key] if e["x"] == here)
        assert entry["over_bf16"] == pytest.approx(made.pay) and entry["recommended"] == made.recommended
        assert entry["ci95"] == pytest.approx(made.pay_ci95)
    ks = [e["recommended"] for e in out["draft_cost"]]
    assert ks == sorted(ks, reverse=True) and ks[0] > ks[-1]
    over = [e["over_bf16"] for e in out["alpha"]]
    assert over == sorted(over)
    assert [e["x"] for e in out["batch"]] == [1, 2, 4, 8, 16, 32, 64]  # the table ends at 64
