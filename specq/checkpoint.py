"""Model directories and GGUF files, checked before anything is loaded: files, headers, quantization, a fingerprint.

`open_checkpoint` reads config.json and the headers of the weight files and refuses what is missing, cut short or no
weights at all (Git LFS pointers, web pages). Only safetensors and GGUF are ever read; pickles can run code. `staged` gives
a directory that holds nothing but what was checked, which is what transformers then loads from. No torch here.
"""

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specq.errors import SpecqError

INDEX = "model.safetensors.index.json"
# bits per element of every dtype that safetensors knows
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64, "C64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LONGEST_HEADER = 100_000_000  # bytes, the library's own limit
_SHARD = re.compile(r"^model-(\d{5})-of-(\d{5})\.safetensors$")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LFS = b"version https://git-lfs.github.com/spec/"

# Names under which checkpoints keep KV scales: the attention module, vLLM's inner `attn`, or the projection.
KV_SCALE = re.compile(
    r"\.(?:layers|h|blocks)\.(\d+)\.(?:self_attn|attention|attn|mixer)\.(?:attn\.)?"
    r"(?:qkv_proj\.)?(?:(?:[kvq]_proj\.)?([kvq]|kv)_scale|([kvq])_proj\.output_scale)$"
)
_LIKE_KV_SCALE = re.compile(r"(?:^|[._])(?:[kvq]|kv|k_cache|v_cache|kv_cache)_scale$|[kv]_proj\.output_scale$")
# Tensors that only quantized weights have.
_QUANTIZED = re.compile(r"\.(?:weight_scale|weight_scale_inv|qweight|weight_packed|qzeros|g_idx|weight_zero_point)$")

GGUF = ".gguf"
GGUF_MAGIC = b"GGUF"
# KV formats by a checkpoint's kv_cache_scheme (compressed-tensors): (type, bits)
_KV_SCHEMES = {("float", 8): "fp8_e4m3"}

WHOLE_FILE = 64 << 20  # bytes up to which a weight file is hashed whole
SAMPLE = 4096  # bytes taken at the beginning, middle and end of every tensor beyond that
STRIDE = 1 << 20  # bytes between the samples of a GGUF file beyond that, behind its metadata


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `start` and `end` are bytes from the beginning of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


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

    @property
    def quantization(self) -> dict[str, Any]:
        """quantization_config of config.json, its text_config's, or {}."""
        return _quantization(self.config)

    @property
    def weight_quantization(self) -> str | None:
        """How the weights are quantized, None where they are plain. Raises SpecqError where nothing says how."""
        if self.is_gguf:  # transformers can only read it into floats; whoever reads the results is told
            return f"GGUF ({self.files[0].stem}), dequantized into the compute dtype"
        method = self.quantization.get("quant_method")
        odd = next(
            (n for n, t in self.tensors.items() if t.dtype not in PLAIN and n.endswith(("weight", "_packed", "_blocks"))),
            None,
        ) or next((n for n in self.tensors if _QUANTIZED.search(n)), None)  # fmt: skip
        if (
            odd is None
        ):  # plain numbers, which a quantizer may still be asked for; not where only the cache is concerned
            about_cache = _KV_KEYS & self.quantization.keys() and not _WEIGHT_KEYS & {
                k for k, v in self.quantization.items() if v
            }
            return None if about_cache or not isinstance(method, str) else method
        if not isinstance(method, str):
            raise SpecqError(
                f"the weights in {self.directory} are quantized ({odd} is stored as {self.tensors[odd].dtype}), but"
                " config.json has no quantization_config that says how; they would be read as if they were plain numbers"
            )
        return method

    @property
    def kv_cache_format(self) -> str | None:
        """The KV format that config.json asks for, None where it asks for none or one that is none of ours."""
        return _asked_of_cache(self.config)[1]

    @property
    def kv_scales(self) -> dict[str, tuple[int, str]]:
        """Name -> (layer, "k", "v", "q" or "kv") of every static KV scale that is understood."""
        hits = {n: KV_SCALE.search(n) for n in self.tensors}
        return {n: (int(h[1]), h[2] or h[3]) for n, h in hits.items() if h and not _other_tower(n)}

    @property
    def ignored_scales(self) -> list[str]:
        """Names of tensors that look like KV scales and are not used."""
        used = self.kv_scales
        return [n for n in self.tensors if _LIKE_KV_SCALE.search(n) and n not in used and not _other_tower(n)]


# what a quantization_config says of the cache, and what of the weights
_KV_KEYS = {"kv_cache_scheme", "kv_cache_quant_algo"}
_WEIGHT_KEYS = {
    "config_groups",
    "quant_algo",
    "bits",
    "load_in_8bit",
    "load_in_4bit",
    "weight_block_size",
    "dequantize",
}


def _quantization(config: dict[str, Any]) -> dict[str, Any]:
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("quantization_config"), dict):
            return part["quantization_config"]
    return {}


def _asked_of_cache(config: dict[str, Any]) -> tuple[Any, str | None]:
    """(what config.json asks of the KV cache, None for nothing; the KV format that is, None for none of ours)."""
    scheme, algorithm = (_quantization(config).get(k) for k in ("kv_cache_scheme", "kv_cache_quant_algo"))
    if isinstance(scheme, dict) and scheme:
        kind = (scheme.get("type"), scheme.get("num_bits"))
        return scheme, None if scheme.get("dynamic") else _KV_SCHEMES.get(kind)
    if isinstance(algorithm, str) and algorithm:
        return algorithm, "fp8_e4m3" if algorithm.upper() == "FP8" else None
    return None, None


def auto_kv_format(config: dict[str, Any]) -> str:
    """The KV format that `auto` means for a checkpoint's config.json: what it asks for, or bf16.

    Serving engines resolve `auto` so. Raises SpecqError for a scheme that no format here models.
    """
    asked, fmt = _asked_of_cache(config)
    if asked is not None and fmt is None:
        raise SpecqError(f"the checkpoint's kv_cache_scheme {asked} is none of specq's formats; name one with --dtype")
    return fmt or "bf16"


def _other_tower(name: str) -> bool:
    return "vision" in name or "audio" in name


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory. Raises SpecqError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecqError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(value, dict):
        raise SpecqError(f"{path} is damaged: it holds no JSON object")
    return value


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


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Check a model directory or a GGUF file. Raises SpecqError naming the file and what is wrong with it."""
    directory = Path(directory)
    if directory.suffix == GGUF and not directory.is_dir():
        _check_gguf(directory)
        return Checkpoint(directory.parent, {}, (directory,), {})
    if not (directory / "config.json").is_file():
        adapter = ": it is an adapter (LoRA); merge it into its base model" if _adapter(directory) else ""
        raise SpecqError(f"no config.json in {directory}: this is not a model directory{adapter}")
    config = read_json_object(directory / "config.json")
    for name in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            read_json_object(directory / name)  # what is damaged is told here, not by a library's exception
    files = _weight_files(directory)
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
    _check_index(directory, files, tensors)
    return Checkpoint(directory, config, tuple(files), tensors)


def _refuse_special(path: Path) -> None:
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise SpecqError(f"cannot read {path}: it is not a regular file")


def _check_gguf(path: Path) -> None:
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


def _adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file()


def _weight_files(directory: Path) -> list[Path]:
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
    if len(found) == 1 and not _adapter(directory):
        return found
    raise SpecqError(_no_weights(directory, found))


def _no_weights(directory: Path, found: list[Path]) -> str:
    if _adapter(directory):
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


def _check_index(directory: Path, files: list[Path], tensors: dict[str, Tensor]) -> None:
    if files == [directory / "model.safetensors"] or not (directory / INDEX).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in tensors or tensors[name].file.name != file:
            raise SpecqError(
                f"{directory}: the index says that {file} holds {name}, and it does not; download both again"
            )


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


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over what a model directory means: the same on every machine, whatever its path and file times.

    All JSON, template and tokenizer files count whole (a GGUF file holds its own). Weight files count whole up to 64 MB;
    larger ones by their header and the first, middle and last 4 KiB of every tensor: training, fine-tuning, merging or
    quantizing again changes those, and reading 140 GB for every study would take minutes. Of larger GGUF files the first
    64 MB, metadata included, count whole, then 4 KiB of every MiB. A single changed element inside a large tensor can go
    unseen.
    """
    digest = hashlib.sha256()
    kinds = ("*.json", "*.jinja", "*.model", "*.txt")
    beside = () if checkpoint.is_gguf else {p for kind in kinds for p in checkpoint.directory.glob(kind)}
    for path in sorted(beside):
        if path.is_file() and path.name != INDEX:
            _add(digest, path.name.encode(), path.read_bytes())
    for path in checkpoint.files:
        with path.open("rb") as file:
            if path.stat().st_size <= WHOLE_FILE:
                _add(digest, path.name.encode(), file.read())
                continue
            if checkpoint.is_gguf:
                _add(digest, path.name.encode(), file.read(WHOLE_FILE))
                for at in range(WHOLE_FILE, path.stat().st_size, STRIDE):
                    file.seek(at)
                    digest.update(file.read(SAMPLE))
                continue
            length = int.from_bytes(file.read(8), "little")
            _add(digest, path.name.encode(), file.read(length))
            for tensor in (t for t in checkpoint.tensors.values() if t.file == path):
                for at in (tensor.start, (tensor.start + tensor.end) // 2, max(tensor.start, tensor.end - SAMPLE)):
                    file.seek(at)
                    digest.update(file.read(min(SAMPLE, tensor.end - at)))
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", name: bytes, content: bytes) -> None:
    digest.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)
