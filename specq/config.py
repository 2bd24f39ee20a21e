"""One place for every default and every check of what the user asked for. No torch here: `--help` must be quick."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specq.errors import SpecqError

DRAWS = 2000  # bootstrap draws behind every interval


class RunConfig(BaseModel):
    """What a study and a rollout have in common: the pair, the prompts, sampling and rules.

    `pair` is a registered one, of which `target` or `draft` replaces a side; both together are a pair of the user's own, and
    `pair` is None then. `draft` may also be `self` (the target drafts for itself) or `ngram` (prompt lookup of `ngram` =
    shortest, longest). `random_weights` builds the models from their configurations alone: memory and step times mean something
    then, text and acceptance nothing. `temperature`, `top_k`, `top_p` left at None take the target's generation_config, as vLLM
    does, and then 1, 0, 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pair: str | None = "tiny"
    target: str | None = None
    draft: str | None = None
    ngram: tuple[int, int] = (2, 5)
    random_weights: bool = False
    target_sha256: str | None = Field(None, description="fingerprint of local weights; null for a hub id")
    draft_sha256: str | None = None
    dtypes: tuple[str, ...] = ("fp8_e4m3",)
    prompts: str | None = None
    prompts_sha256: str | None = None
    undecodable: Literal["refuse", "skip"] = "refuse"
    chat: Literal["template", "raw"] = "template"
    num_prompts: int = Field(64, ge=1)
    prompt_tokens: int = Field(1024, ge=1)
    output_tokens: int = Field(256, ge=2)
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    verify: Literal["standard", "strict"] = "standard"
    draft_transform: Literal["same", "temperature"] = "same"
    query_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    calibrate: str | None = None
    calibrate_sha256: str | None = None
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    seed: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _own_pair(cls, values: Any) -> Any:  # noqa: ANN401 - not checked yet
        both = isinstance(values, Mapping) and values.get("target") and values.get("draft")
        return {**values, "pair": None} if both else values

    @field_validator("dtypes")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("needs at least one format")
        return tuple(dict.fromkeys(value))

    @field_validator("ngram")
    @classmethod
    def _lengths(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= value[0] <= value[1]:
            raise ValueError("needs the shortest and the longest n-gram, as in 2,5")
        return value

    @model_validator(mode="after")
    def _no_text_for_random_weights(self) -> "RunConfig":
        given = [f"--{n}" for n in ("prompts", "calibrate") if getattr(self, n) is not None]
        given += ["--text given"] if getattr(self, "text", None) == "given" else []
        if self.random_weights and given:
            raise ValueError(f"--random-weights draws random prompts and takes no {given[0]}")
        return self


class RolloutConfig(RunConfig):
    """A rollout: `k` drafts per cycle, the draft's KV format (or `same` as the target's), rows decoded together."""

    k: int = Field(4, ge=1, le=64)
    draft_dtype: str = "bf16"
    rows: int = Field(16, ge=1)
    replay: bool = True


class StudyConfig(RunConfig):
    """A study, fully resolved: two equal configurations give the same answer."""

    text: Literal["same", "own", "both", "given"] = "same"
    k_max: int = Field(16, ge=1, le=64)
    current_k: int = Field(5, ge=0)
    cost: str = "roofline:h100"
    cost_sha256: str | None = None
    batch: tuple[int, ...] = (1, 8, 32, 128)
    context: tuple[int, ...] = (2048, 8192, 32768)
    objective: Literal["latency", "throughput"] = "latency"
    max_ms_per_token: float | None = Field(None, gt=0, allow_inf_nan=False)
    vllm_version: str = "0.32"
    vllm_command: str | None = None

    @field_validator("batch", "context")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError("needs at least one positive number")
        return value

    @model_validator(mode="after")
    def _k_in_range(self) -> "StudyConfig":
        if self.current_k > self.k_max:
            raise ValueError(f"--current-k {self.current_k} is beyond --k-max {self.k_max}, the largest K measured")
        return self


def identity(config: RunConfig) -> dict[str, Any]:
    """What two studies (or rollouts) have in common when they are the same one: the configuration, content for paths."""
    values = config.model_dump(mode="json")
    return {k: v for k, v in values.items() if values.get(f"{k}_sha256") is None}


def same_study(config: RunConfig, stored: Any) -> bool:  # noqa: ANN401 - JSON from a file
    """Whether a configuration read from the files of a study or rollout describes the same one."""
    try:
        return identity(type(config).model_validate(stored)) == identity(config)
    except ValidationError:  # written by another version
        return False


def file_digest(path: str | None) -> str | None:
    """sha256 of a file the configuration depends on, or None where there is no path."""
    if not isinstance(path, str):
        return None
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise SpecqError(f"cannot read {path}: it is not a regular file")
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise SpecqError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def cost_digest(cost: str) -> str | None:
    """sha256 of the files that a `--cost` names, or None."""
    from specq.cost.spec import parse_cost

    return "+".join(map(file_digest, parse_cost(cost).files)) or None


Config = TypeVar("Config", bound=RunConfig)


def make_config(kind: type[Config] = StudyConfig, /, **options: Any) -> Config:  # noqa: ANN401 - raw command-line values
    """A configuration from command-line options; None means not given. Raises SpecqError with one clear sentence."""
    given = {k: v for k, v in options.items() if v is not None}
    given["prompts_sha256"] = file_digest(given.get("prompts"))
    given["calibrate_sha256"] = file_digest(given.get("calibrate"))
    if isinstance(given.get("cost"), str):
        given["cost_sha256"] = cost_digest(given["cost"])
    return validated(given, kind)


def validated(given: Mapping[str, Any], kind: type[Config] = StudyConfig) -> Config:
    """A configuration from all its values. Raises SpecqError with one clear sentence."""
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-") + ": " if first["loc"] else ""
        raise SpecqError(name + first["msg"].removeprefix("Value error, ")) from None
