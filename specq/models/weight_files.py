"""Weight files, from their headers alone: safetensors and GGUF, whole and undamaged or refused with the reason.

Git LFS pointers, incomplete downloads and saved web pages are told apart. Only these two formats are ever read; pickles can
run code.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specq.errors import SpecqError

# bits per element of every dtype that safetensors knows
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LONGEST_HEADER = 100_000_000  # bytes, the library's own limit
_LFS = b"version https://git-lfs.github.com/spec/"

GGUF = ".gguf"
GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `start` and `end` are bytes from the beginning of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, from its header alone.

    Raises SpecqError that tells Git LFS pointers, incomplete files and foreign content apart.
    """
    _refuse_special(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(512)
            length = int.from_bytes(start[:8], "little")
            if start.startswith(_LFS):
                raise _pointer(path)
            if len(start) < 8:
                raise SpecqError(f"{path} is incomplete: {size} bytes, too few for a safetensors file")
            if length > LONGEST_HEADER or not start[8:9] == b"{":
                raise SpecqError(
                    f"{path} is no safetensors file (it begins with {start[:16]!r}); was a web page saved?"
                )
            if 8 + length > size:
                raise _incomplete(path, size, 8 + length)
            file.seek(8)
            raw = json.loads(file.read(length))
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecqError(f"{path} has a damaged header: {str(error).splitlines()[0]}; download it again") from error
    try:
        tensors = _tensors(path, raw, 8 + length)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecqError(f"{path} has a damaged header: {error}; download it again") from error
    end = max((t.end for t in tensors.values()), default=8 + length)
    if end > size:
        raise _incomplete(path, size, end)
    if end < size:
        raise SpecqError(f"{path} is damaged: {size - end} bytes more than its header describes; download it again")
    return tensors


def check_gguf(path: Path) -> None:
    """Raises SpecqError for what is no GGUF file."""
    _refuse_special(path)
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    if start.startswith(_LFS):
        raise _pointer(path)
    if not start.startswith(GGUF_MAGIC):
        raise SpecqError(f"{path} is no GGUF file (it begins with {start[:16]!r}); was a web page saved?")


def _refuse_special(path: Path) -> None:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise SpecqError(f"cannot read {path}: it is not a regular file")


def _pointer(path: Path) -> SpecqError:
    return SpecqError(
        f"{path} looks like a Git LFS pointer, not the weights themselves; fetch them: git lfs pull, or download the file from"
        " its page"
    )


def _incomplete(path: Path, size: int, wanted: int) -> SpecqError:
    return SpecqError(f"{path} is incomplete: {size:,} of {wanted:,} bytes; download it again")


def _tensors(path: Path, raw: dict, begin: int) -> dict[str, Tensor]:
    """Tensors of a parsed header, whose data must follow one another without holes. Raises ValueError and kin."""
    if not isinstance(raw, dict):
        raise ValueError("it is no JSON object")
    tensors = {}
    for name, entry in raw.items():
        if name == "__metadata__":
            continue
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in (*shape, first, last)):
            raise ValueError(f"{name} has a negative or broken size")
        if dtype not in BITS:
            raise ValueError(f"{name} has the unknown dtype {dtype!r}")
        if (last - first) * 8 != prod(shape) * BITS[dtype]:
            raise ValueError(f"{name} has {last - first} bytes for shape {list(shape)} in {dtype}")
        tensors[name] = Tensor(dtype, shape, path, begin + first, begin + last)
    at = begin
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if tensor.start != at:
            raise ValueError("its tensors overlap or leave holes")
        at = tensor.end
    return tensors
