"""int8_per_token_head: symmetric INT8 with a float32 scale for every token and KV head."""

from specq.kv.base import INT8, KVFormat


class INT8PerTokenHead(KVFormat):
    """The largest magnitude of each row maps to 127."""

    name, aliases, vllm, vllm_backend = "int8_per_token_head", ("int8",), "int8_per_token_head", "TRITON_ATTN"
    summary = "symmetric INT8, scale per token and head"
    codec, k_granularity, v_granularity = INT8, "token_head", "token_head"
