"""Accelerators by name, from gpus.toml or a file of the user's in the same form. No torch here."""

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from specq.errors import SpecqError


@dataclass(frozen=True)
class Efficiency:
    """What real kernels make of the data sheet's rates: shares of them, and times that no rate shows.

    matrix, attention: of the matrix rate, in products and in attention, whose few queries fill a matrix unit badly.
    layer_seconds: launch and synchronisation per layer that nothing hides. reduce_seconds: latency of one all-reduce.
    step_seconds: what a step takes whatever the model (sampling, scheduling). `source` says whether these were assumed,
    given or calibrated.
    """

    bandwidth: float = 0.80
    matrix: float = 0.60
    attention: float = 0.40
    link: float = 0.60
    layer_seconds: float = 10e-6
    reduce_seconds: float = 10e-6
    step_seconds: float = 0.0
    source: str = "assumed, not measured"


@dataclass(frozen=True)
class Gpu:
    """One accelerator's data-sheet figures: memory GB/s, dense BF16 TFLOP/s, GB, link GB/s per direction."""

    name: str
    bandwidth: float
    bf16: float
    memory: float
    fp8: bool
    source: str
    link: float
    capability: float | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)


def gpus() -> dict[str, Gpu]:
    """All known accelerators by name."""
    entries = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8"))
    return {name: Gpu(name=name, **figures) for name, figures in entries.items()}


def get_gpu(name: str) -> Gpu:
    """The accelerator called `name`, or described by the file NAME.toml.

    Raises SpecqError listing the known ones, or naming what a file lacks.
    """
    if name.endswith(".toml"):
        return read_gpu(Path(name))
    known = gpus()
    if name.lower() not in known:
        raise SpecqError(f"unknown GPU {name!r}; known are {', '.join(known)}, or a file of your own: NAME.toml")
    return known[name.lower()]


def read_gpu(path: Path) -> Gpu:
    """A user's accelerator: the keys of gpus.toml at the top level, and optionally an [efficiency] table."""
    try:
        figures = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecqError(f"{path} is no TOML: {error}") from error
    efficiency = figures.pop("efficiency", {})
    if not isinstance(efficiency, dict):
        raise SpecqError(f"{path}: efficiency must be a table")
    _check(path, figures, Gpu, skip={"name", "efficiency"})
    _check(path, efficiency, Efficiency, skip=set())
    stated = Efficiency(**{"source": f"given in {path.name}"} | efficiency) if efficiency else Efficiency()
    return Gpu(name=path.stem, efficiency=stated, **figures)


_OPTIONAL = {"capability"}
_TEXT, _FLAG = {"source"}, {"fp8"}


def _check(path: Path, given: dict, kind: type, skip: set[str]) -> None:
    """Raises SpecqError for unknown, missing and senseless keys of one table."""
    known = {f.name for f in fields(kind)} - skip
    if unknown := sorted(given.keys() - known):
        raise SpecqError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if kind is Gpu and (missing := sorted(known - _OPTIONAL - given.keys())):
        raise SpecqError(f"{path}: {missing[0]!r} is missing; needed are {', '.join(sorted(known - _OPTIONAL))}")
    for key, value in given.items():
        right = str if key in _TEXT else bool if key in _FLAG else (int, float)
        if not isinstance(value, right) or (key not in _TEXT | _FLAG and (isinstance(value, bool) or not value >= 0)):
            raise SpecqError(f"{path}: {key} = {value!r} makes no sense")
        if key not in _TEXT | _FLAG and not key.endswith("_seconds") and value == 0:
            raise SpecqError(f"{path}: {key} must be above 0")


def split_gpus(text: str) -> tuple[int, str]:
    """(how many, name or file) from "h100", "8xh100" or "4xmine.toml"."""
    count, cross, name = text.partition("x")
    if not (cross and count.isdigit()):
        return 1, text
    if int(count) < 1:
        raise SpecqError(f"{text!r}: at least one GPU is needed")
    return int(count), name


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """(how many, which) from the same."""
    count, name = split_gpus(text)
    return count, get_gpu(name)
