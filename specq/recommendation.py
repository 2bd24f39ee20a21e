"""recommendation.json and speculation_profile.json for one KV format, from an analysis and a cost model."""

from dataclasses import dataclass

import numpy as np

from specq import chain, stats
from specq.analysis import Analysis
from specq.config import StudyConfig
from specq.cost import CostModel, Operating, speedup
from specq.kv import KVFormat, get_format
from specq.report.schema import (
    Cost,
    Recommendation,
    Sampling,
    Shift,
    SpeculationProfile,
    Speedup,
    Verdict,
    VllmBlock,
)
from specq.sampling import Transform
from specq.tune import Curve, Gain, choose_k, quantile_interval, retuning, schedule, speed_curve
from specq.vllm_options import DRAFT_KV_CACHE_DTYPE_SINCE, parse_version, vllm_block

BASE, NULL = "bf16+bf16", "null"


@dataclass
class StudyFacts:
    """What every format of a study shares: names, sampling, vocabulary sizes, where the scales came from."""

    config: StudyConfig
    pair: str
    target: str
    draft: str
    transform: Transform
    target_vocab: int
    draft_vocab: int
    scale_sources: dict[str, str]
    warnings: list[str]


@dataclass
class Decision:
    """Everything decided for one format; the recommendation and the plots are written from it."""

    format: KVFormat
    curves: dict[tuple[int, int], Curve]
    base_curves: dict[tuple[int, int], Curve]
    recommended: int
    baseline_recommended: int
    schedule: list[list[int]]
    gain: Gain
    pay: float
    pay_ci95: list[float]
    sentence: str


def shift_block(analysis: Analysis, arm: str, k: int, text: str, null: str | None) -> Shift:
    """The Shift of one arm at K = k, against the null arm where the study has one."""
    own = analysis.shift(arm, k)
    floor = analysis.shift(null, k) if null else None
    return Shift(
        k=k,
        text=text,
        value=own.value,
        ci95=_pair(own),
        se=_finite(own.se),
        null_value=floor.value if floor else None,
        null_ci95=_pair(floor) if floor else (None, None),
        significant=stats.significant(analysis.shift_minus_null(arm, k, null)),
    )


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _pair(e: stats.Estimate) -> tuple[float | None, float | None]:
    return _finite(e.lo), _finite(e.hi)


def decide(config: StudyConfig, analysis: Analysis, fmt: KVFormat, cost: CostModel) -> Decision:
    """Curves at every batch and context, the K for the first of each, the schedule, and whether the format pays."""
    arm = f"{fmt.name}+bf16"

    def curve(name: str, target_format: str, batch: int, context: int) -> Curve:
        at = Operating(batch, context, target_format, "bf16")
        return speed_curve(analysis.emitted_curve(name), analysis.emitted_draws(name), cost, at)

    points = [(b, c) for c in config.context for b in config.batch]
    curves = {p: curve(arm, fmt.name, *p) for p in points}
    base_curves = {p: curve(BASE, "bf16", *p) for p in points}
    first, first_context = points[0], config.context[0]
    mine, base, current = curves[first], base_curves[first], config.current_k
    recommended, base_best = mine.best, base.best
    plan = schedule([(b, curves[b, first_context].best) for b in sorted(set(config.batch))])
    # tokens per second of the format at its recommended K over the baseline's at its own best K, paired draws
    rate = mine.times[0] / base.times[0]
    pay_draws = mine.draws[:, recommended] / base.draws[:, base_best] * base.plain_draws / mine.plain_draws
    pay, interval = float(mine.point[recommended] / base.point[base_best] / rate), quantile_interval(pay_draws)
    sentence = _sentence(fmt, current, recommended, pay, interval, cost.source)
    return Decision(
        fmt,
        curves,
        base_curves,
        recommended,
        base_best,
        plan,
        retuning(mine, current, recommended),
        pay,
        interval,
        sentence,
    )


def _sentence(fmt: KVFormat, current: int, best: int, pay: float, ci: list[float], source: str) -> str:
    change = f"{100 * (pay - 1):+.1f} % tokens per second [{100 * (ci[0] - 1):+.1f}, {100 * (ci[1] - 1):+.1f}]"
    retune = (
        f"and set num_speculative_tokens to {best}" if best else "and drop speculation (K = 0): nothing beats plain"
    )
    keep = f"keeping num_speculative_tokens at {best}" if best == current else retune
    by = f"{change} against BF16 at its best K, by {source}"
    if fmt.name == "bf16":
        return f"baseline format, {keep}"
    if ci[0] > 1 or (ci[0] >= 0.99 and pay >= 0.995):
        return f"enable {fmt.name} {keep}: {by}"
    if ci[1] < 1:
        return f"do not enable {fmt.name} for speed: {by}; it still halves the KV memory"
    return f"measure more: {by}"


def _verdicts(
    facts: StudyFacts,
    analysis: Analysis,
    fmt: KVFormat,
    decision: Decision,
    shift: Shift,
    probabilistic: Analysis | None,
) -> list[Verdict]:
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
        beyond = analysis.shift_minus_null(arm, k, NULL)
        needed = stats.documents_needed(beyond.se, analysis.documents.count, beyond.value)
        more = f"; about {needed} prompts would resolve a shift of this size" if needed else ""
        out.append(
            Verdict(
                code="not_resolved",
                decision="no shift of mu beyond the noise floor was found",
                evidence=f"shift minus null shift {beyond.value:+.5f}, standard error {beyond.se:.5f}, at K = {k}{more}",
            )
        )
    if probabilistic is not None:
        out += _greedy_verdict(analysis, arm, probabilistic, decision)
    return out


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


def _vllm(
    facts: StudyFacts, fmt: KVFormat, plan: list[list[int]], surv: np.ndarray, warnings: list[str]
) -> VllmBlock | None:
    config = facts.config
    if fmt.vllm is None:
        warnings.append(f"vLLM has no KV cache format like {fmt.name}; nothing is written for it")
        return None
    if facts.target_vocab != facts.draft_vocab:
        warnings.append(
            f"vLLM refuses draft_model pairs of unequal vocabulary size ({facts.target_vocab} and {facts.draft_vocab})"
        )
        return None
    if config.verify == "strict":
        warnings.append("vLLM verifies with min(1, p/q), not strictly: these figures are not a prediction for it")
    if config.draft_transform == "same" and facts.transform.truncates:
        warnings.append(
            "vLLM gives its draft the temperature only; with top-k or top-p use --draft-transform temperature to predict it"
        )
    if parse_version(config.vllm_version) < DRAFT_KV_CACHE_DTYPE_SINCE and fmt.name != "bf16":
        warnings.append(
            f"vLLM {config.vllm_version} cannot set the draft's KV format: its draft inherits {fmt.vllm}, which is"
            " mu_shift_inherited_draft here"
        )
    k = max(entry[2] for entry in plan)
    return vllm_block(
        version=config.vllm_version,
        target=facts.target,
        draft=facts.draft,
        fmt=fmt,
        draft_fmt=get_format("bf16"),
        schedule=plan,
        draft_sampling=config.draft_sampling,
        survival=surv[k - 1, :k].tolist() if k else [],
    )


def recommend(
    facts: StudyFacts,
    analysis: Analysis,
    own: Shift | None,
    decision: Decision,
    cost: CostModel,
    text: str,
    probabilistic: Analysis | None = None,
) -> Recommendation:
    """The Recommendation of one format; `probabilistic` is the same study under probabilistic drafting, if it was not."""
    config, fmt, current = facts.config, decision.format, facts.config.current_k
    arm = f"{fmt.name}+bf16"
    result = analysis.arms[arm].result
    surv = chain.survival(result.ends, result.accepted)
    first = (config.batch[0], config.context[0])
    mine, base = decision.curves[first], decision.base_curves[first]
    shift = shift_block(analysis, arm, current, text, NULL)
    warnings = list(facts.warnings)
    if analysis.documents.count < 2:
        warnings.append("one document only: no spread between documents, so intervals and standard errors are null")
    ratio = {
        f"batch {b}, context {c}": float(x.times[0] / decision.base_curves[b, c].times[0])
        for (b, c), x in decision.curves.items()
    }
    details = cost.details | {
        "operating_point": {"batch": first[0], "context": first[1]},
        "plain_step_time_over_bf16": ratio,
        "tokens_per_second_over_bf16_at_best": {"value": decision.pay, "ci95": decision.pay_ci95},
        "share_of_draws_choosing_k": {str(k): s for k, s in decision.gain.choice_shares.items()},
    }
    return Recommendation(
        pair=facts.pair,
        target=facts.target,
        draft=facts.draft,
        target_kv_dtype=fmt.name,
        draft_kv_dtype="bf16",
        vllm_kv_cache_dtype=fmt.vllm,
        sampling=Sampling(
            temperature=facts.transform.temperature,
            top_k=facts.transform.top_k,
            top_p=facts.transform.top_p,
            draft_sampling=config.draft_sampling,
            verify=config.verify,
            draft_transform=config.draft_transform,
        ),
        prompts=len(analysis.texts),
        tokens=int(analysis.lengths.sum()),
        baseline_mu_accepted=_mu(analysis, BASE),
        mu_accepted=_mu(analysis, arm),
        mu_shift=shift,
        mu_shift_own=own,
        mu_shift_inherited_draft=shift_block(analysis, f"{fmt.name}+{fmt.name}", current, text, NULL),
        current_num_speculative_tokens=current,
        recommended_num_speculative_tokens=decision.recommended,
        recommended_schedule=[tuple(r) for r in decision.schedule],
        speedup=Speedup(
            baseline_at_current=float(base.point[current]),
            dtype_at_current=float(mine.point[current]),
            dtype_at_recommended=float(mine.point[decision.recommended]),
            retuning_gain=decision.gain.value,
            ci95=tuple(decision.gain.ci95),
        ),
        cost=Cost(source=cost.source, details=details),
        decision=decision.sentence,
        verdicts=_verdicts(facts, analysis, fmt, decision, shift, probabilistic),
        vllm=_vllm(facts, fmt, decision.schedule, surv, warnings),
        warnings=warnings,
    )


def _mu(analysis: Analysis, arm: str) -> dict[str, float]:
    return {str(k): float(m - 1) for k, m in enumerate(analysis.emitted_curve(arm)) if k > 0}


def profile(facts: StudyFacts, analysis: Analysis, fmt: KVFormat) -> SpeculationProfile:
    """Acceptance by draft position of `<fmt>+bf16` at the current K (at k_max when the current K is 0)."""
    k = facts.config.current_k or facts.config.k_max
    result = analysis.arms[f"{fmt.name}+bf16"].result
    marginal = chain.survival(result.ends, result.accepted)[k - 1, :k]
    before = np.concatenate([[1.0], marginal[:-1]])
    per_request = result.tokens / result.ends[:, k - 1]
    share = np.concatenate([[1.0], marginal]) - np.concatenate([marginal, [0.0]])
    return SpeculationProfile(
        conditional_accept_rates=[float(m / b) if b > 0 else None for m, b in zip(marginal, before, strict=True)],
        marginal_accept_rates=marginal.tolist(),
        mean_accept_length=float(1 + marginal.sum()),
        mean_accept_length_per_request={
            t.prompt.id: float(m) for t, m in zip(analysis.texts, per_request, strict=True)
        },
        acceptance_length_histogram={str(n + 1): float(s) for n, s in enumerate(share)},
        measurement_conditions={
            "num_speculative_tokens": k,
            "target_kv_dtype": fmt.name,
            "draft_kv_dtype": "bf16",
            "target": facts.target,
            "draft": facts.draft,
            "temperature": facts.transform.temperature,
            "top_k": facts.transform.top_k,
            "top_p": facts.transform.top_p,
            "draft_sampling": facts.config.draft_sampling,
            "verify": facts.config.verify,
            "draft_transform": facts.config.draft_transform,
            "prompts": len(analysis.texts),
            "tokens": int(analysis.lengths.sum()),
            "method": "replay of sampled texts through the chain; lengths are emitted (accepted + 1)",
        },
    )
