"""What a checkpoint says of quantization: of its weights, and of the KV cache it is to be served with.

The weights are the same in every arm of a study, whatever their format; only the KV cache differs between arms. Quantized
weights run as they are or are refused: run dequantized in silence, a study would describe another model than the one served.
GGUF files are the exception, since transformers can only read them into floats; study.json says so.
"""

import re
from typing import Any

from specq.errors import SpecqError
from specq.models.checkpoint import Checkpoint
from specq.models.weight_files import PLAIN

# Tensors that only quantized weights have.
_QUANTIZED = re.compile(r"\.(?:weight_scale|weight_scale_inv|qweight|weight_packed|qzeros|g_idx|weight_zero_point)$")
# KV formats by a checkpoint's kv_cache_scheme (compressed-tensors): (type, bits)
_KV_SCHEMES = {("float", 8): "fp8_e4m3"}
# what a quantization_config says of the cache, and what of the weights
_KV_KEYS = {"kv_cache_scheme", "kv_cache_quant_algo"}
_WEIGHT_KEYS = {
    "config_groups",
    "quant_algo",
    "bits",
    "load_in_8bit",
    "load_in_4bit",
    "weight_block_size",
    "dequantize",
}


def quantization_config(config: dict[str, Any]) -> dict[str, Any]:
    """quantization_config of a config.json, its text_config's, or {}."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("quantization_config"), dict):
            return part["quantization_config"]
    return {}


def weight_quantization(checkpoint: Checkpoint) -> str | None:
    """How the weights are quantized, None where they are plain. Raises SpecqError where nothing says how."""
    if checkpoint.is_gguf:  # transformers can only read it into floats; whoever reads the results is told
        return f"GGUF ({checkpoint.files[0].stem}), dequantized into the compute dtype"
    quantized = quantization_config(checkpoint.config)
    method = quantized.get("quant_method")
    odd = next(
        (n for n, t in checkpoint.tensors.items() if t.dtype not in PLAIN and n.endswith(("weight", "_packed", "_blocks"))),
        None,
    ) or next((n for n in checkpoint.tensors if _QUANTIZED.search(n)), None)  # fmt: skip
    if odd is None:
        # plain numbers, which a quantizer may still be asked for; not where only the cache is concerned
        about_weights = _WEIGHT_KEYS & {k for k, v in quantized.items() if v}
        about_cache = _KV_KEYS & quantized.keys() and not about_weights
        return None if about_cache or not isinstance(method, str) else method
    if not isinstance(method, str):
        raise SpecqError(
            f"the weights in {checkpoint.directory} are quantized ({odd} is stored as {checkpoint.tensors[odd].dtype}), but"
            " config.json has no quantization_config that says how; they would be read as if they were plain numbers"
        )
    return method


def runnable(checkpoint: Checkpoint, config: Any, device: str) -> str | None:
    """The weights' quantization, if transformers can run it on `device` as it is. Raises SpecqError otherwise.

    A quantization_config that concerns the KV cache alone is taken off `config`, transformers' own: the weights are plain
    then. What a GGUF file holds becomes plain floats when it is read.
    """
    method = weight_quantization(checkpoint)
    if method is None:
        for part in (config, config.get_text_config()):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        return None
    if checkpoint.is_gguf:
        return None
    _refuse_dequantized(checkpoint, method, device)
    return method


def _refuse_dequantized(checkpoint: Checkpoint, method: str, device: str) -> None:
    """Raises SpecqError where transformers cannot run weights quantized by `method`, or would turn them into floats."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise SpecqError(
            f"the weights in {checkpoint.directory} are quantized by {method!r}, which transformers cannot run; specq does not"
            " dequantize them, for that would be another model"
        )
    if quantization_config(checkpoint.config).get("dequantize"):
        raise dequantized(checkpoint, method, "its quantization_config says dequantize")
    if method in ("fp8", "fbgemm_fp8") and not _fp8_units(device):
        raise dequantized(
            checkpoint,
            method,
            "FP8 weights need a GPU of compute capability 8.9 or more; elsewhere transformers dequantizes them",
        )


def dequantized(checkpoint: Checkpoint, method: str, reason: str) -> SpecqError:
    """What to say of quantized weights that would not run as they are."""
    return SpecqError(
        f"{checkpoint.directory} has {method} weights, which could only be run dequantized here: {reason}. A study of"
        " dequantized weights describes another model; use --device cuda on such a GPU, or the unquantized checkpoint"
    )


def _fp8_units(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def _asked_of_cache(config: dict[str, Any]) -> tuple[Any, str | None]:
    """(what config.json asks of the KV cache, None for nothing; the KV format that is, None for none of ours)."""
    scheme, algorithm = (quantization_config(config).get(k) for k in ("kv_cache_scheme", "kv_cache_quant_algo"))
    if isinstance(scheme, dict) and scheme:
        kind = (scheme.get("type"), scheme.get("num_bits"))
        return scheme, None if scheme.get("dynamic") else _KV_SCHEMES.get(kind)
    if isinstance(algorithm, str) and algorithm:
        return algorithm, "fp8_e4m3" if algorithm.upper() == "FP8" else None
    return None, None


def kv_cache_format(checkpoint: Checkpoint) -> str | None:
    """The KV format that config.json asks for, None where it asks for none or one that is none of ours."""
    return _asked_of_cache(checkpoint.config)[1]


def auto_kv_format(config: dict[str, Any]) -> str:
    """The KV format that `auto` means for a checkpoint's config.json: what it asks for, or bf16.

    Serving engines resolve `auto` so. Raises SpecqError for a scheme that no format here models.
    """
    asked, fmt = _asked_of_cache(config)
    if asked is not None and fmt is None:
        raise SpecqError(f"the checkpoint's kv_cache_scheme {asked} is none of specq's formats; name one with --dtype")
    return fmt or "bf16"
