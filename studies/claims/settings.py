"""Names that the claims about acceptance share: runs of config.toml, formats, arms."""

from collections.abc import Mapping

from studies.common.measured import Measured

Studies = Mapping[str, Measured]
FACTOR = 256  # of the stressed keys
PLAIN, STRESSED = "outliers-1", f"outliers-{FACTOR}"
NEAR, FAR = "context-256", "context-2048"
E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
INT8_TOKEN, INT8_TENSOR, INT8_CHANNEL, INT8_MIXED = (
    "int8_per_token_head", "int8_per_tensor", "int8_per_channel", "int8_k_channel_v_token",
)  # fmt: skip
BY_CHANNEL = (INT8_CHANNEL, INT8_MIXED)  # formats whose keys have a scale per channel


def alone(fmt: str) -> str:
    """The arm whose target's cache alone has the format."""
    return f"{fmt}+bf16"


def listed(names: list[str]) -> str:
    """Names for a sentence."""
    return ", ".join(names) if names else "none"
