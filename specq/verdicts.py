"""The findings that stand beside a recommendation, each with its evidence (codes of DESIGN section 6)."""

import numpy as np

from specq import stats
from specq.analysis import BASE, NULL, Analysis
from specq.cost import speedup
from specq.decision import Decision, StudyFacts
from specq.kv import KVFormat
from specq.report.schema import Shift, Verdict
from specq.tune import choose_k


def find_verdicts(
    facts: StudyFacts,
    analysis: Analysis,
    fmt: KVFormat,
    decision: Decision,
    shift: Shift,
    probabilistic: Analysis | None,
) -> list[Verdict]:
    """Verdicts of one format; `probabilistic` is the study under probabilistic drafting where it drafted greedily."""
    arm, out = f"{fmt.name}+bf16", []
    k = shift.k
    median = float(np.median([len(t.prompt.tokens) + len(t.response) for t in analysis.texts]))
    if median < 2000:
        out.append(
            Verdict(
                code="short_context",
                decision="contexts are too short for the KV format to matter for speed",
                evidence=f"median text length {median:.0f} tokens, under 2000",
            )
        )
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
    if fmt.codec.dtype.itemsize == 1 and facts.scale_sources.get(fmt.name) == "one":
        out.append(
            Verdict(
                code="scale_one",
                decision="scales are 1.0, as a server without calibrated scales would use; try --calibrate",
                evidence="the checkpoint holds no K and V scales and no calibration was asked for",
            )
        )
    inherited = analysis.resampler.shift(analysis.arms[f"{fmt.name}+{fmt.name}"].sums, analysis.arms[arm].sums, k)
    if inherited.excludes_zero:
        out.append(
            Verdict(
                code="draft_kv_inherited",
                decision=f"keep the draft's cache in BF16: {fmt.name} there changes mu as well",
                evidence=f"quantizing the draft's cache too changes mu by {inherited.value:+.4f}"
                f" [{inherited.lo:+.4f}, {inherited.hi:+.4f}] at K = {k}",
            )
        )
    if not shift.significant:
        out.append(_not_resolved(analysis, arm, k))
    if probabilistic is not None:
        out += _greedy_verdict(analysis, arm, probabilistic, decision)
    return out


def _not_resolved(analysis: Analysis, arm: str, k: int) -> Verdict:
    beyond = analysis.shift_minus_null(arm, k, NULL)
    if not np.isfinite(beyond.se):
        evidence = "one document shows no spread"
    elif beyond.se == 0:
        evidence = f"the arms are identical at every position, K = {k}"
    else:
        # 1.96 + 0.84 standard errors: found at 95 % in four studies of five
        evidence = (
            f"shift minus null shift {beyond.value:+.5f}, standard error {beyond.se:.5f}, at K = {k}; a shift of"
            f" {2.8 * beyond.se:.4f} would be resolved by this many prompts in four studies of five"
        )
        needed = stats.documents_needed(beyond.se, analysis.documents.count, beyond.value)
        if needed is not None and needed <= 100 * analysis.documents.count:
            evidence += f", and {needed} prompts would resolve one of the size seen"
    return Verdict(code="not_resolved", decision="no shift of mu beyond the noise floor was found", evidence=evidence)


def _greedy_verdict(analysis: Analysis, arm: str, probabilistic: Analysis, decision: Decision) -> list[Verdict]:
    """What drafting from q instead of its argmax would give, each at its own best K and the first operating point."""
    greedy = next(iter(decision.curves.values()))
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
