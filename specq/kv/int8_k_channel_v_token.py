"""int8_k_channel_v_token: K per channel (its outliers sit in fixed channels), V per token."""

from specq.kv.base import INT8, KVFormat


class INT8KChannelVToken(KVFormat):
    """K with a calibrated scale per head and channel, V with a scale per token and head."""

    name = "int8_k_channel_v_token"
    summary = "symmetric INT8, K per channel (calibrated), V per token and head"
    codec, k_granularity, v_granularity = INT8, "channel", "token_head"
