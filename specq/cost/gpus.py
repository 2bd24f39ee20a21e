"""Accelerators by name, from gpus.toml. No torch here."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from specq.errors import SpecqError


@dataclass(frozen=True)
class Gpu:
    """One accelerator's data-sheet figures; GB/s, TFLOP/s, GB."""

    name: str
    bandwidth: float
    bf16: float
    memory: float
    fp8: bool
    source: str
    capability: float | None = None


def gpus() -> dict[str, Gpu]:
    """All known accelerators by name."""
    entries = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8"))
    return {name: Gpu(name=name, **figures) for name, figures in entries.items()}


def get_gpu(name: str) -> Gpu:
    """The accelerator called `name`. Raises SpecqError listing the known ones."""
    known = gpus()
    if name.lower() not in known:
        raise SpecqError(f"unknown GPU {name!r}; known are {', '.join(known)}")
    return known[name.lower()]
