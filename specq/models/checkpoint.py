"""Checkpoints, model directories or GGUF files, whose files are checked before anything is loaded.

`open_checkpoint` reads config.json and the headers of the weight files. `staged` gives a directory that holds nothing but
what was checked, which is what transformers then loads from. No torch here.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specq.errors import SpecqError
from specq.models.directory import INDEX, check_index, find_weight_files, is_adapter, read_json_object
from specq.models.weight_files import GGUF, PLAIN, Tensor, check_gguf, read_header


@dataclass(frozen=True)
class Checkpoint:
    """A model directory whose files are all there: config.json as parsed, weight files in use, tensors by name.

    Or a GGUF file, which describes itself: there is no config.json then, and no tensor is listed.
    """

    directory: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, Tensor]

    @property
    def is_gguf(self) -> bool:
        """Whether this is a GGUF file."""
        return self.files[0].suffix == GGUF

    @property
    def stored_dtype(self) -> str | None:
        """The dtype that most elements of plain weights are stored in, as torch names it."""
        sizes: Counter[str] = Counter()
        for t in self.tensors.values():
            if t.dtype in PLAIN:
                sizes[t.dtype] += prod(t.shape)
        return PLAIN[sizes.most_common(1)[0][0]] if sizes else None

    @property
    def stated_dtypes(self) -> dict[str, str]:
        """What config.json says under `dtype` and `torch_dtype`, its text_config included."""
        found: dict[str, str] = {}
        for part in (self.config, self.config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part, dict) and isinstance(part.get(key), str):
                    found.setdefault(key, part[key].removeprefix("torch."))
        return found


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Check a model directory or a GGUF file. Raises SpecqError naming the file and what is wrong with it."""
    directory = Path(directory)
    if directory.suffix == GGUF and not directory.is_dir():
        check_gguf(directory)
        return Checkpoint(directory.parent, {}, (directory,), {})
    if not (directory / "config.json").is_file():
        adapter = ": it is an adapter (LoRA); merge it into its base model" if is_adapter(directory) else ""
        raise SpecqError(f"no config.json in {directory}: this is not a model directory{adapter}")
    config = read_json_object(directory / "config.json")
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            read_json_object(directory / name)  # what is damaged is told here, not by a library's exception
    files = find_weight_files(directory)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise SpecqError(
                    f"{directory}: {name} is in both {tensors[name].file.name} and {file.name}; which one counts is"
                    " unclear, so remove the stray file"
                )
            tensors[name] = tensor
    if not tensors:
        raise SpecqError(f"the weight files in {directory} hold no tensor")
    check_index(directory, files, tensors)
    return Checkpoint(directory, config, tuple(files), tensors)


@contextmanager
def staged(checkpoint: Checkpoint) -> Iterator[Path]:
    """A directory with links to the checked weight files, an index for them, config.json and generation_config.json.

    Nothing else can be loaded from it: no pickle, no code, no adapter, no stray file. A GGUF file is `model.gguf` there.
    """
    with tempfile.TemporaryDirectory(prefix="specq-") as folder:
        view, count = Path(folder), len(checkpoint.files)
        whole = f"model{GGUF if checkpoint.is_gguf else '.safetensors'}"
        names = {
            f: f"model-{i:05d}-of-{count:05d}.safetensors" if count > 1 else whole
            for i, f in enumerate(checkpoint.files, 1)
        }
        for file, name in names.items():
            (view / name).symlink_to(file.resolve())
        if count > 1:
            table = {name: names[t.file] for name, t in checkpoint.tensors.items()}
            (view / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}), encoding="utf-8")
        for name in () if checkpoint.is_gguf else ("config.json", "generation_config.json"):
            if (checkpoint.directory / name).is_file():
                (view / name).symlink_to((checkpoint.directory / name).resolve())
        yield view
