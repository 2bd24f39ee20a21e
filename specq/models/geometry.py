"""The geometry of a model's KV cache: layers, heads, head_dim and positions, from its configuration alone.

Models that keep anything else than K and V per head in every layer are refused here, before a weight is read.
"""

from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from specq.errors import SpecqError, first_line
from specq.kv import KVFormat


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's KV cache: layers, query and KV heads, head_dim (elements)."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    max_positions: int

    def kv_bytes_per_token(self, fmt: KVFormat) -> tuple[int, int]:
        """(code bytes, scale bytes) per token over all layers."""
        codes, scales = fmt.bytes_per_token(self.kv_heads, self.head_dim)
        return codes * self.layers, scales * self.layers


def geometry_of(config: Any) -> Geometry:  # noqa: ANN401 - transformers configs have no common static type
    """Geometry from a transformers config (nested text configs included).

    `max_positions` are those whose rotary frequencies do not depend on how long a text has become (`_steady_positions`).
    Raises SpecqError for latent-attention (MLA) models, whose cache is not K and V per head, for models with layers that
    have no KV cache of their own, of unequal layers, or with attention out of reach, and for sizes that make no sense.
    """
    text = config.get_text_config()
    latent = [k for k in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim") if getattr(text, k, None) is not None]
    if latent:
        raise SpecqError(
            f"models with latent KV attention (MLA; config.json has {', '.join(latent)}) are not supported: what they cache is"
            " one compressed vector per token, not K and V per head"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise SpecqError("encoder-decoder models are not supported; a decoder-only causal LM is needed")
    kinds = {str(k) for k in getattr(text, "layer_types", None) or ()}
    if strange := sorted(k for k in kinds if "attention" not in k or "linear" in k):
        raise SpecqError(f"models with layers of type {', '.join(strange)} are not supported: those keep no K and V")
    if shared := getattr(text, "num_kv_shared_layers", None):
        raise SpecqError(
            f"models whose layers share K and V are not supported ({shared} layers here keep none of their own)"
        )
    try:
        heads, kv_heads, head_dim = (
            getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
    except Exception as error:  # transformers' own kind, of configs that hold a size per layer
        raise SpecqError(f"models with layers of unequal sizes are not supported: {first_line(error)}") from error
    sizes = {
        "num_hidden_layers": getattr(text, "num_hidden_layers", None),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "hidden_size": getattr(text, "hidden_size", None),
        "vocab_size": getattr(text, "vocab_size", None),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 1 << 30,
    }
    bad = {k: v for k, v in sizes.items() if not isinstance(v, int) or isinstance(v, bool) or not 0 < v < 1 << 31}
    if bad:
        raise SpecqError(
            f"config.json describes no decoder with K and V: {', '.join(f'{k} is {v!r:.40}' for k, v in bad.items())}"
        )
    layers, heads, kv_heads, hidden, vocab, positions = sizes.values()
    if head_dim is None:
        if hidden % heads:
            raise SpecqError(f"hidden_size {hidden} is no multiple of {heads} heads and config.json gives no head_dim")
        head_dim = hidden // heads
    if heads % kv_heads or not isinstance(head_dim, int) or not 0 < head_dim < 1 << 16:
        raise SpecqError(f"{heads} query heads over {kv_heads} KV heads of {head_dim!r:.40} elements make no attention")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is not None and not getattr(kind, "_supports_attention_backend", False):
        raise SpecqError(
            f"{config.model_type} models do not go through transformers' attention interface, so that nothing can stand"
            " between them and their KV cache"
        )
    return Geometry(layers, heads, kv_heads, head_dim, hidden, vocab, min(positions, _steady_positions(text)))


def _steady_positions(text: Any) -> int:  # noqa: ANN401
    """Positions up to which a model's rotary frequencies are the same for a text of any length.

    LongRoPE (Phi-3) turns to other frequencies for texts beyond the original length, and leaves the K stored before as it
    is: what is cached would depend on the chunks a text came in, in rollouts on what was rolled back. A server fixes one
    set by its max_model_len; up to the original length that is the set of every text.
    """
    given = [r for name in ("rope_parameters", "rope_scaling") if isinstance(r := getattr(text, name, None), dict)]
    by_kind = [r for one in given for r in one.values() if isinstance(r, dict)]  # of layers
    for rope in given + by_kind:
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            return original if isinstance(original, int) and original > 0 else 1 << 30
    return 1 << 30
