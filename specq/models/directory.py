"""The files of a model directory: its JSON, and which weight files transformers would choose from it."""

import os
import re
from pathlib import Path
from typing import Any

from specq import files
from specq.errors import SpecqError
from specq.models.weight_files import Tensor

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^model-(\d{5})-of-(\d{5})\.safetensors$")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory. Raises SpecqError naming the file."""
    value = files.read_json(path)
    if not isinstance(value, dict):
        raise SpecqError(f"{path} is damaged: it holds no JSON object")
    return value


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter (LoRA)."""
    return (directory / "adapter_config.json").is_file()


def find_weight_files(directory: Path) -> list[Path]:
    """The weight files in use, as transformers chooses them; shards also without an index."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if (directory / INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        missing = [n for n in names if not (directory / n).is_file()]
        if missing:
            raise SpecqError(f"{directory} lacks {len(missing)} of {len(names)} weight files: {_some(missing)}")
        return [directory / n for n in names]
    found = sorted(directory.glob("*.safetensors"))
    shards = [(f, m) for f in found if (m := _SHARD.match(f.name))]
    if shards:
        totals = {m[2] for _, m in shards}
        if len(totals) > 1:
            raise SpecqError(f"{directory} holds shards of several checkpoints ({' and '.join(sorted(totals))} files)")
        total = int(totals.pop())
        have = {int(m[1]) for _, m in shards}
        missing = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1) if i not in have]
        if missing:
            raise SpecqError(f"{directory} lacks {len(missing)} of {total} weight files: {_some(missing)}")
        return [f for f, _ in shards]
    if len(found) == 1 and not is_adapter(directory):
        return found
    raise SpecqError(_no_weights(directory, found))


def check_index(directory: Path, files: list[Path], tensors: dict[str, Tensor]) -> None:
    """Raises SpecqError when the index of `files`, if there is one, tells something else than their headers, `tensors`."""
    if files == [directory / "model.safetensors"] or not (directory / INDEX).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in tensors or tensors[name].file.name != file:
            raise SpecqError(
                f"{directory}: the index says that {file} holds {name}, and it does not; download both again"
            )


def _no_weights(directory: Path, found: list[Path]) -> str:
    if is_adapter(directory):
        return f"{directory} is an adapter (LoRA), not a model; merge it into its base model first"
    if found:
        return f"{directory} has no model.safetensors and no index for {_some([f.name for f in found])}"
    pickles = sorted(p.name for kind in _PICKLES for p in directory.glob(kind))
    if pickles:
        return (
            f"{directory} has pickled weights only ({_some(pickles)}); a pickle can run code when it is loaded, so specq reads"
            " safetensors alone: load the model with transformers where you trust it and save_pretrained it"
        )
    if any(directory.glob("*.gguf")):
        return f"{directory} has GGUF weights only; give the .gguf file itself"
    return f"no weights in {directory}: it has no *.safetensors file"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _weight_map(directory: Path) -> dict[str, str]:
    table = read_json_object(directory / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise SpecqError(f"{directory / INDEX} is damaged: it has no weight_map")
    for name, file in table.items():
        if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise SpecqError(f"{directory / INDEX} is damaged: {name} is in {file!r}, which is no file beside it")
    return table
