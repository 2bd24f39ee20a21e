"""fp8_e5m2: more range and one mantissa bit less than e4m3."""

from specq.kv.base import E5M2, KVFormat


class FP8E5M2(KVFormat):
    """8-bit float with 2 mantissa bits, largest value 57344 times the scale.

    vLLM chooses its backend: on CUDA FlashInfer reads e5m2, while TRITON_ATTN lists it and then fails, since it quantizes the
    query and asserts e4m3 there (model_executor/layers/attention/attention.py, 0.24 and 0.32).
    """

    name, vllm = "fp8_e5m2", "fp8_e5m2"
    summary = "e5m2, static scale per tensor (1.0 without a checkpoint's or a calibration's)"
    codec, k_granularity, v_granularity = E5M2, "tensor", "tensor"
