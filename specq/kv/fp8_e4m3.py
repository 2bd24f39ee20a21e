"""fp8_e4m3: one static scale per layer, 1.0 unless the checkpoint or a calibration gives one (as vLLM does)."""

from specq.kv.base import E4M3, KVFormat


class FP8E4M3(KVFormat):
    """8-bit float with 3 mantissa bits, largest value 448 times the scale."""

    name, aliases, vllm = "fp8_e4m3", ("fp8",), "fp8"
    summary = "e4m3, static scale per tensor (1.0 without a checkpoint's or a calibration's)"
    codec, k_granularity, v_granularity = E4M3, "tensor", "tensor"
    rounds_query = True
