"""CUDA C++ kernels: built on first use by torch's extension loader, called through ctypes.

The Triton kernels do the same everywhere else: `why_not` says in a sentence why a device takes those.
"""

import ctypes
import functools
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils import cpp_extension


@functools.cache
def toolchain() -> str:
    """Why nothing can be built here, or an empty string."""
    if os.environ.get("SPECQ_NATIVE", "1") == "0":
        return "SPECQ_NATIVE=0 is set"
    if not cpp_extension.CUDA_HOME or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return "there is no nvcc"
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        return "there is no ninja"
    return ""


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(index)


def why_not(device: torch.device) -> str:
    """Why this device runs the Triton kernels instead; an empty string if it does not."""
    if device.type != "cuda":
        return "it needs a CUDA GPU"
    if capability(device.index or 0) < (9, 0):
        return "the GPU's compute capability is below 9.0"
    return toolchain()


def load(source: str, defines: Mapping[str, int], flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The shared library of `source` (a file beside this one) under these preprocessor constants, from torch's cache or
    compiled for the current device. Raises RuntimeError with the compiler's output."""
    major, minor = capability(torch.cuda.current_device())
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    path = Path(__file__).with_name(source)
    values = [*(str(v) for v in defines.values()), arch, *(f.strip("-").replace("=", "") for f in flags)]
    return ctypes.CDLL(
        cpp_extension.load(
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
    )
