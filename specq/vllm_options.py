"""What specq writes for vLLM, by version: the one table of differences (checked against the sources of 0.24 and 0.32)."""

import json
from itertools import accumulate
from typing import TYPE_CHECKING

from specq.errors import SpecqError
from specq.report.schema import VllmBlock

if TYPE_CHECKING:
    from specq.kv import KVFormat
    from specq.ngram import NgramLookup

# First version whose speculative_config knows the key; older ones refuse unknown keys.
DRAFT_KV_CACHE_DTYPE_SINCE = (0, 26)
OLDEST = (0, 24)
# On a CPU these expand the temperature into a copy (vllm/utils/cpu_triton_utils.py: _expand_kernel_impl) and verify with what
# was in memory: above temperature 0 almost nothing is accepted, and the text is not the target's. Seen with 0.32.0.
CPU_VERIFIES_WRONGLY = ((0, 32),)
# Formats by name that vLLM accepts and a server on CUDA does not start with: the last version known, and why. fp8_e5m2 was
# tried with 0.24.0 on an H200 (an AssertionError of vllm/model_executor/layers/attention/attention.py).
DOES_NOT_START = {
    "fp8_e5m2": (
        (0, 32),
        "TRITON_ATTN, the backend that lists the format, quantizes the query and Attention.forward then asserts e4m3 (seen with"
        " 0.24.0 on an H200; 0.32 by its sources): take fp8_e4m3",
    )
}
LATEST_LOOKED_UP_BY_V2 = (
    "specq's n-gram lookup is that of vLLM's V1 runner, which takes the earliest occurrence; the V2 runner, 0.32's default on a"
    " GPU, takes the latest: VLLM_USE_V2_MODEL_RUNNER=0 chooses the one that is predicted here"
)  # 0.24's V2 runner has no n-gram lookup
NO_SELF_SPECULATION = (
    "vLLM has no self-speculation: as its own draft model, which --draft with the target's name describes, a target is loaded"
    " twice"
)
PROBED = ((0, 24), (0, 32))  # versions whose rejection sampler `specq.engines.vllm.probe` knows


def parse_version(text: str, what: str = "--vllm-version") -> tuple[int, int]:
    """(major, minor) of a vLLM version. Raises SpecqError, naming `what` it is of, for what is no version or too old."""
    try:
        major, minor = (int(x) for x in text.split(".")[:2])
    except ValueError:
        raise SpecqError(f"{what} {text!r} is not a version like 0.32") from None
    if (major, minor) < OLDEST:
        raise SpecqError(f"{what} {text} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest one specq writes for")
    return major, minor


def why_not_started(fmt: "KVFormat", version: str) -> str | None:
    """Why a server of that vLLM does not start on CUDA with the format's cache; None where nothing of the kind is known."""
    known = DOES_NOT_START.get(fmt.name)
    if known is None or parse_version(version) > known[0]:
        return None
    return f"vLLM {version} does not start on CUDA with {fmt.vllm}: {known[1]}"


def why_not_probed(version: str) -> str | None:
    """Why the probe cannot record in that vLLM, to be said of it; None where it can."""
    if parse_version(version, "vLLM") in PROBED:
        return None
    known = " and ".join(".".join(map(str, v)) for v in PROBED)
    return f"knows the rejection sampler of vLLM {known}, not of {version}"


def draft_kv_is_free(version: str) -> bool:
    """Whether that vLLM lets the draft's KV format differ from the target's."""
    return parse_version(version) >= DRAFT_KV_CACHE_DTYPE_SINCE


def speculative_config(
    version: str, draft: str, draft_fmt: "KVFormat", k: int, draft_sampling: str, lookup: "NgramLookup | None" = None
) -> dict:
    """vLLM's speculative_config for k > 0 drafts of a model, or of n-gram `lookup`; no keys that the version does not know."""
    if lookup is not None:
        window = {"prompt_lookup_min": lookup.shortest, "prompt_lookup_max": lookup.longest}
        return {"method": "ngram", **window, "num_speculative_tokens": k}
    config = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": k,
        "draft_sample_method": draft_sampling,
    }
    if draft_kv_is_free(version) and draft_fmt.vllm:
        config["kv_cache_dtype"] = draft_fmt.vllm
    return config


def synthetic_rates(survival: list[float]) -> list[float]:
    """S_1..S_K as vLLM's `synthetic_acceptance_rates` takes them: marginal, in [0, 1] and never rising."""
    return list(accumulate((min(1.0, max(0.0, s)) for s in survival), min))


def vllm_block(
    *,
    version: str,
    target: str,
    draft: str,
    fmt: "KVFormat",
    draft_fmt: "KVFormat",
    schedule: list[list[int]],
    draft_sampling: str,
    survival: list[float],
    lookup: "NgramLookup | None" = None,
) -> VllmBlock:
    """Arguments for `vllm serve` and the speculative_config for one format; `fmt.vllm` must not be None, and whether a server
    starts with it is `why_not_started`'s to say.

    num_speculative_tokens is the schedule's largest K; vLLM allows K = 0 only inside a schedule, so an all-zero schedule
    means no speculative_config at all. `survival` gives S_1..S_K at that K. With `lookup` the method is n-gram lookup.
    """
    parse_version(version)
    args = [target, "--kv-cache-dtype", fmt.vllm]
    if fmt.vllm_backend:
        args += ["--attention-backend", fmt.vllm_backend]
    k = max(entry[2] for entry in schedule)
    config = None
    if k > 0:
        config = speculative_config(version, draft, draft_fmt, k, draft_sampling, lookup)
        if len(schedule) > 1:
            config["num_speculative_tokens_per_batch_size"] = schedule
        args += ["--speculative-config", json.dumps(config)]
    rates = synthetic_rates(survival[:k])
    return VllmBlock(version=version, serve_args=args, speculative_config=config, synthetic_acceptance_rates=rates)
