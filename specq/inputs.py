"""From a configuration to what a study needs: models, sampling, prompts and static scales."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specq import pairs, prompts, weights
from specq.config import RolloutConfig, RunConfig
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.cache import LayerScales
from specq.kv.calibration import measure_range
from specq.models import LoadedModel, Vocabulary, check_pair, load, load_random
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
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise SpecqError("--device cuda: PyTorch sees no CUDA device here; use --device cpu")
    if config.random_weights:
        sides = {s: weights.config_of_side(s) for s in (pair.target, pair.draft) if s.is_model}
        reporter.note(f"building {pair.name} with random weights")
        built = {s.source: load_random(s.source, c, config.device, i) for i, (s, c) in enumerate(sides.items())}
        target, other = built[pair.target.source], built.get(pair.draft.source)
    else:
        where = pairs.locate(pair)
        reporter.note(f"loading {pair.name}: {Path(where[0]).name} and {Path(where[1]).name}")
        target = load(where[0], config.device)
        other = load(where[1], config.device) if pair.draft.is_model else None
    draft = NgramLookup(*config.ngram) if pair.draft.source == pairs.NGRAM else other or target
    models = Models(target, draft, check_pair(target, other or target))
    needed = config.prompt_tokens + config.output_tokens
    for role, model in models.by_role.items():
        if role == "draft" and isinstance(config, RolloutConfig):
            continue  # a rollout stops drafting where the draft's positions end, and counts that
        if needed > model.geometry.max_positions:
            raise SpecqError(
                f"the {role} has {model.geometry.max_positions} positions and the study needs {needed} (--prompt-tokens"
                f" {config.prompt_tokens} + --output-tokens {config.output_tokens})"
            )
    return pair, models


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
    config: RunConfig, models: Models, records: list[Record], report: PromptReport, given: bool = False
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to score, prompts left over from the default set for calibration); with `given`, those that have responses."""
    spare = 0 if config.prompts else CALIBRATION_PROMPTS
    if models.target.tokenizer is None:
        found = _random_prompts(config, models.vocabulary.size, config.num_prompts + spare)
        report.source, report.records = "random tokens", len(found)
        return found[: config.num_prompts], found[config.num_prompts :]
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
    )
    return found[: config.num_prompts], found[config.num_prompts :]


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
        for role, model in models.by_role.items():
            ranges = measure_range(model, [p.tokens for p in spare], progress=done)
            for fmt in wanted:
                scales[role, fmt.name] = ranges.scales(fmt)
    return scales


def given_texts(scored: list[Prompt], models: Models) -> list[Text]:
    """Texts from the responses that the prompt file gave."""
    return [Text(p, p.response, "given", p.response[-1] in models.target.eos_ids) for p in scored]
