"""bf16: K and V as the model makes them, rounded to bfloat16. The baseline."""

from specq.kv.base import BF16, KVFormat


class BF16Format(KVFormat):
    """16-bit brain float, no scale."""

    name, aliases, vllm = "bf16", ("bfloat16", "auto"), "bfloat16"
    summary = "as is, rounded to bfloat16"
    codec, k_granularity, v_granularity = BF16, "none", "none"
