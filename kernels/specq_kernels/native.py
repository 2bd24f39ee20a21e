"""CUDA C++ kernels: built on first use by torch's extension loader, called through ctypes.

The Triton kernels do the same everywhere else: `why_not` says in a sentence why a device takes those.
"""

import ctypes
import functools
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils import cpp_extension

_log = logging.getLogger("specq_kernels")
_broken: dict[str, str] = {}  # source -> why it cannot be built here


@functools.cache
def toolchain() -> str:
    """Why nothing can be built here, or an empty string."""
    if os.environ.get("SPECQ_NATIVE", "1") == "0":
        return "SPECQ_NATIVE=0 is set"
    if not cpp_extension.CUDA_HOME or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return "there is no nvcc"
    if _ninja() is None:
        return "there is no ninja (pip install ninja)"
    return ""


def _ninja() -> str | None:
    """Torch's loader runs `ninja`; one installed beside this Python need not be on PATH."""
    beside = Path(sys.executable).with_name("ninja")
    return shutil.which("ninja") or (str(beside) if beside.exists() else None)


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(index)


def why_not(device: torch.device, source: str) -> str:
    """Why this device runs the Triton kernel instead of `source`; an empty string if it does not."""
    if device.type != "cuda":
        return "it needs a CUDA GPU"
    if capability(_index(device)) < (9, 0):
        return "the GPU's compute capability is below 9.0"
    return toolchain() or _broken.get(source, "")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class BuildError(RuntimeError):
    """A kernel did not compile; from then on its source counts as unavailable and Triton takes its place."""


def architecture(device: torch.device) -> str:
    """What code is compiled for: 90a, 100a, .."""
    major, minor = capability(_index(device))
    return f"{major}{minor}a"


def load(source: str, defines: Mapping[str, int], arch: str, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of `source` (a file beside this one) under these preprocessor constants, from torch's cache or
    compiled now. Raises BuildError, and logs it once, when it does not compile."""
    path = Path(__file__).with_name(source)
    values = [*(str(v) for v in defines.values()), arch, *(f.strip("-").replace("=", "") for f in flags)]
    old = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join([old, str(Path(_ninja() or "ninja").parent)])
    try:
        built = cpp_extension.load(
            "_".join(["specq", path.stem, *values]),
            [str(path)],
            extra_cuda_cflags=[
                "-O3",
                f"-gencode=arch=compute_{arch},code=sm_{arch}",
                *(f"-D{k}={v}" for k, v in defines.items()),
                *flags,
            ],
            extra_include_paths=[str(path.parent)],
            is_python_module=False,
        )
    except Exception as error:  # no compiler, versions that do not fit, a full disk: all end in the Triton kernel
        if source not in _broken:
            _broken[source] = f"{source} did not compile ({str(error).strip().splitlines()[0]})"
            _log.warning("%s; Triton takes its place", _broken[source])
        raise BuildError(_broken[source]) from error
    finally:
        os.environ["PATH"] = old
    return ctypes.CDLL(built)
