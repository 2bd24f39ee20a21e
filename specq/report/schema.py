"""The files that other programs read, as pydantic models: `specq schema NAME` prints their JSON schemas."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
ByK = dict[str, float]
Interval = tuple[float | None, float | None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Sampling(_Strict):
    """Sampling that p and q went through, and how drafts were proposed and verified."""

    temperature: float
    top_k: int
    top_p: float
    draft_sampling: Literal["probabilistic", "greedy"]
    verify: Literal["standard", "strict"]
    draft_transform: Literal["same", "temperature"]


class Shift(_Strict):
    """mu(format) - mu(baseline) in accepted tokens per cycle at K = k, paired over documents; null_* is the noise floor."""

    k: int
    text: Literal["same", "own", "given"]
    value: float | None
    ci95: Interval
    se: float | None
    null_value: float | None
    null_ci95: Interval
    significant: bool


class Speedup(_Strict):
    """Speedups over plain decoding at the same KV format; retuning_gain is recommended / current - 1."""

    baseline_at_current: float
    dtype_at_current: float
    dtype_at_recommended: float
    retuning_gain: float
    ci95: Interval = Field(description="interval of retuning_gain; every bootstrap draw chooses its own K")


class Cost(_Strict):
    """Where step times come from."""

    source: str
    details: dict


class Verdict(_Strict):
    """One finding with its evidence."""

    code: str
    decision: str
    evidence: str


class VllmBlock(_Strict):
    """What to pass to `vllm serve`; speculative_config is null where plain decoding is recommended."""

    version: str
    serve_args: list[str]
    speculative_config: dict | None
    synthetic_acceptance_rates: list[float] = Field(description="marginal S_1..S_K at the configured K")


class Recommendation(_Strict):
    """recommendation.json: the answer of a study for one KV format."""

    schema_version: int = SCHEMA_VERSION
    pair: str
    target: str
    draft: str
    target_kv_dtype: str
    draft_kv_dtype: str
    vllm_kv_cache_dtype: str | None
    sampling: Sampling
    prompts: int
    tokens: int
    baseline_mu_accepted: ByK
    mu_accepted: ByK
    mu_shift: Shift
    mu_shift_own: Shift | None
    mu_shift_inherited_draft: Shift
    current_num_speculative_tokens: int
    recommended_num_speculative_tokens: int
    recommended_schedule: list[tuple[int, int, int]]
    speedup: Speedup
    cost: Cost
    decision: str
    verdicts: list[Verdict]
    warnings: list[str]
    vllm: VllmBlock | None


class SpeculationProfile(_Strict):
    """speculation_profile.json: acceptance by draft position for one format at one K.

    Rates are per draft position 1..K: conditional S_k / S_(k-1), marginal S_k. Lengths are emitted tokens per cycle
    (accepted + 1); the histogram gives the share of cycles by emitted length.
    """

    conditional_accept_rates: list[float | None]
    marginal_accept_rates: list[float]
    mean_accept_length: float
    mean_accept_length_per_request: dict[str, float | None]
    acceptance_length_histogram: dict[str, float]
    measurement_conditions: dict


SCHEMAS: dict[str, type[BaseModel]] = {"recommendation": Recommendation, "speculation_profile": SpeculationProfile}
