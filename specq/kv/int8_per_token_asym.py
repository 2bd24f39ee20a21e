"""int8_per_token_asym: 8-bit codes between each row's minimum and maximum."""

from specq.kv.base import UINT8, KVFormat


class INT8PerTokenAsym(KVFormat):
    """Scale and zero point (kept as the row's minimum, float32) per token and KV head."""

    name = "int8_per_token_asym"
    summary = "8-bit codes from each row's minimum to its maximum, per token and head"
    codec, k_granularity, v_granularity = UINT8, "token_head_asym", "token_head_asym"
