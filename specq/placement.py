"""Where the weights of a model go: one device, all visible GPUs (`--device auto`), or shares of the processes of torchrun.

transformers does the work, by a device map or by its tensor parallel plan for the model; here stand the arguments it takes
for either, and the refusals that come before it allocates anything.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from specq.errors import SpecqError
from specq.models.geometry import Geometry
from specq.parallel import Share

AUTO = "auto"
ROOM = 0.9  # of a GPU's free memory that weights may take; the rest is for caches and activations
WHOLE = (
    0.5  # of one GPU's free memory: a draft below it is not spread, since its steps are short and follow one another
)


def require(device: str) -> None:
    """Raises SpecqError when a `--device` is not to be had here."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SpecqError(f"--device {device}: PyTorch sees no CUDA device here; use --device cpu")
    if device == AUTO:
        _require_accelerate("--device auto")


def require_room(sizes: Mapping[str, int]) -> None:
    """Raises SpecqError when models with so many bytes of weights, by name, do not fit the one GPU that they share."""
    free = torch.cuda.mem_get_info()[0]
    if sum(sizes.values()) > free:
        parts = " and ".join(f"{name} ({size / 1e9:.1f} GB)" for name, size in sizes.items())
        raise SpecqError(
            f"the weights of {parts} do not fit one GPU, which has {free / 1e9:.1f} GB free: --device auto spreads a model over"
            " all visible GPUs, torchrun splits the target over its processes"
        )


def _require_accelerate(what: str) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise SpecqError(f"{what} needs the package accelerate: pip install 'specq[gpu]'")


def spread(name: str, config: Any, dtype: torch.dtype, draft: bool = False) -> dict[str, Any]:  # noqa: ANN401
    """Arguments that make `from_pretrained` spread a model over all visible GPUs, an even share on each.

    A draft that takes little of the roomiest GPU goes there whole. Nothing is left to the CPU or the disk: raises
    SpecqError when the weights do not fit the free memory of the GPUs.
    """
    free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    size = weight_bytes(config, dtype)
    refuse_too_large(name, size, free)
    roomiest = max(range(len(free)), key=free.__getitem__)
    if draft and size is not None and size <= WHOLE * free[roomiest]:
        return {"device_map": {"": roomiest}}
    return {"device_map": "balanced", "max_memory": {i: int(ROOM * n) for i, n in enumerate(free)}}


def weight_bytes(config: Any, dtype: torch.dtype) -> int | None:  # noqa: ANN401
    """Bytes of the weights a configuration describes, computed in `dtype`; None where they are quantized."""
    if getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def refuse_too_large(name: str, size: int | None, free: Sequence[int]) -> None:
    """Raises SpecqError when `size` bytes of weights do not fit GPUs with `free` bytes each."""
    if size is not None and size > ROOM * sum(free):
        raise SpecqError(
            f"the weights of {name} take {size / 1e9:.1f} GB and the {len(free)} GPUs here have {sum(free) / 1e9:.1f} GB free;"
            " nothing is left to the CPU or the disk, which would be far too slow"
        )


def refuse_left_over(name: str, model: torch.nn.Module) -> None:
    """Raises SpecqError when transformers put a part of a spread model elsewhere than on a GPU."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if left := sorted(places & {"cpu", "disk"}):
        raise SpecqError(f"{name} does not fit the GPUs here: transformers would leave parts of it to the {left[0]}")


def split(name: str, config: Any, geometry: Geometry, share: Share, device: str) -> dict[str, Any]:  # noqa: ANN401
    """Arguments that make `from_pretrained` keep this process's share of a model, by transformers' plan for it.

    Raises SpecqError where there is no plan, where heads do not divide, and where `--device` and GPUs contradict.
    """
    from transformers.distributed import DistributedConfig

    if device == AUTO:
        raise SpecqError("--device auto spreads a model from one process; under torchrun give --device cuda or cpu")
    if device == "cpu" and torch.cuda.is_available():
        raise SpecqError(
            "transformers splits a model over GPUs wherever there are any: --device cuda, or hide them with"
            " CUDA_VISIBLE_DEVICES="
        )
    if device == "cuda" and share.local_size > torch.cuda.device_count():
        raise SpecqError(
            f"torchrun started {share.local_size} processes here, and PyTorch sees {torch.cuda.device_count()} GPUs: one each"
        )
    _require_accelerate("a model split over processes")
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise SpecqError(
            f"transformers has no tensor parallel plan for {config.model_type} models such as {name}; run one process with"
            " --device auto"
        )
    if geometry.kv_heads % share.size or geometry.heads % share.size:
        raise SpecqError(
            f"{name} has {geometry.kv_heads} KV heads and {geometry.heads} query heads, which do not divide over"
            f" {share.size} processes; start fewer, or one with --device auto"
        )
    return {"distributed_config": DistributedConfig(tp_size=share.size)}


def build_random(config: Any, dtype: torch.dtype, attention: str, **where: Any) -> torch.nn.Module:  # noqa: ANN401
    """A model with random weights that are made where they belong, by `spread` or `split`; never first on the CPU."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.from_pretrained(None, config=config, state_dict={}, dtype=dtype, attn_implementation=attention, **where)
