"""The findings that stand beside a recommendation, each with its evidence."""

from dataclasses import replace

import numpy as np

from specq import stats
from specq.analysis import BASE, NULL, Analysis
from specq.chain import per_cycle
from specq.cost import CostModel, speedup
from specq.decision import Decision, StudyFacts
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.base import Float8
from specq.outliers import OUTLIER_RATIO
from specq.report.schema import Shift, Verdict
from specq.tune import Curve, choose_k, quantile_interval, speed_curve

SHORT_CONTEXT = 2000  # tokens
SHOWN_OUTLIERS = 5


def find_verdicts(
    facts: StudyFacts,
    analysis: Analysis,
    fmt: KVFormat,
    decision: Decision,
    cost: CostModel,
    shift: Shift,
    probabilistic: Analysis | None,
) -> list[Verdict]:
    """Verdicts of one format; `probabilistic` is the study under probabilistic drafting where it drafted greedily."""
    if facts.config.random_weights:
        said = "weights drawn at random from the pair's configuration: acceptance is not the pair's"
        return [Verdict(code="random_weights", decision="nothing is recommended on acceptance", evidence=said)]
    arm, out = f"{fmt.name}+bf16", []
    k = shift.k
    context = facts.config.context[0]
    if context < SHORT_CONTEXT:
        out.append(
            Verdict(
                code="short_context",
                decision="at so short a context K and V are a small part of what a serving GPU reads: expect little speed from"
                " their format",
                evidence=f"decided for a context of {context} tokens, under {SHORT_CONTEXT}",
            )
        )
    if facts.native_fp8 is False and fmt.name.startswith("fp8"):
        out.append(
            Verdict(
                code="no_native_fp8",
                decision="the accelerator has no FP8 units: serving engines refuse or emulate this format there",
                evidence=f"{facts.server.gpu if facts.server else facts.config.device}: compute capability under 8.9",
            )
        )
    out += strict_slo(facts, analysis, decision)
    best_mu = analysis.arms[BASE].emitted(decision.baseline_recommended) - 1
    if best_mu < 3.0:
        out.append(
            Verdict(
                code="marginal_pair",
                decision="little to lose and little to gain: the pair accepts few tokens per cycle",
                evidence=f"mu {best_mu:.2f} accepted at its best K = {decision.baseline_recommended} with a BF16 cache,"
                " under 3.0",
            )
        )
    if fmt.codec.itemsize == 1 and facts.scale_sources.get(fmt.name) == "one":
        out.append(
            Verdict(
                code="scale_one",
                decision="scales are 1.0, as a server without calibrated scales would use; try --calibrate",
                evidence="the checkpoint holds no K and V scales and no calibration was asked for",
            )
        )
    out += _outlier_verdict(facts, fmt)
    both = f"{fmt.name}+{fmt.name}"
    inherited = analysis.shift(both, k)
    if facts.lookup is None and stats.significant(inherited, analysis.shift_minus_null(both, k, NULL)):
        out.append(
            Verdict(
                code="draft_kv_inherited",
                decision=f"a draft that inherits {fmt.name} shifts mu beyond the noise floor; its cache can stay in BF16",
                evidence=f"with both caches quantized mu shifts by {inherited.value:+.5f}"
                f" [{inherited.lo:+.5f}, {inherited.hi:+.5f}] at K = {k}"
                + _inherited_speed(analysis, both, cost, decision),
            )
        )
    if not shift.significant:
        out.append(_not_resolved(analysis, arm, k))
    if probabilistic is not None:
        out += _greedy_verdict(analysis, arm, probabilistic, decision)
    return out


def strict_slo(facts: StudyFacts, analysis: Analysis, decision: Decision) -> list[Verdict]:
    """Whether a limit of the time per token leaves any slack: the mean, its interval, and the slowest prompts."""
    limit, curve, k = facts.config.max_ms_per_token, decision.curve, decision.recommended
    if limit is None:
        return []
    mean = 1e3 * curve.per_token[k]
    low, high = (1e3 * x for x in quantile_interval(curve.plain_draws / curve.draws[:, k]))
    slow = 1e3 * np.quantile(_seconds_per_document(analysis, f"{decision.format.name}+bf16", curve, k), 0.95)
    evidence = (
        f"{mean:.2f} ms per token [{low:.2f}, {high:.2f}] on average at K = {k}, batch {curve.at.batch}, context"
        f" {curve.at.context}; 95 % of the prompts need at most {slow:.2f} ms; the limit is {limit:g} ms"
    )
    if mean > limit:
        text = "no batch and K that were asked about keep the time per token within the limit"
    elif high > limit:
        text = "the time per token keeps the limit on average, but not for sure"
    elif slow > limit:
        text = "the time per token keeps the limit on average, but not for the slowest prompts"
    else:
        return []
    return [Verdict(code="strict_slo", decision=text, evidence=evidence)]


def _seconds_per_document(analysis: Analysis, arm: str, curve: Curve, k: int) -> np.ndarray:
    """Mean seconds per token of every document with positions at K = k; cycles cost what they cost, acceptance differs."""
    sums = analysis.arms[arm].sums
    some = sums.tokens > 0
    emitted = per_cycle(sums.tokens[some], sums.ends[some])[:, k - 1] if k else np.ones(some.sum())
    return curve.times[k] / emitted


def _inherited_speed(analysis: Analysis, both: str, cost: CostModel, decision: Decision) -> str:
    """What a draft cache in the format does to speed at the recommended K, where the cost model knows its steps."""
    at, k = decision.curve.at, decision.recommended
    try:
        curve = speed_curve(
            analysis.emitted_curve(both), analysis.emitted_draws(both), cost, replace(at, draft_format=at.target_format)
        )
    except SpecqError:  # no timing of the draft in this format
        return ""
    ratio = curve.tokens_per_second[k] / decision.curve.tokens_per_second[k]
    low, high = quantile_interval(curve.tokens_per_second_draws[:, k] / decision.curve.tokens_per_second_draws[:, k])
    return (
        f"; tokens per second {100 * (ratio - 1):+.1f} % [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}] at K = {k}"
    )


def _outlier_verdict(facts: StudyFacts, fmt: KVFormat) -> list[Verdict]:
    """Key channels far above the others of their head, where one scale has to serve them all."""
    if not facts.outliers or fmt.codec.itemsize > 1 or fmt.k_granularity == "channel":
        return []
    shown = ", ".join(str(o) for o in facts.outliers[:SHOWN_OUTLIERS])
    more = len(facts.outliers) - SHOWN_OUTLIERS
    layers = len({o.layer for o in facts.outliers})
    if isinstance(fmt.codec, Float8):
        decision = "a few key channels are far larger than the rest: FP8's exponent covers them unless they saturate"
    else:
        decision = (
            f"a few key channels use up the levels of {fmt.name}'s scale; a scale per channel for K (int8_per_channel,"
            " int8_k_channel_v_token) keeps the others apart"
        )
    evidence = (
        f"{len(facts.outliers)} key channels in {layers} layers reach more than {OUTLIER_RATIO:g} times their head's median"
        f" channel: {shown}" + (f", and {more} more in study.json" if more > 0 else "")
    )
    return [Verdict(code="kv_outliers", decision=decision, evidence=evidence)]


def _not_resolved(analysis: Analysis, arm: str, k: int) -> Verdict:
    beyond = analysis.shift_minus_null(arm, k, NULL)
    if not np.isfinite(beyond.se):
        evidence = "one document shows no spread"
    elif beyond.se == 0:
        evidence = f"every document takes the same cycles under both arms at K = {k}"
    else:
        documents = analysis.resampler.documents
        evidence = (
            f"shift minus null shift {beyond.value:+.5f}, standard error {beyond.se:.5f}, at K = {k}; four studies of five"
            f" would resolve a shift of {stats.resolvable(beyond.se, documents, documents):.4f} with {documents} documents"
        )
        needed = stats.documents_needed(beyond.se, documents, beyond.value)
        if needed is not None and needed <= 100 * documents:
            evidence += f", and one of the size seen with {needed}"
    return Verdict(code="not_resolved", decision="no shift of mu beyond the noise floor was found", evidence=evidence)


def _greedy_verdict(analysis: Analysis, arm: str, probabilistic: Analysis, decision: Decision) -> list[Verdict]:
    """What drafting from q instead of its argmax would give, each at its own best K and the first operating point."""
    greedy = decision.curve
    times = greedy.times
    sampled = speedup(probabilistic.emitted_curve(arm), times)
    k = choose_k(sampled, speedup(probabilistic.emitted_draws(arm), times))
    ratio = float(sampled[k] / greedy.point[decision.recommended])
    if ratio <= 1.0:
        return []
    mu = probabilistic.arms[arm].emitted(k) - analysis.arms[arm].emitted(k) if k else 0.0
    return [
        Verdict(
            code="draft_greedy",
            decision=f"drafting from q (draft_sample_method probabilistic) would be {100 * (ratio - 1):.1f} % faster",
            evidence=f"at K = {k} it accepts {mu:+.3f} tokens per cycle more than greedy drafting",
        )
    ]
