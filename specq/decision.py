"""What to do: the K for every operating point, the schedule by batch size, and whether the format pays."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from specq.analysis import BASE, Analysis
from specq.capacity import Load, Server
from specq.config import StudyConfig
from specq.cost import CostModel, Operating
from specq.cost.base import Scaled
from specq.errors import SpecqError
from specq.kv import KVFormat, get_format
from specq.ngram import NgramLookup
from specq.outliers import Outlier
from specq.pairs import drafts_for_itself
from specq.rules import Transform
from specq.shape import ModelShape
from specq.tune import (
    Curve,
    Gain,
    Loss,
    kept_k_loss,
    more_prompts,
    pays,
    quantile_interval,
    retuning,
    schedule,
    speed_curve,
    tokens_ratio,
)
from specq.wording import sentence

Action = Literal["enable", "enable_and_retune", "measure_more", "do_not_enable", "keep", "retune"]
SCHEDULER_LIMIT = 256  # sequences that a server runs at once by default (vLLM's max_num_seqs)
Point = tuple[int, int]  # batch, context


@dataclass
class StudyFacts:
    """What every format of a study shares: names, shapes, sampling, vocabulary sizes, where the scales came from.

    `warnings` are keyed by format name, those of the whole study by None. `native_fp8` says whether the accelerator decided
    for has FP8 units, None where that is not known; `server` is the GPUs decided for, where the cost names any. `outliers`
    are the target's key channels far above their head's median; `lookup` is set where the draft is no model.
    """

    config: StudyConfig
    pair: str
    target: str
    draft: str
    target_shape: ModelShape
    draft_shape: ModelShape | None
    transform: Transform
    target_vocab: int
    draft_vocab: int
    scale_sources: dict[str, str]
    warnings: dict[str | None, list[str]]
    native_fp8: bool | None = None
    server: Server | None = None
    outliers: list[Outlier] = field(default_factory=list)
    lookup: NgramLookup | None = None

    @property
    def self_draft(self) -> bool:
        """Whether the target drafts for itself, with one copy of its weights."""
        return drafts_for_itself(self.config.pair, self.config.draft)


@dataclass
class BreakEven:
    """One format against BF16 at the same K: what acceptance does to speed, what time does, and both together.

    The format pays where emitted_ratio > cycle_time_ratio; speed_ratio is their quotient. Names are recommendation.json's.
    """

    k: int
    emitted_ratio: float
    emitted_ratio_ci95: list[float]
    cycle_time_ratio: float
    speed_ratio: float
    speed_ratio_ci95: list[float]


@dataclass
class Capacity:
    """How many sequences fit, and what the larger batch and the other cycle give together.

    `batch` and `bf16_batch` are what fits, at most the scheduler's limit; tokens per second are the format's at its batch
    and best K over BF16's at its own, None where one of them cannot be given. Names are recommendation.json's.
    """

    server: str
    context: int
    sequences: int
    bf16_sequences: int
    batch: int
    bf16_batch: int
    tokens_per_second_over_bf16: float | None = None
    ci95: list[float | None] = field(default_factory=lambda: [None, None])

    @property
    def limits(self) -> bool:
        """Whether memory bounds the batch of either format before the scheduler does."""
        return min(self.sequences, self.bf16_sequences) < SCHEDULER_LIMIT


@dataclass
class Decision:
    """Everything decided for one format; the recommendation and the plots are written from it.

    `at` and `base_at` are the operating points (batch, context) decided for, of the format and of BF16: the same unless
    the objective is throughput. `reference_k` is the K that shifts of mu are told for: the current one; without
    speculation now, the recommended one; failing that, k_max. `more_prompts` is how many more prompts would decide, None
    where that is not the question or no number of them would.
    """

    format: KVFormat
    curves: dict[Point, Curve]
    base_curves: dict[Point, Curve]
    at: Point
    base_at: Point
    reference_k: int
    recommended: int
    baseline_recommended: int
    schedule: list[list[int]]
    gain: Gain
    kept: Loss
    break_even: dict[Point, BreakEven]
    pay: float
    pay_ci95: list[float]
    action: Action
    more_prompts: int | None
    sentence: str
    capacity: Capacity | None = None
    sensitivity: dict | None = field(default=None)

    @property
    def curve(self) -> Curve:
        """The format's curve at the point decided for."""
        return self.curves[self.at]

    @property
    def base_curve(self) -> Curve:
        """BF16's curve at the point decided for."""
        return self.base_curves[self.base_at]


@dataclass
class Speeds:
    """Speed curves of one format and of BF16 at any operating point, made once each."""

    facts: StudyFacts
    analysis: Analysis
    format: KVFormat
    cost: CostModel

    def __post_init__(self) -> None:
        """Emitted and its draws, once per arm."""
        self.arm = f"{self.format.name}+bf16"
        self._emitted = {a: (self.analysis.emitted_curve(a), self.analysis.emitted_draws(a)) for a in (BASE, self.arm)}

    def emitted(self, baseline: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(emitted [k_max + 1], its draws [R, k_max + 1])."""
        return self._emitted[BASE if baseline else self.arm]

    def curve(
        self, point: Point, baseline: bool = False, factor: np.ndarray | None = None, draft: float = 1.0
    ) -> Curve:
        """The curve at (batch, context), of BF16 where `baseline`.

        `factor` [k_max + 1] scales emitted, `draft` the draft's step times: what-ifs.
        """
        at = Operating(*point, "bf16" if baseline else self.format.name, "bf16")
        value, draws = self.emitted(baseline)
        scale = 1.0 if factor is None else factor
        cost = self.cost if draft == 1.0 else Scaled(self.cost, draft)
        limit = self.facts.config.max_ms_per_token
        return speed_curve(value * scale, draws * scale, cost, at, None if limit is None else limit / 1e3)


def decide(facts: StudyFacts, analysis: Analysis, fmt: KVFormat, cost: CostModel) -> Decision:
    """Curves at every batch and context, the K at the point the objective picks, the schedule, and whether the format pays.

    Raises SpecqError where the cost model lacks a point that was asked for, or nothing fits the server.
    """
    config, speeds = facts.config, Speeds(facts, analysis, fmt, cost)
    points = [(b, c) for c in config.context for b in config.batch]
    curves = {p: speeds.curve(p) for p in points}
    base_curves = {p: speeds.curve(p, baseline=True) for p in points}
    fits = _fits(facts, fmt)
    for batch in () if fits is None else {min(n, max(config.batch)) for n in fits}:
        _add_point(curves, base_curves, speeds, (batch, config.context[0]))
    at, base_at = (
        _operating_point(config, c, None if fits is None else fits[i]) for i, c in enumerate((curves, base_curves))
    )
    mine, base, current = curves[at], base_curves[base_at], config.current_k
    recommended, base_best = mine.best, base.best
    reference = current or recommended or config.k_max
    plan = schedule([(b, c.best) for (b, context), c in curves.items() if context == config.context[0]])
    # tokens per second of the format at its recommended K over the baseline's at its own best K, paired draws
    pay, pay_draws = tokens_ratio(mine, base, recommended, base_best)
    interval = quantile_interval(pay_draws) if analysis.resampler.documents > 1 else [np.nan, np.nan]
    action = _action(fmt, pay, interval, recommended != current)
    made = Decision(
        format=fmt,
        curves=curves,
        base_curves=base_curves,
        at=at,
        base_at=base_at,
        reference_k=reference,
        recommended=recommended,
        baseline_recommended=base_best,
        schedule=plan,
        gain=retuning(mine, current, recommended),
        kept=kept_k_loss(mine, base, recommended, base_best),
        break_even={p: _break_even(speeds, curves[p], base_curves[p], reference) for p in curves},
        pay=pay,
        pay_ci95=interval,
        action=action,
        more_prompts=None,
        sentence="",
        capacity=_capacity(facts, speeds, fits),
    )
    timing_only, documents = _timing_half_width(speeds, made), analysis.resampler.documents
    if action == "measure_more":
        made.more_prompts = more_prompts(documents, pay, interval, timing_only)
    made.sentence = sentence(facts, made, documents, cost.source, kv_share(facts.target_shape, fmt), timing_only)
    return withheld(made, config) if config.random_weights else made


def _fits(facts: StudyFacts, fmt: KVFormat) -> tuple[int, int] | None:
    """(sequences of the first context that fit in the format, in BF16); None without a server."""
    if facts.server is None:
        return None
    load = Load(facts.target_shape, facts.draft_shape, shared=facts.self_draft)
    return tuple(load.sequences(f, facts.config.context[0], facts.server) for f in (fmt, get_format("bf16")))


def _add_point(curves: dict, base_curves: dict, speeds: Speeds, point: Point) -> None:
    """Both curves at one more point, where the cost model knows it."""
    if point in curves or point[0] < 1:
        return
    try:
        curves[point], base_curves[point] = speeds.curve(point), speeds.curve(point, baseline=True)
    except SpecqError:  # a table that ends before this batch
        curves.pop(point, None)


def _operating_point(config: StudyConfig, curves: dict[Point, Curve], fit: int | None) -> Point:
    """Latency: the first batch. Throughput: the batch with most tokens per second that fits and meets the limit."""
    context = config.context[0]
    if config.objective == "latency":
        return config.batch[0], context
    fitting = {p: c for p, c in curves.items() if p[1] == context and (fit is None or p[0] <= fit)}
    if not fitting:
        raise SpecqError(f"not one sequence of {context} tokens fits: take more GPUs or a shorter --context")
    meeting = {p: c for p, c in fitting.items() if c.meets_limit[c.best]}
    if not meeting:  # nothing meets the limit: the quickest
        return min(fitting, key=lambda p: fitting[p].per_token[fitting[p].best])
    return max(meeting, key=lambda p: meeting[p].tokens_per_second[meeting[p].best])


def _break_even(speeds: Speeds, mine: Curve, base: Curve, k: int) -> BreakEven:
    (e, draws), (e0, draws0) = speeds.emitted(), speeds.emitted(baseline=True)
    ratio, cycle = float(e[k] / e0[k]), float(mine.times[k] / base.times[k])
    speed, speed_draws = tokens_ratio(mine, base, k, k)
    return BreakEven(
        k, ratio, quantile_interval(draws[:, k] / draws0[:, k]), cycle, speed, quantile_interval(speed_draws)
    )


def _capacity(facts: StudyFacts, speeds: Speeds, fits: tuple[int, int] | None) -> Capacity | None:
    if fits is None:
        return None
    context = facts.config.context[0]
    batch, base_batch = (min(n, SCHEDULER_LIMIT) for n in fits)
    found = Capacity(facts.server.name, context, *fits, batch, base_batch)
    if batch and base_batch:
        try:
            mine, base = speeds.curve((batch, context)), speeds.curve((base_batch, context), baseline=True)
        except SpecqError:  # a table that ends before these batches
            return found
        found.tokens_per_second_over_bf16, draws = tokens_ratio(mine, base, mine.best, base.best)
        found.ci95 = quantile_interval(draws)
    return found


def withheld(made: Decision, config: StudyConfig) -> Decision:
    """The same figures without a recommendation, for random weights: K stays what it is."""
    current = config.current_k
    return replace(
        made,
        recommended=current,
        action="keep",
        more_prompts=None,
        schedule=schedule([(b, current) for b in sorted(set(config.batch))]),
        gain=retuning(made.curve, current, current),
        sentence="no recommendation: the weights are random, so acceptance and every speedup from it mean nothing; memory and"
        " step times do",
    )


def kv_share(shape: ModelShape, fmt: KVFormat) -> float:
    """KV bytes per token in `fmt`, scales included, as a share of BF16's."""
    return sum(shape.kv_bytes(fmt, 1)) / sum(shape.kv_bytes(get_format("bf16"), 1))


def _action(fmt: KVFormat, pay: float, interval: list[float], changes_k: bool) -> Action:
    if fmt.name == "bf16":
        return "retune" if changes_k else "keep"
    if pays(pay, interval) == "yes":
        return "enable_and_retune" if changes_k else "enable"
    return "do_not_enable" if interval[1] < 1 else "measure_more"


def _timing_half_width(speeds: Speeds, made: Decision) -> float:
    """Half the width of the interval of `pay` that the noise of the timings alone makes."""
    exact, ks = [], ((made.curve, made.recommended, False), (made.base_curve, made.baseline_recommended, True))
    for curve, k, baseline in ks:
        exact.append(speeds.emitted(baseline)[1][:, k] * curve.at.batch / curve.times[k])
    low, high = quantile_interval(exact[0] / exact[1])
    both = (made.pay_ci95[1] - made.pay_ci95[0]) / 2
    return float(np.sqrt(max(0.0, both**2 - ((high - low) / 2) ** 2)))
