"""fp8_per_token_head: e4m3 with a float32 scale for every token and KV head."""

from specq.kv.base import E4M3, KVFormat


class FP8PerTokenHead(KVFormat):
    """The largest magnitude of each row maps to 448."""

    name, vllm, vllm_backend = "fp8_per_token_head", "fp8_per_token_head", "TRITON_ATTN"
    summary = "e4m3, scale per token and head"
    codec, k_granularity, v_granularity = E4M3, "token_head", "token_head"
