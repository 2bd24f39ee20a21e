"""Static KV scales that a checkpoint brings along, under the names that calibration tools give them."""

import re

import torch
from safetensors import safe_open

from specq.errors import SpecqError
from specq.kv.cache import LayerScales
from specq.models.checkpoint import Checkpoint
from specq.models.geometry import Geometry

# Names under which checkpoints keep KV scales: the attention module, vLLM's inner `attn`, or the projection.
_KV_SCALE = re.compile(
    r"\.(?:layers|h|blocks)\.(\d+)\.(?:self_attn|attention|attn|mixer)\.(?:attn\.)?"
    r"(?:qkv_proj\.)?(?:(?:[kvq]_proj\.)?([kvq]|kv)_scale|([kvq])_proj\.output_scale)$"
)
_LIKE_KV_SCALE = re.compile(r"(?:^|[._])(?:[kvq]|kv|k_cache|v_cache|kv_cache)_scale$|[kv]_proj\.output_scale$")


def understood_scales(checkpoint: Checkpoint) -> dict[str, tuple[int, str]]:
    """Name -> (layer, "k", "v", "q" or "kv") of every static KV scale that is understood."""
    hits = {n: _KV_SCALE.search(n) for n in checkpoint.tensors}
    return {n: (int(h[1]), h[2] or h[3]) for n, h in hits.items() if h and not _other_tower(n)}


def ignored_scales(checkpoint: Checkpoint) -> list[str]:
    """Names of tensors that look like KV scales and are not used."""
    used = understood_scales(checkpoint)
    return [n for n in checkpoint.tensors if _LIKE_KV_SCALE.search(n) and n not in used and not _other_tower(n)]


def _other_tower(name: str) -> bool:
    return "vision" in name or "audio" in name


def checkpoint_scales(checkpoint: Checkpoint, geometry: Geometry) -> list[LayerScales]:
    """Static K, V and query scales of a checkpoint; 1.0 elsewhere. Raises SpecqError for scales that are no scales."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, (layer, part) in understood_scales(checkpoint).items():
        if layer >= geometry.layers:
            continue
        with safe_open(checkpoint.tensors[name].file, framework="pt") as tensors:
            value = tensors.get_tensor(name).float().reshape(-1)
        if len(value) not in (1, geometry.heads if part == "q" else geometry.kv_heads):
            raise SpecqError(f"{checkpoint.directory}: {name} has {len(value)} values, neither one nor one per head")
        if not (torch.isfinite(value).all() and (value > 0).all()):
            raise SpecqError(
                f"{checkpoint.directory}: {part}_scale of layer {layer} ({name}) is {value.tolist()}, not a positive number"
            )
        for one in part if part == "kv" else (part,):
            found.setdefault(layer, {})[one] = value
    scales = [LayerScales() for _ in range(geometry.layers)]
    for layer, parts in found.items():
        for part, value in parts.items():
            setattr(scales[layer], part, value.view(1, -1, 1, 1))
        scales[layer].source = "checkpoint" if {"k", "v"} <= parts.keys() else "one"
    return scales
