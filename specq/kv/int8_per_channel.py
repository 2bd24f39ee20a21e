"""int8_per_channel: symmetric INT8 with a calibrated scale for every KV head and channel."""

from specq.kv.base import INT8, KVFormat


class INT8PerChannel(KVFormat):
    """Keeps an outlier channel from spoiling the others; needs a calibration."""

    name = "int8_per_channel"
    summary = "symmetric INT8, calibrated scale per head and channel"
    codec, k_granularity, v_granularity = INT8, "channel", "channel"
