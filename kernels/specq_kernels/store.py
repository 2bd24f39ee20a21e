"""Quantize K and V of new tokens and scatter them into pages, in one launch."""

import contextlib

import torch
import triton
import triton.language as tl

from specq_kernels import layout, native, store_cuda
from specq_kernels.codec import emulated, encode_raw
from specq_kernels.layout import SIZES, PagedKV, integers, on

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
NO_SCALE = tl.constexpr(layout.NO_SCALE)
TENSOR = tl.constexpr(layout.TENSOR)
CHANNEL = tl.constexpr(layout.CHANNEL)
TOKEN_HEAD = tl.constexpr(layout.TOKEN_HEAD)
TOKEN_HEAD_ASYM = tl.constexpr(layout.TOKEN_HEAD_ASYM)


@triton.jit
def _store_part(
    x_ptr, x_token, x_head, x_dim, pages, scales, lows, static, slot, token, head, heads, mask,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CODE: tl.constexpr, KIND: tl.constexpr, MAX: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Rows `token` x one `head`: load, scale, encode, scatter. Offsets are 64-bit."""
    d = tl.arange(0, BLOCK_D)
    inside = mask[:, None] & (d < D)[None, :]
    source = (
        x_ptr + token[:, None].to(tl.int64) * x_token + head.to(tl.int64) * x_head + d[None, :].to(tl.int64) * x_dim
    )
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    row = (slot // PAGE) * heads * PAGE + head * PAGE + slot % PAGE
    if KIND == TENSOR or KIND == CHANNEL:
        s = tl.load(static + head * D + d, mask=d < D, other=1.0)
        x = tl.math.div_rn(x, tl.broadcast_to(s[None, :], x.shape))
    elif KIND == TOKEN_HEAD:
        # padded lanes hold 0, which no maximum of magnitudes can notice; NaN must reach the scale
        amax = tl.reduce(tl.abs(x), 1, _max_nan)
        s = tl.math.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
        s = tl.where(s == 0.0, 1.0, s)
        tl.store(scales + row, s, mask=mask)
        x = tl.math.div_rn(x, tl.broadcast_to(s[:, None], x.shape))
    elif KIND == TOKEN_HEAD_ASYM:
        high = tl.reduce(tl.where(inside, x, float("-inf")), 1, _max_nan)
        low = -tl.reduce(tl.where(inside, -x, float("-inf")), 1, _max_nan)
        s = tl.math.div_rn(high - low, tl.full(high.shape, MAX, tl.float32))
        s = tl.where(s == 0.0, 1.0, s)
        tl.store(scales + row, s, mask=mask)
        tl.store(lows + row, low, mask=mask)
        x = tl.math.div_rn(x - low[:, None], tl.broadcast_to(s[:, None], x.shape))
    tl.store(pages + row[:, None] * D + d[None, :], encode_raw(x, CODE, BITS), mask=inside)


@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=SIZES)
def _store_kernel(
    k_ptr, v_ptr, k_token, k_head, k_dim, v_token, v_head, v_dim, slots,
    k_pages, v_pages, k_scales, v_scales, k_lows, v_lows, k_static, v_static, tokens, heads,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, CODE: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, MAX: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_T tokens of one KV head, K or V (third grid axis)."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    mask = slot >= 0
    slot = tl.where(mask, slot, 0)
    if tl.program_id(2) == 0:
        _store_part(
            k_ptr, k_token, k_head, k_dim, k_pages, k_scales, k_lows, k_static, slot, token, head, heads, mask,
            PAGE, D, BLOCK_D, CODE, K_KIND, MAX, BITS,
        )  # fmt: skip
    else:
        _store_part(
            v_ptr, v_token, v_head, v_dim, v_pages, v_scales, v_lows, v_static, slot, token, head, heads, mask,
            PAGE, D, BLOCK_D, CODE, V_KIND, MAX, BITS,
        )  # fmt: skip


def raw_view(pages: torch.Tensor) -> torch.Tensor:
    """Pages as the kernels address them: int16 for bf16, uint8 for every 8-bit format."""
    return pages.view(torch.int16 if pages.element_size() == 2 else torch.uint8)


def check_head_dim(head_dim: int) -> None:
    """Raises ValueError for a head_dim that no kernel supports."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} is not supported; supported are {', '.join(map(str, HEAD_DIMS))}")


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: PagedKV,
    slots: torch.Tensor,
    bits: bool | None = None,
) -> None:
    """Quantize `k` and `v` and write them into `cache`.

    Args:
        k, v: `[tokens, kv_heads, head_dim]`, bf16, fp16 or float32, any strides.
        slots: int64 `[tokens]`, page * page_size + position for each token; negative ones are skipped.
        bits: run the Triton kernel and encode by integer bits (True, see `codec.emulated`) or by the hardware's
            conversions (False). Default: the CUDA C++ kernel where it fits. All give the same codes.

    Raises ValueError for shapes that do not fit the cache or an unsupported head_dim.
    """
    tokens, heads, dim = k.shape
    check_head_dim(dim)
    if v.shape != k.shape or cache.k.shape[1] != heads or cache.k.shape[3] != dim:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit the cache's pages {tuple(cache.k.shape)}"
        )
    slots = integers(slots, (tokens,), k.device, torch.int64, "slots")
    if tokens == 0:
        return
    with on(k.device):
        if bits is None and store_cuda.takes(k, v, cache.spec):
            with contextlib.suppress(native.BuildError):
                return store_cuda.store(k, v, cache, slots)
        _launch(k, v, cache, slots, emulated(k.device) if bits is None else bits)


def _launch(k: torch.Tensor, v: torch.Tensor, cache: PagedKV, slots: torch.Tensor, bits: bool) -> None:
    tokens, heads, dim = k.shape
    spec, block_d = cache.spec, triton.next_power_of_2(dim)
    block_t = max(1, 2048 // block_d)
    _store_kernel[(triton.cdiv(tokens, block_t), heads, 2)](
        k, v, *k.stride(), *v.stride(), slots,
        raw_view(cache.k), raw_view(cache.v), cache.k_scale, cache.v_scale, cache.k_low, cache.v_low,
        cache.k_static, cache.v_static, tokens, heads,
        PAGE=cache.page_size, D=dim, BLOCK_D=block_d, BLOCK_T=block_t, CODE=spec.code,
        K_KIND=spec.k_scale, V_KIND=spec.v_scale, MAX=spec.max, BITS=bits, num_warps=4,
    )  # fmt: skip
