"""Loading models and everything specq must know about them before the first forward pass.

`load` gives a `LoadedModel`: an ordinary transformers model whose attention is specq's, its tokenizer, its KV geometry
and the static KV scales of its checkpoint. `check_pair` decides whether two models may speak for one another.
"""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specq import weights
from specq.errors import SpecqError
from specq.kv import KVFormat, attention
from specq.kv.cache import LayerScales, QuantizedCache, QuantizedLayer
from specq.kv.paged import Backend, PagedLayer, kernel_backend
from specq.shape import ModelShape, shape_of

# Names under which checkpoints keep a layer's KV scales: attention module, vLLM's inner `attn`, or the projection.
_SCALE_NAME = re.compile(r"\.layers\.(\d+)\.(?:self_attn|attention)\.(?:attn\.)?(?:[kvq]_proj\.)?([kvq])_scale$")


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

    Raises SpecqError for latent-attention (MLA) models, whose cache is not K and V per head.
    """
    text = config.get_text_config()
    for key in ("kv_lora_rank", "qk_rope_head_dim"):
        if getattr(text, key, None) is not None:
            raise SpecqError(f"models with latent KV attention ({key}, MLA) are not supported: their cache is no K/V")
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    positions = getattr(text, "max_position_embeddings", None) or 1 << 30
    return Geometry(text.num_hidden_layers, heads, kv_heads, head_dim, text.hidden_size, text.vocab_size, positions)


@dataclass
class LoadedModel:
    """A model ready to score.

    `width` is the number of logits per position; `scales` has one LayerScales per layer (1.0 where nothing was given);
    `sampling_defaults` are the temperature, top_k and top_p of its generation_config, where it has any. `tokenizer` is None
    where the weights are random; `weight_quantization` names how the checkpoint's weights are quantized, if they are.
    """

    name: str
    model: torch.nn.Module
    tokenizer: Any
    geometry: Geometry
    scales: list[LayerScales]
    eos_ids: frozenset[int]
    sampling_defaults: dict[str, float]
    compute_dtype: torch.dtype
    checkpoint_dtype: str
    parameters: int
    weight_quantization: str | None = None
    cache_keyword: str = field(default="cache")

    @property
    def shape(self) -> ModelShape:
        """What cost and capacity need of it."""
        return shape_of(self.model.config, ((name, p.numel()) for name, p in self.model.named_parameters()))

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return self.model.device

    @property
    def backend(self) -> Backend:
        """What its attention and stores run through."""
        shape = self.geometry
        return kernel_backend(self.device, shape.head_dim, shape.heads // shape.kv_heads)

    def new_cache(
        self,
        fmt: KVFormat,
        batch: int,
        capacity: int,
        scales: list[LayerScales] | None = None,
        round_query: bool = False,
        splits: int = 1,
    ) -> QuantizedCache:
        """An empty cache for `batch` rows of at most `capacity` tokens; `scales` replaces the checkpoint's."""
        layer = QuantizedLayer if self.backend.name == "torch" else PagedLayer
        return QuantizedCache(fmt, scales or self.scales, batch, capacity, round_query, splits, layer)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, cache: QuantizedCache, counts: torch.Tensor | int | None = None, keep: int = 0
    ) -> torch.Tensor:
        """Feed `tokens` [B, q] behind what `cache` holds and commit `counts` of them per row (all by default).

        Returns the logits [B, q or `keep` last, width] in the compute dtype. Raises ValueError when committed tokens would
        stand beyond the model's positions; padding there is given the last one, since learned positions have no more.
        """
        counts = tokens.shape[1] if counts is None else counts
        last = self.geometry.max_positions - 1
        if int((cache.lengths + counts).max()) > last + 1:
            raise ValueError(f"{self.name} has {last + 1} positions and was fed more tokens")
        positions = (cache.lengths[:, None] + torch.arange(tokens.shape[1])).clamp(max=last)
        out = self.model(
            input_ids=tokens.to(self.device),
            position_ids=positions.to(self.device),
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_keyword: cache},
        )
        cache.advance(counts)
        return out.logits

    def prefill(
        self,
        rows: Sequence[Sequence[int]],
        cache: QuantizedCache,
        chunk: int = 512,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        """Feed all but the last token of every row, which opens decoding, in chunks; `progress` takes tokens done."""
        width = max(map(len, rows)) - 1
        padded = torch.zeros(len(rows), width, dtype=torch.long)
        for i, ids in enumerate(rows):
            padded[i, : len(ids) - 1] = torch.tensor(ids[:-1])
        body = torch.tensor([len(ids) - 1 for ids in rows])
        for at in range(0, width, chunk):
            counts = (body - at).clamp(0, min(chunk, width - at))
            self.forward(padded[:, at : at + chunk], cache, counts, keep=1)
            progress(float(counts.sum()))


def _checkpoint_scales(path: Path, layers: int) -> list[LayerScales]:
    """Static K, V and query scales found in a local checkpoint's safetensors files; 1.0 elsewhere."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else []:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                if (hit := _SCALE_NAME.search(name)) and int(hit[1]) < layers:
                    found.setdefault(int(hit[1]), {})[hit[2]] = tensors.get_tensor(name).float().reshape(-1)
    scales = [LayerScales() for _ in range(layers)]
    for layer, parts in found.items():
        for part, value in parts.items():
            if not (torch.isfinite(value).all() and (value > 0).all()):
                raise SpecqError(f"{path}: {part}_scale of layer {layer} is {value.tolist()}, not a positive number")
            # one number per tensor, or one per KV head
            setattr(scales[layer], part, value.view(1, -1, 1, 1))
        scales[layer].source = "checkpoint" if {"k", "v"} <= parts.keys() else "one"
    return scales


def _read_tokenizer(source: str) -> Any:  # noqa: ANN401
    where, more = weights.gguf_arguments(source)
    try:
        return AutoTokenizer.from_pretrained(where, **more)
    except Exception as error:  # transformers raises many kinds here; the reason is in the text
        raise SpecqError(f"no usable tokenizer in {source}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _prepare() -> None:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    attention.register()


def load_random(name: str, config: Any, device: str = "cpu", seed: int = 0) -> LoadedModel:  # noqa: ANN401
    """A model of a transformers config with random weights and no tokenizer: for memory and step times, not for text."""
    _prepare()
    geometry = geometry_of(config)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    model = model.eval().requires_grad_(False)
    accepted = inspect.signature(model.forward).parameters
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=None,
        geometry=geometry,
        scales=[LayerScales() for _ in range(geometry.layers)],
        eos_ids=frozenset(),
        sampling_defaults={},
        compute_dtype=dtype,
        checkpoint_dtype="random",
        parameters=sum(p.numel() for p in model.parameters()),
        cache_keyword="cache" if "cache" in accepted else "past_key_values",
    )


def load(source: str, device: str = "cpu") -> LoadedModel:
    """Load a model directory, a .gguf file or an already downloaded hub id with specq's attention.

    On a CPU it computes in float32, on a GPU in the checkpoint's dtype. Raises SpecqError with the reason when the
    directory holds no loadable causal LM, or quantized weights that would not run as they are.
    """
    _prepare()
    where, more = weights.gguf_arguments(source)
    try:
        config = AutoConfig.from_pretrained(where, **more)
    except Exception as error:
        raise SpecqError(f"cannot read a model configuration from {source}: {_first_line(error)}") from error
    geometry = geometry_of(config)
    weights.refuse_dequantized(config, device, source)
    quantization = weights.quantization_of(config, source)
    stated = getattr(config, "dtype", None)
    dtype = torch.float32 if device == "cpu" else (stated or torch.bfloat16)
    try:
        with redirect_stderr(StringIO()) if more else nullcontext():  # its bar for GGUF files cannot be switched off
            model = AutoModelForCausalLM.from_pretrained(
                where,
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                **(more or {"use_safetensors": True}),
            )
    except Exception as error:
        raise SpecqError(f"cannot load the weights in {source}: {_first_line(error)}") from error
    weights.check_still_quantized(model, quantization, source)
    model = model.eval().requires_grad_(False).to(device)
    accepted = inspect.signature(model.forward).parameters
    generation = model.generation_config
    eos = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    raw = Path(source) / "generation_config.json"
    given = json.loads(raw.read_text(encoding="utf-8")) if raw.is_file() else generation.to_diff_dict()
    return LoadedModel(
        name=source,
        model=model,
        tokenizer=_read_tokenizer(source),
        geometry=geometry,
        scales=_checkpoint_scales(Path(source), geometry.layers),
        eos_ids=frozenset(eos),
        sampling_defaults={k: given[k] for k in ("temperature", "top_k", "top_p") if given.get(k) is not None},
        compute_dtype=dtype,
        checkpoint_dtype=str(stated).removeprefix("torch."),
        parameters=sum(p.numel() for p in model.parameters()),
        weight_quantization=quantization,
        cache_keyword="cache" if "cache" in accepted else "past_key_values",
    )


@dataclass(frozen=True)
class Vocabulary:
    """Sizes that must be told apart: ids the tokenizer knows, and the (padded) logits of each model.

    Both distributions live on ids below `size`, the tokenizer's length capped by the target's logits; ids the draft has
    no logit for get q = 0, ids beyond `size` are never emitted.
    """

    size: int
    tokenizer: int
    target_logits: int
    draft_logits: int


def check_pair(target: LoadedModel, draft: LoadedModel) -> Vocabulary:
    """Common vocabulary of two models.

    Raises SpecqError when their token maps differ, naming the first differing id and both strings, or when their
    special tokens do. Models without tokenizers (random weights) share the ids both have logits for.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        size = min(target.geometry.vocab, draft.geometry.vocab)
        return Vocabulary(size, size, target.geometry.vocab, draft.geometry.vocab)
    a, b = ({i: t for t, i in m.tokenizer.get_vocab().items()} for m in (target, draft))
    for i in sorted(a.keys() | b.keys()):
        if a.get(i) != b.get(i):
            raise SpecqError(
                f"target and draft have different tokenizers: id {i} is {a.get(i)!r} in the target and {b.get(i)!r} in"
                " the draft; speculative decoding compares probabilities id by id and needs one token map"
            )
    for name in ("bos_token_id", "eos_token_id"):
        x, y = getattr(target.tokenizer, name, None), getattr(draft.tokenizer, name, None)
        if x != y:
            raise SpecqError(f"target and draft disagree on {name}: {x} and {y}; they need one tokenizer")
    length = len(target.tokenizer)
    return Vocabulary(min(length, target.geometry.vocab), length, target.geometry.vocab, draft.geometry.vocab)
