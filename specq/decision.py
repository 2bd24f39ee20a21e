"""What to do: the K for every operating point, the schedule by batch size, and whether the format pays."""

from dataclasses import dataclass, field, replace

import numpy as np

from specq.analysis import BASE, Analysis
from specq.config import StudyConfig
from specq.cost import CostModel, Operating
from specq.inputs import Models
from specq.kv import KVFormat, get_format
from specq.models import Geometry
from specq.ngram import NgramLookup
from specq.outliers import Outlier
from specq.sampling import Transform
from specq.tune import MAX_LOSS, Curve, Gain, quantile_interval, retuning, schedule, speed_curve


@dataclass
class StudyFacts:
    """What every format of a study shares: names, sampling, vocabulary sizes, where the scales came from.

    `warnings` are keyed by format name, those of the whole study by None. `native_fp8` says whether the accelerator decided
    for has FP8 units, None where that is not known. `outliers` are the target's key channels far above their head's median.
    `lookup` is set where the draft is no model.
    """

    config: StudyConfig
    pair: str
    target: str
    draft: str
    transform: Transform
    target_vocab: int
    draft_vocab: int
    scale_sources: dict[str, str]
    warnings: dict[str | None, list[str]]
    native_fp8: bool | None = None
    outliers: list[Outlier] = field(default_factory=list)
    lookup: NgramLookup | None = None


@dataclass
class Decision:
    """Everything decided for one format; the recommendation and the plots are written from it.

    `reference_k` is the K that shifts of mu are told for: the current one; without speculation now, the recommended one;
    failing that, k_max.
    """

    format: KVFormat
    curves: dict[tuple[int, int], Curve]
    base_curves: dict[tuple[int, int], Curve]
    reference_k: int
    recommended: int
    baseline_recommended: int
    schedule: list[list[int]]
    gain: Gain
    pay: float
    pay_ci95: list[float]
    sentence: str


def decide(config: StudyConfig, models: Models, analysis: Analysis, fmt: KVFormat, cost: CostModel) -> Decision:
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
    sentence = _sentence(
        fmt, mine.at, current, recommended, pay, interval, cost.source, kv_share(models.target.geometry, fmt)
    )
    return Decision(
        fmt,
        curves,
        base_curves,
        current or recommended or config.k_max,
        recommended,
        base_best,
        plan,
        retuning(mine, current, recommended),
        pay,
        interval,
        sentence,
    )


def withheld(made: Decision, config: StudyConfig) -> Decision:
    """The same figures without a recommendation, for random weights: K stays what it is."""
    first, current = (config.batch[0], config.context[0]), config.current_k
    return replace(
        made,
        recommended=current,
        schedule=schedule([(b, current) for b in sorted(set(config.batch))]),
        gain=retuning(made.curves[first], current, current),
        sentence="no recommendation: the weights are random, so acceptance and every speedup from it mean nothing; memory and"
        " step times do",
    )


def kv_share(geometry: Geometry, fmt: KVFormat) -> float:
    """KV bytes per token in `fmt`, scales included, as a share of BF16's."""
    return sum(geometry.kv_bytes_per_token(fmt)) / sum(geometry.kv_bytes_per_token(get_format("bf16")))


def _sentence(
    fmt: KVFormat, at: Operating, current: int, best: int, pay: float, ci: list[float], source: str, share: float
) -> str:
    where = f"batch {at.batch}, context {at.context}"
    by = "step times measured on this machine" if source == "measured" else source
    if best == current:
        k = f"keep num_speculative_tokens at {best}"
    elif best:
        k = f"set num_speculative_tokens to {best} (now {current})"
    else:
        k = "drop speculation (K = 0): no K is better than plain decoding by more than noise and 1 %"
    if fmt.name == "bf16":
        return f"{k} at {where}, by {by}"
    if np.isnan(ci[0]):
        return f"measure more: one document shows no spread, so nothing can be decided about {fmt.name}"
    speed = (
        f"{100 * (pay - 1):+.1f} % [{100 * (ci[0] - 1):+.1f}, {100 * (ci[1] - 1):+.1f}] tokens per second against BF16"
    )
    evidence = (
        f"{speed}, each at its best K, at {where}, by {by}; its KV cache takes {100 * share:.0f} % of BF16's bytes"
    )
    if ci[0] > 1 or (ci[0] >= 1 - MAX_LOSS and pay >= 1 - MAX_LOSS / 2):
        return f"enable {fmt.name} and {k}: {evidence}"
    if ci[1] < 1:
        return f"do not enable {fmt.name} for speed: {evidence}. If memory decides, {k}"
    return f"measure more before enabling {fmt.name}: {evidence}. Meanwhile {k}"
