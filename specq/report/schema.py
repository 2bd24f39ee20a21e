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


class KeptK(_Strict):
    """Share of the format's speed lost by keeping K = k, BF16's best, after the format change; choices included."""

    k: int
    loss: float
    ci95: Interval


class Speedup(_Strict):
    """Speedups over plain decoding at the same KV format; retuning_gain is recommended / current - 1."""

    baseline_at_current: float
    dtype_at_current: float
    dtype_at_recommended: float
    dtype_at_recommended_over_plain_bf16: float = Field(description="over plain decoding with a BF16 cache")
    retuning_gain: float
    ci95: Interval = Field(description="interval of retuning_gain; every bootstrap draw chooses its own K")
    kept_bf16_k: KeptK


class BreakEven(_Strict):
    """The format over BF16 at the same K, at the point decided for: it pays where emitted_ratio > cycle_time_ratio."""

    k: int
    emitted_ratio: float
    emitted_ratio_ci95: Interval
    cycle_time_ratio: float
    speed_ratio: float
    speed_ratio_ci95: Interval


class Capacity(_Strict):
    """Sequences of `context` tokens that fit; tokens per second at those batches (at most `batch` each) over BF16's."""

    server: str
    context: int
    sequences: int
    bf16_sequences: int
    batch: int
    bf16_batch: int
    tokens_per_second_over_bf16: float | None
    ci95: Interval


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
    current_command: str | None = Field(None, description="the command line of --vllm-command")
    changed_command: str | None = Field(None, description="the same with the format and K recommended here")


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
    break_even: BreakEven
    capacity: Capacity | None
    cost: Cost
    action: Literal["enable", "enable_and_retune", "measure_more", "do_not_enable", "keep", "retune"]
    more_prompts: int | None = Field(description="how many more prompts would decide, where action is measure_more")
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
