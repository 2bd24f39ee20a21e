"""Tokens drawn from logits by inverse CDF, without a softmax in memory.

One walk: every block of logits keeps its own maximum and sum, so that the block which the uniform number falls into is
known at the end; that block alone is read again.
"""

import torch
import triton
import triton.language as tl

from specq_kernels.layout import integers, on

FAR = tl.constexpr(2147483647)


@triton.jit
def _block(row, at, width, size):
    v = at + tl.arange(0, 4096)
    return tl.load(row + v, mask=v < tl.minimum(width, size), other=float("-inf")).to(tl.float32), v


@triton.jit(do_not_specialize=["size", "width"])
def _draw_kernel(logits, stride, uniforms, out, size, width, factor, BLOCKS: tl.constexpr):
    """One program: one row. Sums are relative to their block's maximum, and rescaled to the largest of these."""
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * stride
    i = tl.arange(0, BLOCKS)
    highs = tl.full([BLOCKS], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCKS], tl.float32)
    for b in range(0, tl.cdiv(size, 4096)):
        x, v = _block(row, b * 4096, width, size)
        high = tl.max(x, 0)
        total = tl.sum(tl.exp2((x - tl.where(high == float("-inf"), 0.0, high)) * factor), 0)
        highs = tl.where(i == b, high, highs)
        sums = tl.where(i == b, total, sums)
    top = tl.max(highs, 0)
    share = tl.exp2((highs - top) * factor)
    weights = tl.where(highs == float("-inf"), 0.0, sums * share)
    cdf = tl.cumsum(weights, 0)
    target = tl.load(uniforms + n) * tl.max(cdf, 0)
    # A parallel sum need not rise: a block without probability is never taken. A uniform that rounds to 1 falls into the last
    # block that has any.
    block = tl.min(tl.where((cdf > target) & (weights > 0.0), i, FAR), 0)
    block = tl.minimum(block, tl.max(tl.where(weights > 0.0, i, 0), 0))
    before = tl.sum(tl.where(i == block - 1, cdf, 0.0), 0)
    high = tl.max(tl.where(i == block, highs, float("-inf")), 0)
    rest = (target - before) / tl.exp2((high - top) * factor)
    x, v = _block(row, block * 4096, width, size)
    e = tl.exp2((x - high) * factor)
    id = tl.min(tl.where((tl.cumsum(e, 0) > rest) & (e > 0.0), v, FAR), 0)
    tl.store(out + n, tl.minimum(id, tl.max(tl.where(e > 0.0, v, 0), 0)).to(tl.int64))


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float = 1.0, size: int | None = None
) -> torch.Tensor:
    """Ids `[rows]` int64 with softmax(logits / temperature) at or below `size` reaching the uniforms.

    Args:
        logits: `[rows, width]`, bf16, fp16 or float32, contiguous over the vocabulary; -inf is never drawn.
        uniforms: float `[rows]` in [0, 1). Equal rows and uniforms give equal ids.
        size: ids that count; default all, at most 1,048,576.

    The cumulative sum is float32: an id's boundaries are right to about 1e-6. Raises ValueError for shapes that do not fit
    or a temperature that is not positive.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} must be [rows, width], contiguous over the vocabulary")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not positive; the draw is the argmax then")
    rows, width = logits.shape
    size = width if size is None else size
    if not 1 <= size <= 1 << 20:
        raise ValueError(f"{size} ids; 1 to 1,048,576 can be drawn from")
    uniforms = integers(uniforms, (rows,), logits.device, torch.float32, "uniforms")
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        blocks = triton.next_power_of_2(triton.cdiv(size, 4096))
        factor = 1.4426950408889634 / temperature
        with on(logits.device):
            _draw_kernel[(rows,)](
                logits, logits.stride(0), uniforms, out, size, width, factor, BLOCKS=blocks, num_warps=8
            )
    return out
