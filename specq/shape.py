"""The shape of a model as cost and capacity need it: weights, attention layers and what one token leaves in the KV cache.

No torch here: a shape comes from a loaded model once and is kept in study.json, or from the registry, or from a model
directory's configuration alone (`shape_of_source`, which builds the model without weights to count them).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specq.errors import SpecqError, first_line
from specq.kv import KVFormat

if TYPE_CHECKING:
    from specq import pairs

Layers = tuple[tuple[int | None, int], ...]


@dataclass(frozen=True)
class ModelShape:
    """What a step reads and computes, and what a sequence stores.

    weights: all of them; table: those of an embedding table that is not the LM head as well, which no step reads whole.
    layers: (window, how many) pairs of layers that keep K and V; window None is full attention, else the tokens kept.
    latent: elements that an MLA layer keeps per token in place of K and V per head (kv_lora_rank + rope part), else 0.
    routed, experts, experts_per_token: weights in routed experts, and how many of the experts a token takes; 0 if dense.
    weight_bytes: bytes per weight as served.
    """

    weights: int
    layers: Layers
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    table: int = 0
    latent: int = 0
    routed: int = 0
    experts: int = 0
    experts_per_token: int = 0
    weight_bytes: float = 2.0
    max_positions: int | None = None

    @property
    def depth(self) -> int:
        """Layers with attention."""
        return sum(n for _, n in self.layers)

    @property
    def resident_bytes(self) -> float:
        """Bytes of all weights."""
        return self.weights * self.weight_bytes

    def read_weights(self, tokens: int) -> float:
        """Weights that one step over `tokens` tokens reads: expected, where experts are routed evenly."""
        dense = self.weights - self.table - self.routed
        if not self.experts:
            return dense + self.routed
        return dense + self.routed * (1 - (1 - self.experts_per_token / self.experts) ** tokens)

    @property
    def active_weights(self) -> float:
        """Weights that take part in one token's arithmetic."""
        share = self.experts_per_token / self.experts if self.experts else 1.0
        return self.weights - self.table - self.routed * (1 - share)

    def kept(self, tokens: int) -> int:
        """Tokens that the cache keeps, summed over layers, of a sequence of `tokens`: windows cap their layers."""
        return sum(n * (tokens if window is None else min(tokens, window)) for window, n in self.layers)

    def splits(self, gpus: int) -> bool:
        """Whether tensor parallelism over `gpus` is possible: query heads divide, KV heads divide or are replicated."""
        whole = self.heads % gpus == 0
        return whole and (self.latent > 0 or self.kv_heads % gpus == 0 or gpus % self.kv_heads == 0)

    def kv_bytes(self, fmt: KVFormat, tokens: int, gpus: int = 1) -> tuple[int, int]:
        """(bytes of codes, bytes of scales) of one sequence of `tokens` on each of `gpus` tensor-parallel GPUs.

        2 x layers x KV heads x head_dim x tokens x bytes; with more GPUs than KV heads every GPU keeps a whole head, and
        an MLA latent is kept whole on every GPU (as vLLM does). Raises SpecqError for a format that a latent cannot have.
        """
        if self.latent:
            if fmt.granularity("k") not in ("none", "tensor"):
                raise SpecqError(
                    f"{fmt.name} scales K and V per head or channel; a latent (MLA) cache has no such heads"
                )
            return self.kept(tokens) * self.latent * fmt.codec.itemsize, 0
        codes, scales = fmt.bytes_per_token(max(1, self.kv_heads // gpus), self.head_dim)
        return self.kept(tokens) * codes, self.kept(tokens) * scales

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of_registered(cls, shape: "pairs.Shape") -> "ModelShape":
        """From the registry's geometry: a dense model."""
        table = 0 if shape.tied else shape.vocab * shape.hidden
        sizes = (shape.heads, shape.kv_heads, shape.head_dim, shape.hidden, shape.vocab)
        return cls(shape.parameters, shape.layer_windows, *sizes, table, max_positions=shape.positions)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelShape":
        """From `as_dict`, also after JSON made lists of its tuples."""
        return cls(**dict(values) | {"layers": tuple((w, n) for w, n in values["layers"])})


def attention_layers(config: Any) -> Layers:  # noqa: ANN401 - transformers configs have no common static type
    """(window, count) of the layers that keep K and V, from a transformers (text) config.

    Layers that reuse an earlier layer's K and V (num_kv_shared_layers) keep none. Raises SpecqError for layers that keep
    a recurrent state instead.
    """
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    plain = "sliding_attention" if window else "full_attention"
    types = getattr(config, "layer_types", None) or [plain] * config.num_hidden_layers
    types = types[: len(types) - (getattr(config, "num_kv_shared_layers", None) or 0)]
    sizes = {"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}
    if unknown := sorted(set(types) - set(sizes)):
        raise SpecqError(
            f"layers of kind {', '.join(unknown)} keep no K and V per token; such models are not supported"
        )
    counts: dict[int | None, int] = {}
    for kind in types:
        counts[sizes[kind]] = counts.get(sizes[kind], 0) + 1
    return tuple(counts.items())


def bytes_per_weight(config: Any) -> float:  # noqa: ANN401
    """Bytes per weight as served: 2, or what the checkpoint's quantization_config says."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return 2.0
    quantized = quantized if isinstance(quantized, Mapping) else quantized.to_dict()
    method = str(quantized.get("quant_method", ""))
    groups = quantized.get("config_groups") or {}
    bits = [(g.get("weights") or {}).get("num_bits") for g in groups.values()] + [quantized.get("bits")]
    for n in bits:
        if n:
            return n / 8
    if "fp8" in method or quantized.get("load_in_8bit"):
        return 1.0
    return 0.5 if quantized.get("load_in_4bit") or "fp4" in method else 2.0


def shape_of(config: Any, parameters: Iterable[tuple[str, int]]) -> ModelShape:  # noqa: ANN401
    """Shape from a transformers config and the (name, size) of every parameter (tied ones once)."""
    if getattr(config, "is_encoder_decoder", False):
        raise SpecqError("encoder-decoder models are not supported: their cache holds cross-attention too")
    text = config.get_text_config()
    sizes = list(parameters)
    latent = getattr(text, "kv_lora_rank", None) or 0
    if latent:
        latent += getattr(text, "qk_rope_head_dim", None) or 0
    heads = text.num_attention_heads
    experts = next(
        (n for k in ("num_local_experts", "n_routed_experts", "num_experts") if (n := getattr(text, k, 0))), 0
    )
    return ModelShape(
        weights=sum(n for _, n in sizes),
        layers=attention_layers(text),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        table=0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size,
        latent=latent,
        routed=sum(n for name, n in sizes if ".experts." in name) if experts else 0,
        experts=experts,
        experts_per_token=(getattr(text, "num_experts_per_tok", None) or experts) if experts else 0,
        weight_bytes=bytes_per_weight(config),
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def shape_of_source(source: str) -> ModelShape:
    """Shape of a model directory or a cached hub id, from its configuration: no weights are read.

    Raises SpecqError where the configuration cannot be read or the model not be built from it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from specq.models.config import read_config
    from specq.models.directory import read_json_object

    local = Path(source).is_dir()
    config = read_config(source, read_json_object(Path(source) / "config.json") if local else {}, local=local)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds here; the reason is in the text
        raise SpecqError(f"cannot read the shape of {source}: {first_line(error)}") from error
    return shape_of(config, ((name, p.numel()) for name, p in model.named_parameters()))


def with_weight_bytes(shape: ModelShape, weight_bytes: float | None) -> ModelShape:
    """The same shape with another number of bytes per weight, where one is given."""
    return shape if weight_bytes is None else replace(shape, weight_bytes=weight_bytes)
