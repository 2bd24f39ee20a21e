"""Loading models and everything specq must know about them before the first forward pass.

`examine` reads a model directory or GGUF file without its weights: files, geometry, tokenizer. `check_pair` decides
whether two models may speak for one another. `load` gives a `LoadedModel`: an ordinary transformers model whose attention
is specq's, with the static KV scales of its checkpoint; `load_random` needs a configuration alone. Nothing here goes to the
network, runs code of a checkpoint or reads a pickle.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from math import prod
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specq import placement, weights
from specq.checkpoint import GGUF, PLAIN, Checkpoint, open_checkpoint, read_json_object, staged
from specq.errors import SpecqError, first_line
from specq.kv import KVFormat, attention
from specq.kv.cache import LayerScales, QuantizedCache, QuantizedLayer
from specq.kv.paged import Backend, PagedLayer, kernel_backend
from specq.parallel import Share
from specq.shape import ModelShape, shape_of

SAMPLING = ("temperature", "top_k", "top_p")
# generation_config settings that vLLM applies by default and specq does not model, with their values that do nothing
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
UNMODELLED = {"repetition_penalty": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_GGUF_FILE = {"gguf_file": f"model{GGUF}"}  # as `staged` names it
PLAIN_DTYPES = tuple(PLAIN.values())
BACKENDS = ("torch", "triton", "cuda")  # from what runs everywhere to the fastest


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


@dataclass
class LoadedModel:
    """A model ready to score.

    `width` is the number of logits per position; `scales` has one LayerScales per layer (1.0 where nothing was given);
    `sampling_defaults` are the temperature, top_k and top_p of its generation_config, where it has any; `notes` are
    what a reader of the results should know about the checkpoint. Random weights have no tokenizer and no checkpoint.
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
    checkpoint: Checkpoint | None
    notes: list[str] = field(default_factory=list)
    cache_keyword: str = field(default="cache")
    share: Share | None = None  # where processes share the model: this one's part in that
    number: int = 0  # what it is called between them

    @property
    def shape(self) -> ModelShape:
        """What cost and capacity need of it."""
        return shape_of(self.model.config, ((name, p.numel()) for name, p in self.model.named_parameters()))

    @property
    def device(self) -> torch.device:
        """Where its inputs go, and where logits come back: its embedding's."""
        return self.model.get_input_embeddings().weight.device

    @property
    def devices(self) -> list[torch.device]:
        """All devices of this process that hold its weights; K and V of a layer lie where the layer does."""
        return list(dict.fromkeys(p.device for p in self.model.parameters()))

    @property
    def processes(self) -> int:
        """How many processes share it."""
        return self.share.size if self.share else 1

    @property
    def backend(self) -> Backend:
        """What its attention and stores run through: the kernels where all of its devices have them."""
        shape = self.geometry
        found = [kernel_backend(d, shape.head_dim, shape.heads // shape.kv_heads) for d in self.devices]
        return min(found, key=lambda backend: BACKENDS.index(backend.name))

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
        arguments = (fmt, scales or self.scales, batch, capacity, round_query, splits)
        return self.share.new_cache(self, arguments, layer) if self.share else QuantizedCache(*arguments, layer)

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
        padded = isinstance(counts, torch.Tensor) and bool((counts < tokens.shape[1]).any())
        cache.rows.expect(counts if padded else None)
        with self.share.one_pass(self, cache, tokens, counts, keep) if self.share else nullcontext():
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


def _checkpoint_scales(checkpoint: Checkpoint, geometry: Geometry) -> list[LayerScales]:
    """Static K, V and query scales of a checkpoint; 1.0 elsewhere. Raises SpecqError for scales that are no scales."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, (layer, part) in checkpoint.kv_scales.items():
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


class Described(Protocol):
    """What `check_pair` needs to know of a model, loaded or only examined; random weights have no tokenizer."""

    tokenizer: Any
    geometry: Geometry


@dataclass
class Examined:
    """A model without its weights: transformers config, geometry; checked files and tokenizer unless it will be random."""

    config: Any
    geometry: Geometry
    checkpoint: Checkpoint | None = None
    tokenizer: Any = None


def _prepare() -> None:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    attention.register()


@contextmanager
def _readable(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, str]]]:
    """(directory, further arguments) that the library reads configuration and tokenizer with."""
    if not checkpoint.is_gguf:
        yield str(checkpoint.directory), {}
        return
    with staged(checkpoint) as view:
        yield str(view), _GGUF_FILE


def examine(source: str) -> Examined:
    """Read everything of a model directory or GGUF file but its weights. Raises SpecqError when it cannot be used."""
    _prepare()
    checkpoint = open_checkpoint(source)
    with _readable(checkpoint) as (where, more):
        config = weights.read_config(source, checkpoint.config, where, **more)
        geometry = geometry_of(config)
        if not checkpoint.is_gguf:
            _refuse_implausible(checkpoint, config, geometry)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise SpecqError(f"{source} holds a {config.model_type} model, which transformers knows no causal LM for")
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, **more, **weights.LOCAL)
        except Exception as error:  # transformers raises many kinds here; the reason is in the text
            known = any((checkpoint.directory / name).is_file() for name in _TOKENIZERS) or checkpoint.is_gguf
            reason = first_line(error) if known else f"it has none of {', '.join(_TOKENIZERS)}"
            raise SpecqError(f"no usable tokenizer in {source}: {reason}") from error
    return Examined(config, geometry, checkpoint, tokenizer)


def _refuse_implausible(checkpoint: Checkpoint, config: Any, geometry: Geometry) -> None:  # noqa: ANN401
    """Raises SpecqError when config.json describes a far larger model than the weights hold.

    transformers would allocate what config.json says before it noticed. The count is a lower bound on the described
    model; the weights may be packed 8 to one element.
    """
    inner = getattr(config.get_text_config(), "intermediate_size", None)
    per_layer = geometry.hidden * (geometry.heads * geometry.head_dim + (inner if isinstance(inner, int) else 0))
    described = geometry.vocab * geometry.hidden + geometry.layers * per_layer
    stored = sum(prod(t.shape) for t in checkpoint.tensors.values())
    if described > 16 * stored or geometry.layers > len(checkpoint.tensors):
        raise SpecqError(
            f"config.json in {checkpoint.directory} describes at least {described:,} parameters in {geometry.layers} layers,"
            f" and the weights hold {stored:,} in {len(checkpoint.tensors)} tensors; they do not belong together"
        )


def load_random(
    name: str,
    config: Any,  # noqa: ANN401
    device: str = "cpu",
    seed: int = 0,
    draft: bool = False,
    share: Share | None = None,
) -> LoadedModel:
    """A model of a transformers config with random weights and no tokenizer: for memory and step times, not for text.

    The weights are made where they stay. `draft` and `share`: see `load`.
    """
    _prepare()
    geometry = geometry_of(config)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    where = _placed(name, config, geometry, dtype, device, draft, share)
    torch.manual_seed(seed)
    try:
        if where:
            model = placement.build_random(config, dtype, attention.NAME, **where)
        else:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    except (RuntimeError, ValueError, OSError) as error:  # memory that runs out, plans that do not fit
        raise SpecqError(f"cannot build {name} with random weights: {first_line(error)}") from error
    placement.refuse_left_over(name, model)
    return LoadedModel(
        name=name,
        model=model.eval().requires_grad_(False),
        tokenizer=None,
        geometry=geometry,
        scales=[LayerScales() for _ in range(geometry.layers)],
        eos_ids=frozenset(),
        sampling_defaults={},
        compute_dtype=dtype,
        checkpoint_dtype="random",
        parameters=sum(p.numel() for p in model.parameters()),
        checkpoint=None,
        cache_keyword=_cache_keyword(model),
        share=share,
    )


def _placed(
    name: str,
    config: Any,  # noqa: ANN401
    geometry: Geometry,
    dtype: torch.dtype,
    device: str,
    draft: bool,
    share: Share | None,
) -> dict[str, Any]:
    """What `from_pretrained` takes to put a model where it belongs; nothing for a single device."""
    if share:
        return placement.split(name, config, geometry, share, device)
    return placement.spread(name, config, dtype, draft) if device == placement.AUTO else {}


def _cache_keyword(model: torch.nn.Module) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _compute_dtype(checkpoint: Checkpoint, device: str, notes: list[str]) -> tuple[torch.dtype, str]:
    """(dtype to compute in, name of the checkpoint's own dtype): what config.json states, then what is stored."""
    stated, stored = checkpoint.stated_dtypes, checkpoint.stored_dtype
    own = stated.get("dtype") or stated.get("torch_dtype") or stored or "bfloat16"
    if len(set(stated.values())) > 1:
        notes.append(
            f"{checkpoint.directory}: config.json has dtype {stated['dtype']} and torch_dtype {stated['torch_dtype']}; {own}"
            " is taken, as transformers does"
        )
    if own not in PLAIN_DTYPES:
        raise SpecqError(
            f"{checkpoint.directory}: config.json states the dtype {own!r}; known are {', '.join(PLAIN_DTYPES)}"
        )
    if stored and stored != own and checkpoint.weight_quantization is None:
        notes.append(
            f"{checkpoint.directory}: weights are stored in {stored} and config.json states {own}: it serves as {own}"
        )
    return (torch.float32 if device == "cpu" else getattr(torch, own)), own


def _quantization(examined: Examined, device: str) -> str | None:
    """The weights' quantization, if transformers can run it here as it is. Raises SpecqError otherwise.

    A quantization_config that concerns the KV cache alone is taken off the config: the weights are plain then. What a GGUF
    file holds becomes plain floats when it is read.
    """
    checkpoint, config = examined.checkpoint, examined.config
    method = checkpoint.weight_quantization
    if method is None:
        for part in (config, config.get_text_config()):
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        return None
    if checkpoint.is_gguf:
        return None
    weights.refuse_dequantized(checkpoint, method, device)
    return method


def load(
    source: str,
    device: str = "cpu",
    examined: Examined | None = None,
    draft: bool = False,
    share: Share | None = None,
) -> LoadedModel:
    """Load a model directory or a .gguf file with specq's attention; `examined` saves reading it twice.

    On a CPU it computes in float32, on a GPU in the checkpoint's dtype. `device` is cpu, cuda, or auto for all visible
    GPUs, of which a small `draft` takes one. With a `share` this process keeps its part of the model.

    Raises SpecqError with the reason when the directory holds no loadable causal LM, or quantized weights that would not run
    as they are.
    """
    _prepare()
    examined = examined or examine(source)
    checkpoint, config, geometry = examined.checkpoint, examined.config, examined.geometry
    notes: list[str] = []
    dtype, own_dtype = _compute_dtype(checkpoint, device, notes)
    method = _quantization(examined, device)
    where = _placed(source, config, geometry, dtype, device, draft, share)
    if where and checkpoint.is_gguf:
        raise SpecqError(f"{source} is a .gguf file, which can be loaded on one device only: give --device cpu or cuda")
    if method and not where:
        where = {"device_map": device}  # quantized weights must meet their device at once
    config.transformers_weights = None  # a file name of the checkpoint's choice
    kind = _GGUF_FILE if checkpoint.is_gguf else {"use_safetensors": True}
    try:
        # the bar for GGUF files cannot be switched off
        with staged(checkpoint) as view, redirect_stderr(StringIO()) if checkpoint.is_gguf else nullcontext():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(view),
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **where,
                **kind,
                **weights.LOCAL,
            )
    except Exception as error:
        raise SpecqError(f"cannot load the weights in {source}: {first_line(error)}") from error
    if info["mismatched_keys"]:
        name, stored, wanted = min(info["mismatched_keys"])
        raise SpecqError(
            f"{source}: {name} has shape {list(stored)}, and config.json calls for {list(wanted)}; config and weights do not"
            " belong together"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise SpecqError(
            f"the weights in {source} lack {len(missing)} tensors that config.json calls for, such as {missing[0]}; they would"
            " be random numbers"
        )
    placement.refuse_left_over(source, model)
    quantizer = getattr(model, "hf_quantizer", None)
    if method and (quantizer is None or getattr(quantizer.quantization_config, "dequantize", False)):
        raise weights.dequantized(checkpoint, method, "transformers dequantized them all the same")
    _note_unused(checkpoint, geometry, info["unexpected_keys"], notes)
    model = model.eval().requires_grad_(False)
    if not where:
        model = model.to(device)
    eos, sampling = _generation(examined, model, notes)
    return LoadedModel(
        name=source,
        model=model,
        tokenizer=examined.tokenizer,
        geometry=geometry,
        scales=_checkpoint_scales(checkpoint, geometry),
        eos_ids=eos,
        sampling_defaults=sampling,
        compute_dtype=dtype,
        checkpoint_dtype=own_dtype,
        parameters=sum(p.numel() for p in model.parameters()),
        checkpoint=checkpoint,
        notes=notes,
        cache_keyword=_cache_keyword(model),
        share=share,
    )


def _note_unused(checkpoint: Checkpoint, geometry: Geometry, unexpected: set[str], notes: list[str]) -> None:
    beyond = [n for n, (layer, _) in checkpoint.kv_scales.items() if layer >= geometry.layers]
    if ignored := [*checkpoint.ignored_scales, *beyond]:
        notes.append(
            f"KV scales ignored: {checkpoint.directory} has {len(ignored)} scale tensors under names that are not understood,"
            f" such as {ignored[0]}"
        )
    known = {*ignored, *checkpoint.kv_scales}
    if other := sorted(n for n in unexpected if n not in known and not n.endswith("inv_freq")):
        notes.append(f"{len(other)} tensors in {checkpoint.directory} are not used, such as {other[0]}")
    if checkpoint.kv_cache_format:
        notes.append(
            f"{checkpoint.directory} asks for a {checkpoint.kv_cache_format} KV cache (kv_cache_scheme): vLLM's"
            " --kv-cache-dtype auto means that format here; the BF16 baseline is --kv-cache-dtype bfloat16"
        )


def _generation(
    examined: Examined, model: torch.nn.Module, notes: list[str]
) -> tuple[frozenset[int], dict[str, float]]:
    """(EOS ids, sampling settings): generation_config.json where there is one, else what the model's config implies.

    The tokenizer's EOS ends a text as well, as in vLLM. Raises SpecqError for settings of the wrong type.
    """
    path = examined.checkpoint.directory / "generation_config.json"
    own = path.is_file() and not examined.checkpoint.is_gguf  # a GGUF file speaks for itself alone
    given = read_json_object(path) if own else model.generation_config.to_diff_dict()
    eos = given.get("eos_token_id", model.generation_config.eos_token_id)
    if eos is None:
        eos = examined.config.get_text_config().eos_token_id
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    if examined.tokenizer.eos_token_id is not None:
        ids.append(examined.tokenizer.eos_token_id)
    sampling = {k: given[k] for k in SAMPLING if given.get(k) is not None}
    for name, value in sampling.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise SpecqError(f"{path}: {name} is {value!r:.40}, not a number a sampler can use")
    if not all(isinstance(i, int) for i in ids):
        raise SpecqError(f"{path}: eos_token_id is {eos!r:.40}, neither a token id nor a list of them")
    for name, nothing in UNMODELLED.items():
        if given.get(name) not in (None, nothing):
            notes.append(
                f"generation_config sets {name} {given[name]!r:.20}, which vLLM applies by default and specq does not model"
            )
    return frozenset(ids), sampling


@dataclass(frozen=True)
class Vocabulary:
    """Sizes that must be told apart: ids the tokenizer knows, and the (padded) logits of each model.

    Both distributions live on ids below `size`, the tokenizer's length capped by the target's logits; ids beyond `size` are
    never emitted. The draft has at least so many: it must be able to read what the target may emit.
    """

    size: int
    tokenizer: int
    target_logits: int
    draft_logits: int


def check_pair(target: Described, draft: Described) -> Vocabulary:
    """Common vocabulary of two models.

    Raises SpecqError when their token maps differ, naming the first differing id and both strings, when their special
    tokens do, and when the draft's embedding lacks ids that the target may emit. Models without tokenizers (random weights)
    share the ids both have logits for.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        size = min(target.geometry.vocab, draft.geometry.vocab)
        return Vocabulary(size, size, target.geometry.vocab, draft.geometry.vocab)
    a, b = ({i: t for t, i in m.tokenizer.get_vocab().items()} for m in (target, draft))
    differing = [i for i in sorted(a.keys() | b.keys()) if a.get(i) != b.get(i)]
    if differing:
        i, of = differing[0], len(a.keys() | b.keys())
        raise SpecqError(
            f"target and draft have different tokenizers: id {i} is {a.get(i)!r} in the target and {b.get(i)!r} in"
            f" the draft, and {len(differing):,} of {of:,} ids differ in all; speculative decoding compares probabilities id"
            " by id and needs one token map. What would do: a draft of the target's own family, or one trained with the"
            " target's tokenizer; drafting across tokenizers goes through text and is another method, which vLLM's draft"
            " models do not use"
        )
    for name in ("bos_token_id", "eos_token_id"):
        x, y = getattr(target.tokenizer, name, None), getattr(draft.tokenizer, name, None)
        if x != y:
            raise SpecqError(f"target and draft disagree on {name}: {x} and {y}; they need one tokenizer")
    length = len(target.tokenizer)
    size = min(length, target.geometry.vocab)
    if draft.geometry.vocab < size:
        raise SpecqError(
            f"the target may emit {size:,} ids and the draft's embedding has {draft.geometry.vocab:,}: it could not read id"
            f" {draft.geometry.vocab} ({b.get(draft.geometry.vocab)!r})"
        )
    return Vocabulary(size, length, target.geometry.vocab, draft.geometry.vocab)
