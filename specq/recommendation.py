"""recommendation.json and speculation_profile.json for one KV format, from an analysis and a decision."""

from dataclasses import asdict

import numpy as np

from specq import chain, stats
from specq.analysis import BASE, NULL, Analysis
from specq.cost import CostModel
from specq.decision import Decision, StudyFacts
from specq.files import finite
from specq.from_server import changed, notes
from specq.kv import KVFormat, get_format
from specq.report.schema import (
    BreakEven,
    Capacity,
    Cost,
    KeptK,
    Recommendation,
    Sampling,
    Shift,
    SpeculationProfile,
    Speedup,
    VllmBlock,
)
from specq.verdicts import find_verdicts
from specq.vllm_options import (
    DRAFT_KV_CACHE_DTYPE_SINCE,
    LATEST_LOOKED_UP_BY_V2,
    NO_SELF_SPECULATION,
    OLDEST,
    parse_version,
    vllm_block,
    why_not_started,
)

EXTRAPOLATION = 1.5  # a context this many times the longest scored one is worth a word


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
        significant=stats.significant(own, analysis.shift_minus_null(arm, k, null)),
    )


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None


def _pair(e: stats.Estimate) -> tuple[float | None, float | None]:
    return _finite(e.lo), _finite(e.hi)


def _vllm(
    facts: StudyFacts, fmt: KVFormat, plan: list[list[int]], surv: np.ndarray, warnings: list[str]
) -> VllmBlock | None:
    config = facts.config
    if config.random_weights:
        warnings.append("nothing is written for vLLM: random weights allow no recommendation")
        return None
    if fmt.vllm is None:
        warnings.append(f"vLLM has no KV cache format like {fmt.name}; nothing is written for it")
        return None
    if reason := why_not_started(fmt, config.vllm_version):
        warnings.append(f"nothing is written for vLLM: {reason}")
        return None
    if facts.self_draft:
        warnings.append(f"nothing is written for vLLM: {NO_SELF_SPECULATION}")
        return None
    if facts.target_vocab != facts.draft_vocab:
        warnings.append(
            f"vLLM refuses draft_model pairs of unequal vocabulary size ({facts.target_vocab} and {facts.draft_vocab})"
        )
        return None
    if config.verify == "strict":
        warnings.append("vLLM verifies with min(1, p/q), not strictly: these figures are not a prediction for it")
    if facts.lookup is None and config.draft_transform == "same" and facts.transform.truncates:
        warnings.append(
            "vLLM gives its draft the temperature only; with top-k or top-p use --draft-transform temperature to predict it"
        )
    if facts.lookup is None and parse_version(config.vllm_version) < DRAFT_KV_CACHE_DTYPE_SINCE and fmt.name != "bf16":
        warnings.append(
            f"vLLM {config.vllm_version} cannot set the draft's KV format: its draft inherits {fmt.vllm}, which is"
            " mu_shift_inherited_draft here"
        )
    if facts.lookup and parse_version(config.vllm_version) > OLDEST:
        warnings.append(LATEST_LOOKED_UP_BY_V2)
    k = max(entry[2] for entry in plan)
    block = vllm_block(
        version=config.vllm_version,
        target=facts.target,
        draft=facts.draft,
        lookup=facts.lookup,
        fmt=fmt,
        draft_fmt=get_format("bf16"),
        schedule=plan,
        draft_sampling=config.draft_sampling,
        survival=surv[k - 1, :k].tolist() if k else [],
    )
    if config.vllm_command is not None:
        block.current_command, block.changed_command = changed(config.vllm_command, block)
    return block


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
    mine, base = decision.curve, decision.base_curves[decision.at]
    k = decision.reference_k
    shift = shift_block(analysis, arm, k, text, NULL)
    warnings = [*facts.warnings[None], *facts.warnings.get(fmt.name, []), *notes(config)]
    warnings += _cut_warnings(analysis, arm, k, decision.recommended)
    if analysis.resampler.documents < 2:
        warnings.append("one document only: no spread between documents, so intervals and standard errors are null")
    longest = max(len(t.prompt.tokens) + t.positions for t in analysis.texts)
    if max(config.context) > EXTRAPOLATION * longest:
        warnings.append(
            f"acceptance was measured at contexts of at most {longest} tokens and is taken to be the same at"
            f" {max(config.context)}; step times are not"
        )
    warnings += _memory_warnings(decision)
    curves = (*decision.curves.values(), *decision.base_curves.values())
    warnings += cost.caveats([c.at for c in curves], config.k_max)
    ratio = {
        f"batch {b}, context {c}": float(x.times[0] / decision.base_curves[b, c].times[0])
        for (b, c), x in decision.curves.items()
    }
    details = cost.details | {
        "operating_point": {"batch": decision.at[0], "context": decision.at[1]},
        "operating_point_bf16": {"batch": decision.base_at[0], "context": decision.base_at[1]},
        "objective": config.objective,
        "max_ms_per_token": config.max_ms_per_token,
        "plain_step_time_over_bf16": ratio,
        "tokens_per_second_over_bf16_at_best": {"value": decision.pay, "ci95": [_finite(x) for x in decision.pay_ci95]},
    }
    return Recommendation(
        pair=facts.pair,
        target=facts.target,
        draft=facts.draft,
        target_kv_dtype=fmt.name,
        draft_kv_dtype="bf16" if facts.lookup is None else "none",
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
        mu_shift_inherited_draft=shift_block(analysis, f"{fmt.name}+{fmt.name}", k, text, NULL),
        current_num_speculative_tokens=current,
        recommended_num_speculative_tokens=decision.recommended,
        recommended_schedule=[tuple(r) for r in decision.schedule],
        speedup=Speedup(
            baseline_at_current=float(base.point[current]),
            dtype_at_current=float(mine.point[current]),
            dtype_at_recommended=float(mine.point[decision.recommended]),
            dtype_at_recommended_over_plain_bf16=float(
                mine.point[decision.recommended] * base.times[0] / mine.times[0]
            ),
            retuning_gain=decision.gain.value,
            ci95=_bounds(decision.gain.ci95),
            kept_bf16_k=KeptK(k=decision.kept.k, loss=decision.kept.value, ci95=_bounds(decision.kept.ci95)),
        ),
        break_even=BreakEven(**finite(asdict(decision.break_even[decision.at]))),
        capacity=Capacity(**finite(asdict(decision.capacity))) if decision.capacity else None,
        cost=Cost(source=cost.source, details=details),
        action=decision.action,
        more_prompts=decision.more_prompts,
        decision=decision.sentence,
        verdicts=find_verdicts(facts, analysis, fmt, decision, cost, shift, probabilistic),
        vllm=_vllm(facts, fmt, decision.schedule, surv, warnings),
        warnings=warnings,
    )


def _bounds(interval: list[float]) -> tuple[float | None, float | None]:
    return _finite(interval[0]), _finite(interval[1])


def _cut_warnings(analysis: Analysis, arm: str, k: int, recommended: int) -> list[str]:
    """What the last cycles, which the texts' ends cut, do to mu at both K and to its shift at K = k."""
    positions, said = float(analysis.arms[BASE].lengths.mean()), []
    for at in dict.fromkeys((k, recommended or k)):
        sums = analysis.whole(BASE, at)
        steady, whole = analysis.arms[BASE].emitted(at) - 1, float(sums.tokens.sum() / sums.ends.sum()) - 1
        if whole > 0 and abs(steady / whole - 1) > chain.CUT_WARNING:
            said.append(
                f"texts of {positions:.0f} positions on average are short for K = {at}: the cut last cycles move BF16's mu from"
                f" {whole:.3f} to {steady:.3f}"
            )
    if arm != BASE:
        shift, of_whole = analysis.shift(arm, k), analysis.shift_of_whole_cycles(arm, k)
        if abs(of_whole.value - shift.value) > max(chain.CUT_SHIFT * shift.se, chain.CUT_LEAST):
            said.append(
                f"where in a cycle the texts end matters here: the shift of mu at K = {k} is {shift.value:+.4f} as tokens over"
                f" cycles ended, and {of_whole.value:+.4f} [{of_whole.lo:+.4f}, {of_whole.hi:+.4f}] with cut cycles counted"
                " whole; trust the second, or take longer texts"
            )
    return said


def _memory_warnings(decision: Decision) -> list[str]:
    """What the GPUs decided for cannot hold: the figures are then of a server that does not exist."""
    room = decision.capacity
    if room is None:
        return []
    if not room.sequences:
        what = f"not one sequence of {room.context} tokens beside the weights with {decision.format.name}"
    elif decision.at[0] > room.sequences:
        what = f"batch {decision.at[0]} at {room.context} tokens with {decision.format.name}; {room.sequences} fit"
    else:
        return []
    return [f"{room.server} cannot hold {what}: decide for more GPUs (--cost roofline:NxGPU) or a shorter --context"]


def _mu(analysis: Analysis, arm: str) -> dict[str, float]:
    return {str(k): float(m - 1) for k, m in enumerate(analysis.emitted_curve(arm)) if k > 0}


def profile(facts: StudyFacts, analysis: Analysis, fmt: KVFormat) -> SpeculationProfile:
    """Acceptance by draft position of `<fmt>+bf16` at the current K (at k_max when the current K is 0).

    Rates are cut at 1, which the last, cut cycle of short texts can lift them over. A request too short for a cycle to
    end in has no length.
    """
    k = facts.config.current_k or facts.config.k_max
    result = analysis.arms[f"{fmt.name}+bf16"].result
    marginal = np.minimum(1.0, chain.survival(result.ends, result.accepted)[k - 1, :k])
    before = np.concatenate([[1.0], marginal[:-1]])
    with np.errstate(divide="ignore", invalid="ignore"):
        per_request = result.tokens / result.ends[:, k - 1]
    share = np.concatenate([[1.0], marginal]) - np.concatenate([marginal, [0.0]])
    return SpeculationProfile(
        conditional_accept_rates=[float(m / b) if b > 0 else None for m, b in zip(marginal, before, strict=True)],
        marginal_accept_rates=marginal.tolist(),
        mean_accept_length=float(1 + marginal.sum()),
        mean_accept_length_per_request={
            t.prompt.id: _finite(m) for t, m in zip(analysis.texts, per_request, strict=True)
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
