"""Loading: `load` makes a LoadedModel of a model directory or GGUF file, `load_random` of a configuration alone.

Both give an ordinary transformers model whose attention is specq's. Nothing here goes to the network, runs code of a
checkpoint or reads a pickle.
"""

import inspect
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specq import placement
from specq.errors import SpecqError, first_line
from specq.kv import attention
from specq.kv.cache import LayerScales
from specq.kv.checkpoint_scales import checkpoint_scales, ignored_scales, understood_scales
from specq.models import quantization
from specq.models.checkpoint import Checkpoint, staged
from specq.models.config import LOCAL
from specq.models.examine import GGUF_FILE, Examined, examine, quiet
from specq.models.generation import generation_settings
from specq.models.geometry import Geometry, geometry_of
from specq.models.loaded import LoadedModel
from specq.models.weight_files import PLAIN
from specq.parallel import Share


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
    quiet()
    attention.register()
    examined = examined or examine(source)
    checkpoint, config, geometry = examined.checkpoint, examined.config, examined.geometry
    notes: list[str] = []
    dtype, own_dtype = _compute_dtype(checkpoint, device, notes)
    method = quantization.runnable(checkpoint, config, device)
    where = _placed(source, config, geometry, dtype, device, draft, share)
    if where and checkpoint.is_gguf:
        raise SpecqError(f"{source} is a .gguf file, which can be loaded on one device only: give --device cpu or cuda")
    if method and not where:
        where = {"device_map": device}  # quantized weights must meet their device at once
    config.transformers_weights = None  # a file name of the checkpoint's choice
    kind = GGUF_FILE if checkpoint.is_gguf else {"use_safetensors": True}
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
                **LOCAL,
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
        raise quantization.dequantized(checkpoint, method, "transformers dequantized them all the same")
    _note_unused(checkpoint, geometry, info["unexpected_keys"], notes)
    model = model.eval().requires_grad_(False)
    if not where:
        try:
            model = model.to(device)
        except RuntimeError as error:
            raise SpecqError(f"cannot move the weights in {source} to {device}: {first_line(error)}") from error
    eos, sampling = generation_settings(examined, model, notes)
    return LoadedModel(
        name=source,
        model=model,
        tokenizer=examined.tokenizer,
        geometry=geometry,
        scales=checkpoint_scales(checkpoint, geometry),
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


def weight_bytes(examined: Examined, device: str) -> int:
    """Bytes that the weights will take on `device`: in the dtype computed in, or as stored where they are quantized.

    0 where nothing says: quantized weights that will be random, a configuration that no model can be made of.
    """
    checkpoint = examined.checkpoint
    dtype = _random_dtype(device) if checkpoint is None else _compute_dtype(checkpoint, device, [])[0]
    try:
        size = placement.weight_bytes(examined.config, dtype)
    except Exception:  # a configuration that no model can be made of: loading says what is wrong with it
        return 0
    if size is None:
        size = sum(t.end - t.start for t in checkpoint.tensors.values()) if checkpoint else 0
    return size


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
    quiet()
    attention.register()
    geometry = geometry_of(config)
    dtype = _random_dtype(device)
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


def _random_dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def _compute_dtype(checkpoint: Checkpoint, device: str, notes: list[str]) -> tuple[torch.dtype, str]:
    """(dtype to compute in, name of the checkpoint's own dtype): what config.json states, then what is stored."""
    stated, stored = checkpoint.stated_dtypes, checkpoint.stored_dtype
    own = stated.get("dtype") or stated.get("torch_dtype") or stored or "bfloat16"
    if len(set(stated.values())) > 1:
        notes.append(
            f"{checkpoint.directory}: config.json has dtype {stated['dtype']} and torch_dtype {stated['torch_dtype']}; {own}"
            " is taken, as transformers does"
        )
    if own not in PLAIN.values():
        raise SpecqError(
            f"{checkpoint.directory}: config.json states the dtype {own!r}; known are {', '.join(PLAIN.values())}"
        )
    if stored and stored != own and quantization.weight_quantization(checkpoint) is None:
        notes.append(
            f"{checkpoint.directory}: weights are stored in {stored} and config.json states {own}: it serves as {own}"
        )
    return (torch.float32 if device == "cpu" else getattr(torch, own)), own


def _note_unused(checkpoint: Checkpoint, geometry: Geometry, unexpected: set[str], notes: list[str]) -> None:
    used = understood_scales(checkpoint)
    beyond = [n for n, (layer, _) in used.items() if layer >= geometry.layers]
    if ignored := [*ignored_scales(checkpoint), *beyond]:
        notes.append(
            f"KV scales ignored: {checkpoint.directory} has {len(ignored)} scale tensors under names that are not understood,"
            f" such as {ignored[0]}"
        )
    known = {*ignored, *used}
    if other := sorted(n for n in unexpected if n not in known and not n.endswith("inv_freq")):
        notes.append(f"{len(other)} tensors in {checkpoint.directory} are not used, such as {other[0]}")
    if asked := quantization.kv_cache_format(checkpoint):
        notes.append(
            f"{checkpoint.directory} asks for a {asked} KV cache (kv_cache_scheme): vLLM's"
            " --kv-cache-dtype auto means that format here; the BF16 baseline is --kv-cache-dtype bfloat16"
        )
