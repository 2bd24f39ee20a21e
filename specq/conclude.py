"""From analyses to decisions and recommendations of every format: what a study does last, and `specq tune` again."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from specq import decision, recommendation
from specq.analysis import BASE, NULL, Analysis, ArmResult, Columns, analyse, resampler_of
from specq.config import DRAWS
from specq.cost import CostModel
from specq.decision import Decision, StudyFacts
from specq.kv import KVFormat
from specq.mixtures import GroupChoice, group_choices, mixture
from specq.report.schema import Recommendation
from specq.rules import Rule
from specq.tune import Curve, quantile_interval, tokens_ratio


@dataclass
class Material:
    """What was measured: the main texts' analysis and columns, and each format's own text where there is one.

    `kind` says what the main texts are: "same" or "given". `own` maps format names, and the null arm's, to analyses on
    their own text.
    """

    kind: str
    main: Analysis
    columns: Mapping[str, Columns]
    own: dict[str, Analysis]

    @cached_property
    def paired(self) -> dict[str, Analysis]:
        """Per format with own text: its analysis, beside the baseline and the null arm each on their own text."""
        if not self.own:
            return {}
        base = {BASE: self.main.arms[BASE], NULL: self.own[NULL].arms[NULL]}
        return {f: _beside(base, a) for f, a in self.own.items() if f != NULL}


def _beside(base: dict[str, ArmResult], own: Analysis) -> Analysis:
    arms = own.arms | base
    draws = resampler_of(arms, own.documents, len(own.resampler.weights), own.resampler.seed)
    return replace(own, arms=arms, base=BASE, resampler=draws)


@dataclass
class Conclusion:
    """One format's decision with its recommendation, its groups, and the analysis it was decided from."""

    basis: Analysis
    decision: Decision
    recommendation: Recommendation
    groups: list[GroupChoice]


def conclude(
    facts: StudyFacts,
    formats: Sequence[KVFormat],
    material: Material,
    cost: CostModel,
    mix: Mapping[str, float] | None = None,
) -> dict[str, Conclusion]:
    """Decide every format; `mix` gives the shares of tokens of prompt groups, where the traffic is not like the file."""
    config = facts.config
    weigh = (lambda a: mixture(a, mix, config.seed)) if mix else (lambda a: a)
    main = weigh(material.main)
    probabilistic = None
    if config.draft_sampling == "greedy" and not facts.transform.greedy and config.text != "own":
        main_texts, rule = material.main.texts, Rule("probabilistic", config.verify)
        probabilistic = weigh(
            analyse(main_texts, material.columns, BASE, rule, config.k_max, seed=config.seed, draws=DRAWS)
        )
    out = {}
    for fmt in formats:
        whole = material.paired.get(fmt.name)
        paired = weigh(whole) if whole is not None else None
        basis, kind = (paired, "own") if config.text == "own" else (main, material.kind)
        made = decision.decide(facts, basis, fmt, cost)
        own = None
        if paired is not None:
            own = recommendation.shift_block(paired, f"{fmt.name}+bf16", made.reference_k, "own", NULL)
        rec = recommendation.recommend(facts, basis, own, made, cost, kind, probabilistic)
        groups = group_choices(facts, whole if config.text == "own" else material.main, cost, made)
        out[fmt.name] = Conclusion(basis, made, rec, groups)
    return out


def decision_block(found: Conclusion) -> dict:
    """What was decided for one format, with all that the plots and tables of it need; the decided point comes first."""
    d = found.decision
    points = sorted(d.curves, key=lambda p: p != d.at)
    return {
        "sentence": d.sentence,
        "action": d.action,
        "recommended": d.recommended,
        "recommended_for_baseline": d.baseline_recommended,
        "at": d.at,
        "at_bf16": d.base_at,
        "share_of_draws_choosing_k": {str(k): share for k, share in d.gain.choice_shares.items()},
        "curves": [_curve(d.curves[p], d.base_curves[p]) | {"break_even": asdict(d.break_even[p])} for p in points],
        "groups": [asdict(g) for g in found.groups],
        "capacity": asdict(d.capacity) if d.capacity else None,
        "sensitivity": d.sensitivity,
    }


def _curve(curve: Curve, base: Curve) -> dict:
    """Speedup over plain decoding at the same format for K = 0..k_max, the format's and BF16's, at one point."""
    ks = range(len(curve.point))
    over, over_draws = tokens_ratio(curve, base, curve.best, base.best)
    return {
        "batch": curve.at.batch,
        "context": curve.at.context,
        "recommended": curve.best,
        "recommended_bf16": base.best,
        "over_bf16": over,
        "over_bf16_ci95": quantile_interval(over_draws),
        "speedup": curve.point.tolist(),
        "speedup_ci95": [curve.interval(k) for k in ks],
        "speedup_bf16": base.point.tolist(),
        "speedup_bf16_ci95": [base.interval(k) for k in ks],
        "cycle_seconds": curve.times.tolist(),
        "cycle_seconds_bf16": base.times.tolist(),
    }
