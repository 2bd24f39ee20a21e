"""What specq writes for vLLM, by version: the one table of differences (checked against the sources of 0.24 and 0.32)."""

import json
from typing import TYPE_CHECKING

from specq.errors import SpecqError
from specq.report.schema import VllmBlock

if TYPE_CHECKING:
    from specq.kv import KVFormat
    from specq.ngram import NgramLookup

# First version whose speculative_config knows the key; older ones refuse unknown keys.
DRAFT_KV_CACHE_DTYPE_SINCE = (0, 26)
OLDEST = (0, 24)


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a vLLM version. Raises SpecqError for what is no version or too old."""
    try:
        major, minor = (int(x) for x in text.split(".")[:2])
    except ValueError:
        raise SpecqError(f"--vllm-version {text!r} is not a version like 0.32") from None
    if (major, minor) < OLDEST:
        raise SpecqError(
            f"--vllm-version {text} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest one specq writes for"
        )
    return major, minor


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
    """Arguments for `vllm serve` and the speculative_config for one format; `fmt.vllm` must not be None.

    num_speculative_tokens is the schedule's largest K; vLLM allows K = 0 only inside a schedule, so an all-zero schedule
    means no speculative_config at all. `survival` gives S_1..S_K at that K. With `lookup` the method is n-gram lookup.
    """
    parsed = parse_version(version)
    args = [target, "--kv-cache-dtype", fmt.vllm]
    if fmt.vllm_backend:
        args += ["--attention-backend", fmt.vllm_backend]
    k = max(entry[2] for entry in schedule)
    config = None
    if k > 0:
        if lookup is None:
            config = {"method": "draft_model", "model": draft}
        else:
            config = {
                "method": "ngram",
                "prompt_lookup_min": lookup.shortest,
                "prompt_lookup_max": lookup.longest,
            }
        config["num_speculative_tokens"] = k
        if lookup is None:
            config["draft_sample_method"] = draft_sampling
        if len(schedule) > 1:
            config["num_speculative_tokens_per_batch_size"] = schedule
        if lookup is None and parsed >= DRAFT_KV_CACHE_DTYPE_SINCE and draft_fmt.vllm:
            config["kv_cache_dtype"] = draft_fmt.vllm
        args += ["--speculative-config", json.dumps(config)]
    rates = [min(1.0, max(0.0, s)) for s in survival[:k]]
    return VllmBlock(version=version, serve_args=args, speculative_config=config, synthetic_acceptance_rates=rates)
