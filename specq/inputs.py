"""From a configuration to what a study needs: models, sampling, prompts and static scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specq import pairs, prompts
from specq.config import StudyConfig
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.cache import LayerScales
from specq.kv.calibration import measure_range
from specq.models import LoadedModel, Vocabulary, check_pair, examine, load
from specq.progress import Reporter
from specq.prompts import Prompt, PromptReport, Record, Text
from specq.rules import Transform

CALIBRATION_PROMPTS = 16
Scales = dict[tuple[str, str], list[LayerScales]]


@dataclass
class Models:
    """Both models and what was found out about them."""

    target: LoadedModel
    draft: LoadedModel
    vocabulary: Vocabulary

    def of(self, role: str) -> LoadedModel:
        """The model in a role, "target" or "draft"."""
        return self.target if role == "target" else self.draft


def load_models(config: StudyConfig, reporter: Reporter) -> tuple[pairs.Pair, Models]:
    """Find and load the pair, and check that its models can speak for one another."""
    pair = pairs.find(config.pair, config.target, config.draft)
    where = pairs.locate(pair)
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpecqError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    reporter.note(f"loading {pair.name}: {Path(where[0]).name} and {Path(where[1]).name}")
    target, draft = (examine(path) for path in where)
    vocabulary = check_pair(target, draft)
    needed = config.prompt_tokens + config.output_tokens
    for role, model in (("target", target), ("draft", draft)):
        if needed > model.geometry.max_positions:
            raise SpecqError(
                f"the {role} has {model.geometry.max_positions} positions and the study needs {needed} (--prompt-tokens"
                f" {config.prompt_tokens} + --output-tokens {config.output_tokens})"
            )
    loaded = (load(path, config.device, found) for path, found in zip(where, (target, draft), strict=True))
    return pair, Models(*loaded, vocabulary)


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


def prompt_source(config: StudyConfig) -> str:
    """The prompt file of a study: the one given, or the embedded held-out documents."""
    return config.prompts or str(pairs.DEFAULT_PROMPTS)


def choose_prompts(
    config: StudyConfig, models: Models, records: list[Record], report: PromptReport, reporter: Reporter
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to score, prompts left over from the default set for calibration)."""
    with reporter.task("tokenising prompts", len(records)) as done:
        found = _encoded(config, models, records, report, done)
    if report.skipped:
        reporter.note(f"skipped {len(report.skipped)} records of {report.source}:\n{report.table()}")
    return found[: config.num_prompts], found[config.num_prompts :]


def _encoded(
    config: StudyConfig,
    models: Models,
    records: list[Record],
    report: PromptReport,
    progress: Callable[[float], None],
) -> list[Prompt]:
    spare = 0 if config.prompts else CALIBRATION_PROMPTS
    return prompts.encode_prompts(
        records,
        report,
        models.target.tokenizer,
        count=config.num_prompts + spare,
        prompt_tokens=config.prompt_tokens,
        vocabulary=models.vocabulary.size,
        seed=config.seed,
        given=config.text == "given",
        max_response=config.output_tokens,
        chat=config.chat,
        progress=progress,
    )


def calibrate(
    config: StudyConfig,
    models: Models,
    formats: Sequence[KVFormat],
    scored: list[Prompt],
    spare: list[Prompt],
    reporter: Reporter,
) -> Scales:
    """Static scales per (role, format name) from text that is not scored; empty where no format wants any."""
    wanted = [f for f in formats if f.static_parts and (config.calibrate or f.needs_calibration)]
    if not wanted:
        return {}
    if config.calibrate:
        records, report = prompts.read_records(config.calibrate, config.undecodable)
        found = prompts.encode_prompts(
            records,
            report,
            models.target.tokenizer,
            count=CALIBRATION_PROMPTS + len(scored),
            prompt_tokens=config.prompt_tokens,
            vocabulary=models.vocabulary.size,
            seed=config.seed,
            chat=config.chat,
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


def given_texts(scored: list[Prompt], models: Models) -> list[Text]:
    """Texts from the responses that the prompt file gave."""
    return [Text(p, p.response, "given", p.response[-1] in models.target.eos_ids) for p in scored]
