"""int8_per_tensor: symmetric INT8 with one calibrated scale per layer."""

from specq.kv.base import INT8, KVFormat


class INT8PerTensor(KVFormat):
    """The simplest and, with outlier channels, the worst; needs a calibration."""

    name = "int8_per_tensor"
    summary = "symmetric INT8, one calibrated scale per layer for K and for V"
    codec, k_granularity, v_granularity = INT8, "tensor", "tensor"
