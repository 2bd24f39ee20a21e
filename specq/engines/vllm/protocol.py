"""What passes between specq and the process of one cell: a request file and a result file, strict JSON.

A cell is one engine configuration. Its result holds the token ids that every engine step gave every request, so that
cycles are seen one by one: in steady decoding a step is one cycle, and its tokens are the accepted drafts and one more.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specq.errors import SpecqError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class CellRequest(_Strict):
    """One cell: keyword arguments of vllm.LLM and SamplingParams, token ids of the prompts, requests in flight.

    `documents` names each prompt's unit of resampling. `passes` times every prompt that often; `warmup` prompts run before.
    """

    name: str
    engine: dict[str, Any]
    environment: dict[str, str] = {}
    sampling: dict[str, Any]
    prompts: list[list[int]] = Field(min_length=1)
    documents: list[str]
    batch: int = Field(ge=1)
    passes: int = Field(ge=1)
    warmup: int = Field(ge=0)
    probe: str | None = None

    @property
    def k(self) -> int:
        """num_speculative_tokens; 0 without speculation."""
        config = self.engine.get("speculative_config")
        return config["num_speculative_tokens"] if config else 0

    @property
    def digest(self) -> str:
        """What a finished result must have been asked for to be kept; where models and the probe's files lie does not count,
        so that a sweep goes on in another place or on another machine of the same kind."""
        asked = self.model_dump(mode="json", exclude={"environment"}) | {"probe": self.probe is not None}
        engine = asked["engine"] = {**asked["engine"], "model": Path(self.engine["model"]).name}
        if (spec := engine.get("speculative_config")) and "model" in spec:  # n-gram lookup has none
            engine["speculative_config"] = {**spec, "model": Path(spec["model"]).name}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class RequestLog(_Strict):
    """What one request got: tokens per step (the first entry is prefill's), seconds of its first and last token."""

    prompt: int
    steps: list[list[int]]
    first: float
    last: float
    finish_reason: str | None

    @property
    def tokens(self) -> list[int]:
        """All token ids."""
        return [t for step in self.steps for t in step]


class Pass(_Strict):
    """All prompts once. `step_ends` [steps] seconds since the start; `rows`, `firsts` [steps]: requests that got tokens in
    that step, and those of them that got their first."""

    seconds: float = Field(gt=0)
    requests: list[RequestLog]
    step_ends: list[float]
    rows: list[int]
    firsts: list[int]


class Counts(_Strict):
    """Speculation counters over all passes, after minus before."""

    drafts: int
    drafted: int
    accepted: int
    per_position: list[int]


class CellResult(_Strict):
    """A finished cell."""

    digest: str
    versions: dict[str, str]
    device: str
    timing_mode: str
    passes: list[Pass] = Field(min_length=1)
    counters: Counts | None
    date: str | None = None  # when it ended, ISO 8601, UTC

    @property
    def requests(self) -> list[RequestLog]:
        """The requests of all passes."""
        return [r for p in self.passes for r in p.requests]


def read_result(text: str, request: CellRequest) -> CellResult:
    """The result of a cell. Raises SpecqError where it is damaged or contradicts its request."""
    try:
        result = CellResult.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecqError(f"result of cell {request.name} is damaged: {first['loc']}: {first['msg']}") from None
    for log in result.requests:
        if not 0 <= log.prompt < len(request.prompts) or not log.tokens or min(map(len, log.steps)) == 0:
            raise SpecqError(f"result of cell {request.name} is damaged: a request without prompt or tokens")
        longest = max(len(step) for step in log.steps[1:]) if len(log.steps) > 1 else 1
        if longest > request.k + 1 or len(log.steps[0]) != 1:
            raise SpecqError(
                f"cell {request.name}: a step gave {longest} tokens where a cycle of K = {request.k} gives at most"
                f" {request.k + 1}, so steps are no cycles in this engine and cannot be read as such"
            )
    return result
