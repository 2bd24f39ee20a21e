"""The CUDA C++ store kernel (store.cu): 8-bit formats from bf16, for head_dim 64, 128 and 256."""

import ctypes
import functools

import torch

from specq_kernels import native
from specq_kernels.layout import FormatSpec, PagedKV

HEAD_DIMS = (64, 128, 256)


class Args(ctypes.Structure):
    """`Args` of store.cu, field for field."""

    _fields_ = [
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_void_p) for name in ("slots", "k_pages", "v_pages", "k_scale", "v_scale", "k_low", "v_low",
                                               "k_static", "v_static")),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
    ]  # fmt: skip


def takes(k: torch.Tensor, v: torch.Tensor, spec: FormatSpec) -> bool:
    """Whether the kernel can store these: bf16 in 16-byte runs, to an 8-bit format, on a GPU that builds it."""
    aligned = all(
        t.stride(2) == 1 and t.data_ptr() % 16 == 0 and not any(s % 8 for s in t.stride()[:2]) for t in (k, v)
    )
    wanted = k.dtype == v.dtype == torch.bfloat16 and spec.name != "bf16" and k.shape[2] in HEAD_DIMS
    return wanted and aligned and not native.why_not(k.device, "store.cu")


@functools.cache
def library(spec: FormatSpec, dim: int, page: int, arch: str) -> ctypes.CDLL:
    """The kernel for one format, head_dim, page size and architecture."""
    defines = {"CODE": spec.code, "K_KIND": spec.k_scale, "V_KIND": spec.v_scale, "D": dim, "PAGE": page}
    loaded = native.load("store.cu", defines, arch)
    loaded.launch.argtypes = [ctypes.POINTER(Args), ctypes.c_void_p]
    return loaded


def store(k: torch.Tensor, v: torch.Tensor, cache: PagedKV, slots: torch.Tensor) -> None:
    """Arguments as in `store.store_kv`, for what `takes` takes; launches on the current stream."""
    args = Args(
        k.data_ptr(), v.data_ptr(), *k.stride()[:2], *v.stride()[:2], slots.data_ptr(), cache.k.data_ptr(),
        cache.v.data_ptr(), cache.k_scale.data_ptr(), cache.v_scale.data_ptr(), cache.k_low.data_ptr(),
        cache.v_low.data_ptr(), cache.k_static.data_ptr(), cache.v_static.data_ptr(), k.shape[0], k.shape[1],
    )  # fmt: skip
    kernel = library(cache.spec, k.shape[2], cache.page_size, native.architecture(k.device))
    error = kernel.launch(ctypes.byref(args), torch.cuda.current_stream(k.device).cuda_stream)
    if error:
        raise RuntimeError(f"the store kernel could not be launched: CUDA error {error}")
