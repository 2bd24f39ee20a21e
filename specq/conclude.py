"""From analyses to decisions and recommendations of every format: what a study does last, and `specq tune` again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specq import decision, recommendation
from specq.analysis import BASE, NULL, Analysis, Columns, analyse
from specq.config import DRAWS
from specq.cost import CostModel
from specq.decision import Decision, StudyFacts
from specq.kv import KVFormat
from specq.mixtures import GroupChoice, group_choices, mixture
from specq.report.schema import Recommendation
from specq.rules import Rule


@dataclass
class Material:
    """What was measured: the main texts' analysis and columns, and each format's own text where there is one.

    `kind` says what the main texts are: "same" or "given". `own` maps format names to analyses on their own text.
    """

    kind: str
    main: Analysis
    columns: Mapping[str, Columns]
    own: dict[str, Analysis]

    @property
    def paired(self) -> dict[str, Analysis]:
        """Per format with own text: baseline and null on the baseline's text, the format's arms on their own."""
        base = {name: self.main.arms[name] for name in (BASE, NULL)}
        return {f: replace(self.main, arms=a.arms | base) for f, a in self.own.items()}


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
        probabilistic = weigh(
            analyse(material.main.texts, material.columns, BASE, Rule(), config.k_max, seed=config.seed, draws=DRAWS)
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
