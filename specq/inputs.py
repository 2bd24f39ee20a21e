"""From a configuration to what a study needs: models, sampling, prompts and static scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specq import pairs, parallel, placement, prompts
from specq.config import RolloutConfig, RunConfig
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.cache import LayerScales
from specq.kv.calibration import measure_range
from specq.models.config import config_of_side
from specq.models.examine import Examined, examine
from specq.models.geometry import geometry_of
from specq.models.loaded import LoadedModel
from specq.models.loading import load, load_random, weight_bytes
from specq.models.vocabulary import Vocabulary, check_pair
from specq.ngram import NgramLookup
from specq.progress import Reporter
from specq.prompts import Prompt, PromptReport, Record, Text
from specq.rules import Transform
from specq.sampling import stream

CALIBRATION_PROMPTS = 16
Scales = dict[tuple[str, str], list[LayerScales]]


@dataclass
class Models:
    """Both models and what was found out about them; a draft may be the target itself, or no model but a lookup."""

    target: LoadedModel
    draft: LoadedModel | NgramLookup
    vocabulary: Vocabulary

    @property
    def has_draft_model(self) -> bool:
        """Whether the draft runs a model."""
        return not isinstance(self.draft, NgramLookup)

    @property
    def by_role(self) -> dict[str, LoadedModel]:
        """The models by role, "target" and, where the draft is a model, "draft"."""
        return {"target": self.target} | ({"draft": self.draft} if self.has_draft_model else {})


def load_models(config: RunConfig, reporter: Reporter) -> tuple[pairs.Pair, Models]:
    """Find and load the pair, and check that its models can speak for one another."""
    pair = pairs.find(config.pair, config.target, config.draft)
    placement.require(config.device)
    sides = {"target": pair.target} | ({"draft": pair.draft} if pair.draft.is_model else {})
    if config.random_weights:
        where = {role: side.source for role, side in sides.items()}
        configs = {role: config_of_side(side) for role, side in sides.items()}
        found = {role: Examined(c, geometry_of(c)) for role, c in configs.items()}
        reporter.note(f"building {pair.name} with random weights")
    else:
        where = dict(zip(("target", "draft"), pairs.locate(pair), strict=True))
        reporter.note(f"loading {pair.name}: {Path(where['target']).name} and {Path(where['draft']).name}")
        found = {role: examine(where[role]) for role in sides}
    vocabulary = check_pair(found["target"], found.get("draft", found["target"]))
    needed = config.prompt_tokens + config.output_tokens
    for role, model in found.items():
        if role == "draft" and isinstance(config, RolloutConfig):
            continue  # a rollout stops drafting where the draft's positions end, and counts that
        if needed > model.geometry.max_positions:
            raise SpecqError(
                f"the {role} has {model.geometry.max_positions} positions and the study needs {needed} (--prompt-tokens"
                f" {config.prompt_tokens} + --output-tokens {config.output_tokens})"
            )
    if config.device == "cuda" and not parallel.share():  # a draft that is the target is loaded once
        placement.require_room({where[role]: weight_bytes(model, config.device) for role, model in found.items()})

    def made(role: str) -> LoadedModel:
        draft, share = role == "draft", parallel.share()
        if config.random_weights:
            make, arguments = load_random, (where[role], found[role].config, config.device, int(draft))
        else:
            make, arguments = load, (where[role], config.device)
        if share and not draft:
            return share.load(make, arguments)
        return make(*arguments, draft=draft, **({} if config.random_weights else {"examined": found[role]}))

    target = made("target")
    if pair.draft.source == pairs.NGRAM:
        draft = NgramLookup(*config.ngram)
    else:
        draft = made("draft") if pair.draft.is_model and where["draft"] != where["target"] else target
    return pair, Models(target, draft, vocabulary)


def resolve_sampling(config: RunConfig, target: LoadedModel) -> tuple[Transform, Transform]:
    """(target's, draft's) sampling transform: the command line, then generation_config, then 1, off, off."""
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | target.sampling_defaults
    given = {k: getattr(config, k) for k in default if getattr(config, k) is not None}
    chosen = default | given
    transform = Transform(float(chosen["temperature"]), int(chosen["top_k"]), float(chosen["top_p"]))
    return transform, transform.without_truncation() if config.draft_transform == "temperature" else transform


def round_query_policy(config: RunConfig) -> Callable[[KVFormat], bool]:
    """Which formats round the query to e4m3: `auto` as vLLM does, `fp8` every FP8 format, `bf16` none."""
    if config.query_dtype == "fp8":
        return lambda fmt: fmt.name.startswith("fp8")
    return lambda fmt: config.query_dtype == "auto" and fmt.rounds_query


def prompt_source(config: RunConfig) -> str:
    """The prompt file of a study: the one given, or the embedded held-out documents."""
    return config.prompts or str(pairs.DEFAULT_PROMPTS)


def choose_prompts(
    config: RunConfig,
    models: Models,
    records: list[Record],
    report: PromptReport,
    reporter: Reporter,
    given: bool = False,
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to score, prompts left over from the default set for calibration); with `given`, those that have responses."""
    spare = 0 if config.prompts else CALIBRATION_PROMPTS
    if models.target.tokenizer is None:
        found = _random_prompts(config, models.vocabulary.size, config.num_prompts + spare)
        report.source, report.records = "random tokens", len(found)
        return found[: config.num_prompts], found[config.num_prompts :]
    with reporter.task("tokenising prompts", len(records)) as done:
        found = prompts.encode_prompts(
            records,
            report,
            models.target.tokenizer,
            count=config.num_prompts + spare,
            prompt_tokens=config.prompt_tokens,
            vocabulary=models.vocabulary.size,
            seed=config.seed,
            given=given,
            max_response=config.output_tokens,
            chat=config.chat,
            progress=done,
        )
    if report.skipped:
        reporter.note(f"skipped {len(report.skipped)} records of {report.source}:\n{report.table()}")
    return found[: config.num_prompts], found[config.num_prompts :]


def prompt_warnings(config: RunConfig, prompts: Sequence[Prompt], report: PromptReport) -> list[str]:
    """What a reader should know about the prompt file: records skipped, and a shortfall."""
    out = []
    if report.skipped:
        line, why = min(report.skipped)
        out.append(
            f"{len(report.skipped)} records of the prompt file were skipped (first: line {line}, {why}); the JSON lists them"
        )
    if len(report.shapes) > 1:
        shapes = ", ".join(f"{n} with {key}" for key, n in report.shapes.most_common())
        out.append(f"the prompt file mixes shapes of records: {shapes}")
    if len(prompts) < config.num_prompts:
        short = f", {report.too_short} were shorter than {config.prompt_tokens} tokens" if report.too_short else ""
        out.append(f"{len(prompts)} usable prompts where {config.num_prompts} were asked for{short}")
    return out


def _random_prompts(config: RunConfig, vocabulary: int, count: int) -> list[Prompt]:
    """Prompts of uniformly random tokens, for models without a tokenizer."""
    names = [f"random{i}" for i in range(count)]
    size = (config.prompt_tokens,)
    drawn = (torch.randint(vocabulary, size, generator=stream(config.seed, "prompt", n)).tolist() for n in names)
    return [Prompt(n, n, None, tuple(ids)) for n, ids in zip(names, drawn, strict=True)]


def calibrate(
    config: RunConfig,
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
        for role, model in models.by_role.items():
            ranges = measure_range(model, [p.tokens for p in spare], progress=done)
            for fmt in wanted:
                scales[role, fmt.name] = ranges.scales(fmt)
    return scales


def given_texts(scored: list[Prompt], models: Models) -> list[Text]:
    """Texts from the responses that the prompt file gave."""
    return [Text(p, p.response, "given", p.response[-1] in models.target.eos_ids) for p in scored]
