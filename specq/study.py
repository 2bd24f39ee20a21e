"""The main job: config -> models -> texts -> scores -> chain -> intervals -> decision -> files.

`run_study` does all of it into a directory that appears only when complete. Each step is a function of what the one
before it made; `specq.analysis` and `specq.recommendation` hold the arithmetic.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specq import analysis, files, pairs, recommendation
from specq.analysis import BASE, NULL, Analysis
from specq.conclude import Conclusion, Material, conclude
from specq.config import DRAWS, StudyConfig
from specq.cost import CostModel, FreeDraft, Operating, cycle_times, measured
from specq.cost.spec import build, parse_cost
from specq.decision import StudyFacts
from specq.errors import Interrupted, SpecqError
from specq.inputs import (
    Models,
    Scales,
    calibrate,
    choose_prompts,
    given_texts,
    load_models,
    prompt_source,
    prompt_warnings,
    resolve_sampling,
    round_query_policy,
)
from specq.kv import KVFormat, get_format
from specq.measure import Work, run_of, sample, score
from specq.outliers import find_outliers
from specq.progress import Reporter
from specq.prompts import Prompt, PromptReport, Text, read_records
from specq.replay import ALTERNATIVE, Arm, ReplayResult, Setting
from specq.report.schema import Recommendation
from specq.rules import Rule
from specq.sensitivity import sensitivity
from specq.shards import BLOCK, workspace

BF16 = get_format("bf16")
SATURATION_WARNING = 1e-6  # share of saturated elements worth a word
ROWS = 1 << 16  # rows of positions.parquet written at once
GIVEN_TEXT_Z = 3.0  # beyond this, given responses were not sampled from the target


@dataclass
class TextSet:
    """One set of texts, scored under some arms: the baseline's ("same"), a format's "own", or "given" ones."""

    kind: str
    texts: list[Text]
    replay: ReplayResult
    analysis: Analysis

    @property
    def columns(self) -> dict[str, analysis.Columns]:
        """Logged columns per arm; they lie in the run's pieces and can be read until the study is complete."""
        return {name: scores.columns for name, scores in self.replay.arms.items()}


@dataclass
class Study:
    """A study in memory.

    `own` holds each format's own text, and under NULL the baseline's own text in the null arm's order of arithmetic.
    """

    config: StudyConfig
    directories: dict[str, str]
    pair: pairs.Pair
    models: Models
    setting: Setting
    prompts: list[Prompt]
    prompt_report: PromptReport
    main: TextSet
    own: dict[str, TextSet]
    facts: StudyFacts
    cost: CostModel
    conclusions: dict[str, Conclusion] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def recommendations(self) -> dict[str, Recommendation]:
        """The recommendation of every format."""
        return {name: found.recommendation for name, found in self.conclusions.items()}

    @property
    def material(self) -> Material:
        """What was measured, apart from the models."""
        own = {f: s.analysis for f, s in self.own.items()}
        return Material(self.main.kind, self.main.analysis, self.main.columns, own)


class Stopwatch:
    """Seconds per named step, in order."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Charge the time since the last lap to `name`, beside what it has."""
        now = time.perf_counter()
        self.seconds[name], self.last = self.seconds.get(name, 0.0) + now - self.last, now
        self.seconds["total"] = now - self.began


BASELINE, ALTERNATE = Arm.of(BF16, BF16), Arm.of(BF16, BF16, ALTERNATIVE, NULL)


def arms_of(fmt: KVFormat) -> list[Arm]:
    """The arms of a format on a text it shares: the target's cache alone, both caches, the draft's cache alone."""
    return [*own_arms_of(fmt), Arm.of(BF16, fmt)]


def own_arms_of(fmt: KVFormat) -> list[Arm]:
    """The arms of a format on text its target sampled: the target's cache alone, and both caches."""
    return [Arm.of(fmt, BF16), Arm.of(fmt, fmt)]


def analysed(work: Work, kind: str, texts: list[Text], replay: ReplayResult) -> TextSet:
    """Run the chain over scored texts; the replay's first arm is the one that sampled them."""
    config, columns = work.config, {name: s.columns for name, s in replay.arms.items()}
    base = next(iter(columns))
    done = analysis.analyse(texts, columns, base, work.setting.rule, config.k_max, seed=config.seed, draws=DRAWS)
    return TextSet(kind, texts, replay, done)


def build_cost(config: StudyConfig, models: Models, formats: Sequence[KVFormat], reporter: Reporter) -> CostModel:
    """The cost model that `--cost` names; a lookup's drafts are free."""
    cost = _model_cost(config, models, formats, reporter)
    return cost if models.has_draft_model else FreeDraft(cost)


def _model_cost(config: StudyConfig, models: Models, formats: Sequence[KVFormat], reporter: Reporter) -> CostModel:
    drafts = models.draft if models.has_draft_model else models.target
    spec = parse_cost(config.cost)
    if spec.kind != "measured":
        cost = build(spec, models.target.shape, drafts.shape)
        for at in (
            Operating(b, c, f.name, "bf16") for b in config.batch for c in config.context for f in (BF16, *formats)
        ):
            cycle_times(
                cost if models.has_draft_model else FreeDraft(cost), at, config.k_max
            )  # what the table lacks is said now, not after hours of scoring
        return cost
    positions = min(m.geometry.max_positions for m in models.by_role.values())
    if max(config.context) + config.k_max + 1 > positions:
        raise SpecqError(
            f"--context {max(config.context)} with {config.k_max} drafts is beyond the pair's {positions} positions, so its"
            " steps cannot be timed; give a shorter --context"
        )
    names = sorted({BF16.name, *(f.name for f in formats)})
    draft_names = [BF16.name] if models.has_draft_model else []
    steps = measured.steps_to_time(len(names), len(draft_names), len(config.batch), len(config.context), config.k_max)
    with reporter.task("timing steps on this machine", steps) as done:
        return measured.measure(
            models.target,
            drafts,
            names,
            draft_names,
            config.batch,
            config.context,
            config.k_max,
            round_query_policy(config),
            done,
        )


def run_study(
    config: StudyConfig,
    directories: dict[str, str],
    out: Path,
    overwrite: bool,
    reporter: Reporter,
    *,
    resume: bool = False,
    part: tuple[int, int] = (1, 1),
    sources: Sequence[Path] = (),
    report: bool = True,
) -> Study | None:
    """Run a study into `out`; `directories` maps each format's name to its sub-directory.

    `resume` continues an interrupted run; `part` (i, n) measures the i-th of n shares only, whose pieces are `out` then
    (None is returned); `sources` are directories of such pieces to join; without `report` no plots and pages are drawn.
    Raises SpecqError for everything the user can mend; finished pieces are kept in `<out>.partial/`.
    """
    watch = Stopwatch()
    formats = [get_format(name) for name in config.dtypes]
    records, prompt_report = read_records(prompt_source(config), config.undecodable)
    pair, models = load_models(config, reporter)
    cost = None if config.cost == "measured" else build_cost(config, models, formats, reporter)
    transform, draft_transform = resolve_sampling(config, models.target)
    prompts, spare = choose_prompts(config, models, records, prompt_report, reporter, given=config.text == "given")
    blocks = -(-len(prompts) // BLOCK)
    if part[1] > blocks:
        raise SpecqError(
            f"--part {part[0]}/{part[1]}: machines share a study in blocks of {BLOCK} prompts, and its {len(prompts)} prompts"
            f" make {blocks}; take at most {blocks} parts, or more prompts"
        )
    rule = Rule(config.draft_sampling, config.verify)
    watch.lap("load")
    run = run_of(config, models, directories, part)
    with workspace(out, run, reporter, overwrite=overwrite, resume=resume, sources=sources) as shards:
        scales = calibrate(config, models, formats, prompts, spare, reporter)
        rounds = round_query_policy(config)
        setting = Setting(
            transform, draft_transform, rule, models.vocabulary, config.seed, scales, rounds, config.k_max
        )
        watch.lap("calibrate")
        work = Work(config, models, setting, prompts, shards, reporter)
        sets = measure(work, formats, watch)
        if part[1] > 1:
            return None
        analyses = {name: analysed(work, *found) for name, found in sets.items()}
        main, own = analyses.pop(BASE), analyses
        watch.lap("analyse")
        cost = cost or build_cost(config, models, formats, reporter)
        watch.lap("cost")
        facts = gather_facts(config, pair, models, setting, formats, main, own)
        facts.warnings[None] += [*prompt_warnings(config, prompts, prompt_report), *work.notes]
        study = Study(
            config, directories, pair, models, setting, prompts, prompt_report, main, own, facts, cost,
            timings=watch.seconds,
        )  # fmt: skip
        decide(study, formats)
        watch.lap("decide")
        write(shards.folder.parent, study)
    if report:
        draw(out)
    return study


def measure(
    work: Work, formats: Sequence[KVFormat], watch: Stopwatch
) -> dict[str, tuple[str, list[Text], ReplayResult]]:
    """(kind, texts, scores) by name: the baseline's or given text under BASE; where own text is wanted, the null arm's under
    NULL and every format's under its name."""
    config, models = work.config, work.models
    given = config.text == "given"
    texts = given_texts(work.mine, models) if given else sample(work, BASELINE)
    _refuse_short(texts, config.k_max)
    watch.lap("sample")
    arms = [BASELINE, ALTERNATE]
    if config.text != "own":
        kinds = arms_of if models.has_draft_model else own_arms_of  # a lookup has no cache
        arms += [arm for f in formats for arm in kinds(f)]
    kind, what = ("given", "given text") if given else ("same", "the baseline's text")
    found = {BASE: (kind, texts, score(work, kind, texts, arms, what))}
    watch.lap("score")
    if config.text in ("own", "both"):
        for name, mine in ({NULL: [ALTERNATE]} | {f.name: own_arms_of(f) for f in formats}).items():
            texts = sample(work, mine[0])
            _refuse_short(texts, config.k_max)
            watch.lap("sample")
            found[name] = ("own", texts, score(work, f"own-{name}", texts, mine, f"{name}'s own text"))
            watch.lap("score")
    return found


def _refuse_short(texts: Sequence[Text], k_max: int) -> None:
    longest = max(t.positions for t in texts)
    if longest <= k_max:
        raise SpecqError(
            f"the longest text has {longest} positions to score, too few for a cycle of {k_max} drafts; give other prompts or"
            " a smaller --k-max"
        )


def draw(out: Path) -> None:
    """Draw the report of a complete study; a failure here costs no measurement."""
    from specq.report import write_report

    try:
        write_report(out)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; the study in {out} is complete, and the same command draws its report"
        ) from None
    except Exception as error:
        raise SpecqError(
            f"the study in {out} is complete, but its report could not be drawn ({type(error).__name__}: {error}); the same"
            " command again tries it, and --overwrite runs a study of another version anew"
        ) from error


def decide(study: Study, formats: Sequence[KVFormat]) -> None:
    """Fill in the conclusions of every format, with how they move with acceptance, draft cost and batch."""
    study.conclusions = conclude(study.facts, formats, study.material, study.cost)
    for found in study.conclusions.values():
        made = found.decision
        made.sensitivity = sensitivity(study.facts, found.basis, made.format, study.cost, made)


def _native_fp8(config: StudyConfig) -> bool | None:
    if config.device != "cpu":
        import torch

        return torch.cuda.get_device_capability() >= (8, 9)
    return None


def gather_facts(
    config: StudyConfig, pair: pairs.Pair, models: Models, setting: Setting, formats: Sequence[KVFormat], main: TextSet,
    own: dict[str, TextSet],
) -> StudyFacts:  # fmt: skip
    """What all formats share, with the warnings about texts and checkpoints, of the study or of one format.

    What depends on K, batch or context is warned of by `recommend`, since `specq tune` decides for others.
    """
    notes = [note for model in models.by_role.values() for note in model.notes]
    warnings: dict[str | None, list[str]] = {None: notes}
    if config.random_weights:
        warnings[None].append(
            "random weights and random prompts: no figure of acceptance here says anything about the pair"
        )
    sources = {f.name: _scale_source(f, setting.scales, models) for f in formats}
    for name, source in sources.items():
        if source in ("one", "checkpoint in part"):
            text = "K and V scales are 1.0 where the checkpoint gives none, as vLLM does; --calibrate FILE takes better ones"
            warnings.setdefault(name, []).append(text)
    for texts in (main, *own.values()):
        stored = sum(len(t.prompt.tokens) + t.positions for t in texts.texts)
        for p, counts in texts.replay.saturated.items():
            g = models.by_role[p.role].geometry
            share = sum(counts) / (2 * stored * g.layers * g.kv_heads * g.head_dim)
            if share > SATURATION_WARNING:
                text = f"{100 * share:.2g} % of the {p.role}'s K and V saturate at the largest {p.format.name} code"
                warnings.setdefault(p.format.name, []).append(text)
        for arm, columns in texts.columns.items():
            if not np.isfinite(columns["kl"]).all():
                text = "the baseline's support reaches beyond the format's under top-k or top-p: its KL divergence is infinite"
                warnings.setdefault(arm.split("+")[0] if arm != NULL else None, []).append(
                    f"{text}, null in study.json"
                )
    if config.text == "given":
        mean, se, z = main.analysis.excess(BASE)
        if abs(z) > GIVEN_TEXT_Z:
            warnings[None].append(
                "the given responses do not look sampled from the target at these settings (sum of b - a per document"
                f" {mean:+.2f}, standard error {se:.2f}): mu describes this text, not the target's own"
            )
    texts = [t for s in (main, *own.values()) for t in s.texts]
    if empty := sum(t.positions == 0 for t in texts):
        warnings[None].append(
            f"{empty} of {len(texts)} texts end at their first token, which prefill gives: they have no cycle and count in no"
            " figure of acceptance"
        )
    documents = main.analysis.resampler.documents
    if 1 < documents < 10:
        warnings[None].append(f"only {documents} documents: intervals from so small a sample are rough")
    spec = parse_cost(config.cost)
    return StudyFacts(
        config=config,
        pair=pair.name,
        target=_served_name(pair.target),
        draft=_served_name(pair.target if pair.draft.source == pairs.SELF else pair.draft),
        target_shape=models.target.shape,
        draft_shape=models.draft.shape if models.has_draft_model else None,
        transform=setting.transform,
        target_vocab=models.vocabulary.target_logits,
        draft_vocab=models.vocabulary.draft_logits,
        lookup=None if models.has_draft_model else models.draft,
        scale_sources=sources,
        warnings={name: list(dict.fromkeys(w)) for name, w in warnings.items()},
        native_fp8=spec.native_fp8(_native_fp8(config)),
        server=spec.server,
        outliers=find_outliers(main.replay.ranges["target"]),
    )


def _scale_source(fmt: KVFormat, scales: Scales, models: Models) -> str:
    if not fmt.static_parts:
        return "none needed"
    if ("target", fmt.name) in scales:
        return "calibration"
    sources = {s.source for s in models.target.scales}
    return sources.pop() if len(sources) == 1 else "checkpoint in part"


def _served_name(side: pairs.Side) -> str:
    return str(Path(side.source).resolve()) if side.local and side.is_model else side.source


def position_rows(found: TextSet) -> Iterator[dict[str, np.ndarray]]:
    """Rows of positions.parquet, arm by arm and some texts at a time, cut where ROWS are reached and not by pieces."""
    lengths = [t.positions for t in found.texts]
    ends = np.cumsum(lengths)
    for arm, columns in found.columns.items():
        first = row = 0
        while first < len(lengths):
            last = min(int(np.searchsorted(ends, row + ROWS)) + 1, len(lengths))
            end = int(ends[last - 1])
            b = found.analysis.arms[arm].b[row:end]
            yield files.position_rows(found.texts[first:last], columns.rows(row, end), b, arm, found.kind)
            first, row = last, end


def write(folder: Path, study: Study) -> None:
    """All files of a study but its report."""
    from specq.summary import summarise_study

    sets = [study.main, *study.own.values()]
    files.write_texts(folder / "texts.parquet", [t for s in sets for t in s.texts])
    files.write_positions(folder / "positions.parquet", (rows for s in sets for rows in position_rows(s)))
    for name, rec in study.recommendations.items():
        sub = folder / study.directories[name]
        sub.mkdir()
        files.write_json(sub / "recommendation.json", rec.model_dump(mode="json"))
        basis = study.own[name].analysis if study.config.text == "own" else study.main.analysis
        profile = recommendation.profile(study.facts, basis, get_format(name))
        files.write_json(sub / "speculation_profile.json", profile.model_dump(mode="json"))
    files.write_json(folder / "study.json", summarise_study(study))
