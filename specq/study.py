"""The main job: config -> models -> texts -> scores -> chain -> intervals -> decision -> files.

`run_study` does all of it into a directory that appears only when complete. Each step is a function of what the one
before it made; `specq.analysis` and `specq.recommendation` hold the arithmetic.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specq import analysis, files, pairs, prompts, recommendation
from specq.acceptance import Rule
from specq.config import DRAWS, StudyConfig
from specq.cost import CostModel, measured, roofline, table
from specq.cost.roofline import ModelShape
from specq.errors import SpecqError
from specq.kv import KVFormat, get_format
from specq.kv.calibration import measure_range
from specq.models import LoadedModel, Vocabulary, check_pair, load
from specq.progress import Reporter
from specq.prompts import Prompt, PromptReport
from specq.recommendation import BASE, NULL, Decision, StudyFacts
from specq.replay import ALTERNATIVE, Arm, ReplayResult, Setting, score_texts
from specq.report.schema import Recommendation, Shift
from specq.sampling import Transform
from specq.summary import summarise_study
from specq.texts import Text, sample_texts

BF16 = get_format("bf16")
CALIBRATION_PROMPTS = 16
SATURATION_WARNING = 1e-6


@dataclass
class Models:
    """Both models and what was found out about them."""

    target: LoadedModel
    draft: LoadedModel
    vocabulary: Vocabulary


@dataclass
class Study:
    """A study in memory, as handed to the report."""

    config: StudyConfig
    directories: dict[str, str]
    analysis: analysis.Analysis
    columns: dict[str, analysis.Columns]
    decisions: dict[str, Decision]
    recommendations: dict[str, Recommendation]
    summary: dict = field(default_factory=dict)


def load_models(config: StudyConfig, reporter: Reporter) -> tuple[pairs.Pair, Models]:
    """Find and load the pair, and check that its models can speak for one another."""
    pair = pairs.find(config.pair, config.target, config.draft)
    where = pairs.locate(pair)
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpecqError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    reporter.note(f"loading {pair.name}: {Path(where[0]).name} and {Path(where[1]).name}")
    target, draft = (load(path, config.device) for path in where)
    models = Models(target, draft, check_pair(target, draft))
    needed = config.prompt_tokens + config.output_tokens
    for role, model in (("target", target), ("draft", draft)):
        if needed > model.geometry.max_positions:
            raise SpecqError(
                f"the {role} has {model.geometry.max_positions} positions and the study needs {needed} (--prompt-tokens"
                f" {config.prompt_tokens} + --output-tokens {config.output_tokens})"
            )
    return pair, models


def resolve_sampling(config: StudyConfig, target: LoadedModel) -> tuple[Transform, Transform]:
    """(target's, draft's) sampling transform: the command line, then generation_config, then 1, off, off."""
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | target.sampling_defaults
    given = {k: getattr(config, k) for k in default if getattr(config, k) is not None}
    chosen = default | given
    transform = Transform(float(chosen["temperature"]), int(chosen["top_k"]), float(chosen["top_p"]))
    return transform, transform.without_truncation() if config.draft_transform == "temperature" else transform


def round_query_policy(config: StudyConfig) -> Callable[[KVFormat], bool]:
    """Which formats round the query to e4m3: `auto` as vLLM does, `fp8` every FP8 format, `bf16` none."""
    if config.query_dtype == "fp8":
        return lambda fmt: fmt.name.startswith("fp8")
    return lambda fmt: config.query_dtype == "auto" and fmt.rounds_query


def read_prompts(config: StudyConfig, models: Models) -> tuple[list[Prompt], PromptReport, list[Prompt]]:
    """(prompts to score, what became of the file, prompts left over from the default set for calibration)."""
    source = config.prompts or str(pairs.DEFAULT_PROMPTS)
    records, report = prompts.read_records(source)
    spare = 0 if config.prompts else CALIBRATION_PROMPTS
    found = prompts.encode_prompts(
        records,
        report,
        models.target.tokenizer,
        count=config.num_prompts + spare,
        prompt_tokens=config.prompt_tokens,
        vocabulary=models.vocabulary.size,
        seed=config.seed,
        given=config.text == "given",
        max_response=config.output_tokens,
    )
    report.used = min(len(found), config.num_prompts)
    return found[: config.num_prompts], report, found[config.num_prompts :]


def calibrate(
    config: StudyConfig,
    models: Models,
    formats: Sequence[KVFormat],
    scored: list[Prompt],
    spare: list[Prompt],
    reporter: Reporter,
) -> dict:
    """Static scales per (role, format name) from text that is not scored; empty where no format wants any."""
    wanted = [f for f in formats if f.static_parts and (config.calibrate or f.needs_calibration)]
    if not wanted:
        return {}
    if config.calibrate:
        records, report = prompts.read_records(config.calibrate)
        found = prompts.encode_prompts(
            records,
            report,
            models.target.tokenizer,
            count=CALIBRATION_PROMPTS + len(scored),
            prompt_tokens=config.prompt_tokens,
            vocabulary=models.vocabulary.size,
            seed=config.seed,
        )
        taken = {p.tokens for p in scored}
        spare = [p for p in found if p.tokens not in taken][:CALIBRATION_PROMPTS]
    if not spare:
        names = ", ".join(f.name for f in wanted)
        raise SpecqError(
            f"{names} needs static scales from text that is not scored: give --calibrate FILE with other prompts than"
            " those of the study"
        )
    scales = {}
    tokens = sum(len(p.tokens) for p in spare)
    with reporter.task("calibrating scales", 2 * tokens) as done:
        for role, model in (("target", models.target), ("draft", models.draft)):
            ranges = measure_range(model, [p.tokens for p in spare], progress=done)
            for fmt in wanted:
                scales[role, fmt.name] = ranges.scales(fmt)
    return scales


def sample(
    config: StudyConfig, models: Models, scored: list[Prompt], fmt: KVFormat, setting: Setting, reporter: Reporter
) -> list[Text]:
    """Texts of one target format over its own cache."""
    total = sum(len(p.tokens) - 1 for p in scored) + len(scored) * config.output_tokens
    with reporter.task(f"sampling text, {fmt.name} cache", total) as done:
        return sample_texts(
            models.target,
            scored,
            fmt,
            transform=setting.transform,
            vocabulary=models.vocabulary.size,
            max_tokens=config.output_tokens,
            seed=config.seed,
            arm=f"{fmt.name}+bf16",
            scales=setting.scales.get(("target", fmt.name)),
            round_query=setting.round_query(fmt),
            progress=done,
        )


def score(
    models: Models, texts: list[Text], arms: list[Arm], setting: Setting, what: str, reporter: Reporter
) -> ReplayResult:
    """Replay of `texts` under `arms`."""
    passes = len({p for arm in arms for p in (arm.target, arm.draft)})
    total = passes * sum(len(t.prompt.tokens) + t.positions for t in texts)
    with reporter.task(f"scoring {what}", total) as done:
        return score_texts(models.target, models.draft, texts, arms, setting, done)


def arms_of(fmt: KVFormat) -> list[Arm]:
    """The two arms of a format: the target's cache alone, and both."""
    return list({a.name: a for a in (Arm.of(fmt, BF16), Arm.of(fmt, fmt))}.values())


def given_texts(scored: list[Prompt], eos: frozenset[int]) -> list[Text]:
    """Texts from the responses that the prompt file gave."""
    return [Text(p, p.response, "given", p.response[-1] in eos) for p in scored]


def chainable(texts: list[Text]) -> list[Text]:
    """Texts with at least one position in the chain. Raises SpecqError when none has."""
    kept = [t for t in texts if t.positions > 0]
    if not kept:
        raise SpecqError("every text ended at its first token, so there is no position to score; try other prompts")
    return kept


def build_cost(config: StudyConfig, models: Models, formats: Sequence[KVFormat], reporter: Reporter) -> CostModel:
    """The cost model that `--cost` names."""

    if config.cost == "measured":
        names = sorted({BF16.name, *(f.name for f in formats)})
        points = (len(names), 1, len(config.batch), len(config.context), config.k_max)
        with reporter.task("timing steps on this machine", measured.steps_to_time(*points)) as done:
            return measured.measure(
                models.target,
                models.draft,
                names,
                [BF16.name],
                config.batch,
                config.context,
                config.k_max,
                round_query_policy(config),
                done,
            )
    if config.cost.startswith("roofline:"):
        gpu = roofline.get_gpu(config.cost.removeprefix("roofline:"))
        return roofline.Roofline(gpu, _shape(models.target), _shape(models.draft))
    return table.read_timings(config.cost)


def _shape(model: LoadedModel) -> ModelShape:
    g, config = model.geometry, model.model.config.get_text_config()
    table = 0 if config.tie_word_embeddings else g.vocab * g.hidden
    return ModelShape(model.parameters - table, g.layers, g.heads, g.kv_heads, g.head_dim)


def run_study(
    config: StudyConfig, directories: dict[str, str], out: Path, overwrite: bool, reporter: Reporter
) -> Study:
    """Run a study into `out`; `directories` maps each format's name to its sub-directory.

    Raises SpecqError for everything the user can mend; nothing is left behind then.
    """
    from specq.report import write_report

    began = time.perf_counter()
    timings: dict[str, float] = {}
    formats = [get_format(name) for name in config.dtypes]
    rule = Rule(config.draft_sampling, config.verify)

    def lap(name: str) -> None:
        timings[name] = time.perf_counter() - began - sum(timings.values())

    pair, models = load_models(config, reporter)
    transform, draft_transform = resolve_sampling(config, models.target)
    scored, prompt_report, spare = read_prompts(config, models)
    lap("load")
    with files.whole_directory(out, overwrite) as folder:
        scales = calibrate(config, models, formats, scored, spare, reporter)
        setting = Setting(
            transform, draft_transform, rule, models.vocabulary, config.seed, scales, round_query_policy(config)
        )
        lap("calibrate")
        if config.text == "given":
            texts = given_texts(scored, models.target.eos_ids)
        else:
            texts = sample(config, models, scored, BF16, setting, reporter)
        texts = chainable(texts)
        lap("sample")
        arms = [Arm.of(BF16, BF16), Arm.of(BF16, BF16, ALTERNATIVE, NULL)]
        if config.text != "own":
            arms += [arm for f in formats for arm in arms_of(f)]
        arms = list({a.name: a for a in arms}.values())
        replay = score(
            models, texts, arms, setting, "the baseline's text" if config.text != "given" else "given text", reporter
        )
        own = _own_text(config, models, formats, scored, setting, reporter) if config.text in ("own", "both") else {}
        lap("score")
        cost = build_cost(config, models, formats, reporter)
        lap("cost")

        columns = {name: s.columns for name, s in replay.arms.items()}
        main = analysis.analyse(texts, columns, BASE, rule, config.k_max, seed=config.seed, draws=DRAWS)
        own_analyses = {
            name: analysis.analyse(
                t, {a: s.columns for a, s in r.arms.items()}, f"{name}+bf16", rule, config.k_max,
                seed=config.seed, draws=DRAWS, sampled_own=(f"{name}+{name}",),
            )
            for name, (t, r) in own.items()
        }  # fmt: skip
        paired = {name: _paired_with_base(main, a) for name, a in own_analyses.items()}
        facts = _facts(config, pair, models, transform, formats, scales, replay, texts, main)
        alternative = None
        if config.draft_sampling == "greedy" and not transform.greedy and config.text != "own":
            alternative = analysis.analyse(texts, columns, BASE, Rule(), config.k_max, seed=config.seed, draws=DRAWS)
        study = Study(config, directories, main, columns, {}, {})
        for fmt in formats:
            own_text = config.text == "own"
            basis = paired[fmt.name] if own_text else main
            decision = recommendation.decide(config, basis, fmt, cost)
            shift_own = _own_shift(config, paired.get(fmt.name), fmt)
            kind = "own" if own_text else "given" if config.text == "given" else "same"
            study.decisions[fmt.name] = decision
            study.recommendations[fmt.name] = recommendation.recommend(
                facts, basis, shift_own, decision, cost, kind, alternative
            )
        lap("analyse")
        study.summary = summarise_study(
            study, pair, models, scored, prompt_report, texts, replay, own, own_analyses, paired, facts, cost
        )
        study.summary["timings_seconds"] = timings
        _write(folder, study, facts, texts, own, main, own_analyses)
        write_report(folder)
        lap("report")
        timings["total"] = time.perf_counter() - began
        files.write_json(folder / "study.json", study.summary)
    return study


def _own_text(
    config: StudyConfig,
    models: Models,
    formats: Sequence[KVFormat],
    scored: list[Prompt],
    setting: Setting,
    reporter: Reporter,
) -> dict[str, tuple[list[Text], ReplayResult]]:
    out = {}
    for fmt in formats:
        texts = chainable(sample(config, models, scored, fmt, setting, reporter))
        out[fmt.name] = (texts, score(models, texts, arms_of(fmt), setting, f"{fmt.name}'s own text", reporter))
    return out


def _paired_with_base(main: analysis.Analysis, own: analysis.Analysis) -> analysis.Analysis:
    """The baseline (and null) on its own text and a format's arms on theirs, paired by document."""
    common = set(d.prompt.document for d in main.texts) & set(d.prompt.document for d in own.texts)
    if len(common) != main.documents.count or own.documents.count != main.documents.count:
        raise SpecqError("a prompt ended at once under one KV format and not under another, so texts cannot be paired")
    arms = {name: main.arms[name] for name in (BASE, NULL)} | {n: a for n, a in own.arms.items() if n != BASE}
    return replace(main, arms=arms)


def _own_shift(config: StudyConfig, paired: analysis.Analysis | None, fmt: KVFormat) -> Shift | None:
    if paired is None:
        return None
    return recommendation.shift_block(paired, f"{fmt.name}+bf16", config.current_k, "own", NULL)


def _scale_source(fmt: KVFormat, scales: dict, models: Models) -> str:
    if not fmt.static_parts:
        return "none needed"
    if ("target", fmt.name) in scales:
        return "calibration"
    sources = {s.source for s in models.target.scales}
    return sources.pop() if len(sources) == 1 else "checkpoint in part"


def _facts(
    config: StudyConfig, pair: pairs.Pair, models: Models, transform: Transform, formats: Sequence[KVFormat],
    scales: dict, replay: ReplayResult, texts: list[Text], main: analysis.Analysis,
) -> StudyFacts:  # fmt: skip
    sources = {f.name: _scale_source(f, scales, models) for f in formats}
    warnings = []
    for name, source in sources.items():
        if source in ("one", "checkpoint in part"):
            warnings.append(
                f"{name}: K and V scales are 1.0 where the checkpoint gives none, as vLLM does; see --calibrate"
            )
    stored = sum(len(t.prompt.tokens) + t.positions for t in texts)
    for p, counts in replay.saturated.items():
        geometry = (models.target if p.role == "target" else models.draft).geometry
        share = sum(counts) / (2 * stored * geometry.layers * geometry.kv_heads * geometry.head_dim)
        if share > SATURATION_WARNING:
            warnings.append(f"{p.format.name}: {share:.2%} of the {p.role}'s K and V saturate at the largest code")
    if config.text == "given":
        mean, se, z = main.excess(BASE)
        if abs(z) > 3:
            warnings.append(
                f"the given responses do not look sampled from the target at these settings (sum of b - a per document"
                f" {mean:+.2f}, standard error {se:.2f}): mu describes this text, not the target's own"
            )
    if len(texts) < 10:
        warnings.append(f"{len(texts)} prompts are few: intervals from so small a sample are rough")
    return StudyFacts(
        config=config,
        pair=pair.name,
        target=_served_name(pair.target),
        draft=_served_name(pair.draft),
        transform=transform,
        target_vocab=models.vocabulary.target_logits,
        draft_vocab=models.vocabulary.draft_logits,
        scale_sources=sources,
        warnings=warnings,
    )


def _served_name(side: pairs.Side) -> str:
    return str(Path(side.source).resolve()) if side.local else side.source


def _write(
    folder: Path,
    study: Study,
    facts: StudyFacts,
    texts: list[Text],
    own: dict,
    main: analysis.Analysis,
    own_analyses: dict,
) -> None:
    everything = [(texts, study.columns, main, "given" if study.config.text == "given" else "same")]
    everything += [(t, {n: s.columns for n, s in r.arms.items()}, own_analyses[f], "own") for f, (t, r) in own.items()]
    files.write_texts(folder / "texts.parquet", [t for group, *_ in everything for t in group])
    files.write_positions(folder / "positions.parquet", everything)
    for name, rec in study.recommendations.items():
        sub = folder / study.directories[name]
        (sub / "plots").mkdir(parents=True)
        files.write_json(sub / "recommendation.json", rec.model_dump(mode="json"))
        shown = recommendation.profile(facts, own_analyses.get(name, main), get_format(name))
        files.write_json(sub / "speculation_profile.json", shown.model_dump(mode="json"))
    files.write_json(folder / "study.json", study.summary)
