"""Number codecs inside kernels: rounding to nearest even and saturation, in hardware or by integer bits.

Triton's interpreter truncates float32 to bf16, neither saturates nor rounds to even for e4m3, and truncates to int8. With
BITS the codes are built from the float's bits instead; the GPU tests show both ways to be bit-equal.
"""

import os

import torch
import triton
import triton.language as tl

from specq_kernels import layout

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def emulated(device: torch.device) -> bool:
    """Whether codes are built and read by integer bits on this device: in the interpreter, and on GPUs older than compute
    capability 8.9, which do not know e4m3. The numbers are the same."""
    if INTERPRETED or device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) < (8, 9)


BF16 = tl.constexpr(layout.BF16)
E4M3 = tl.constexpr(layout.E4M3)
E5M2 = tl.constexpr(layout.E5M2)
INT8 = tl.constexpr(layout.INT8)
UINT8 = tl.constexpr(layout.UINT8)


@triton.jit
def _round_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN: tl.constexpr):
    """float32 -> code of a small float: sign, exponent with BIAS, MANTISSA bits; saturates at MAX. uint8 result."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    magnitude = tl.minimum(tl.abs(tl.where(nan, 0.0, x)), MAX)
    m = magnitude.to(tl.uint32, bitcast=True)
    shift: tl.constexpr = 23 - MANTISSA
    rounded = m + ((1 << (shift - 1)) - 1) + ((m >> shift) & 1)
    normal = (rounded >> shift) - ((127 - BIAS) << MANTISSA)
    # adding a power of two whose unit in the last place is the smallest subnormal rounds to nearest even
    MAGIC: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
    shifted = (magnitude + MAGIC).to(tl.uint32, bitcast=True)
    MAGIC_BITS: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    subnormal = shifted - MAGIC_BITS
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS)
    code = tl.where(magnitude < SMALLEST, subnormal, normal)
    return (tl.where(nan, NAN, code) | sign).to(tl.uint8)


@triton.jit
def _round_integer(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """float32 -> nearest integer, ties to even, clamped; NaN gives 0. int32 result."""
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, LOW), HIGH)
    shifted = x + 12582912.0  # 1.5 * 2^23: its unit in the last place is 1
    return shifted.to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode_raw(x, CODE: tl.constexpr, BITS: tl.constexpr):
    """float32 -> raw storage (int16 for bf16, uint8 otherwise)."""
    if CODE == BF16:
        if BITS:
            b = x.to(tl.uint32, bitcast=True)
            nan = (b & 0x7FFFFFFF) > 0x7F800000
            r = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
            return tl.where(nan, 0x7FC0, r).to(tl.uint16).to(tl.int16, bitcast=True)
        else:
            return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif CODE == E4M3:
        if BITS:
            return _round_float(x, 3, 7, 448.0, 0x7F)
        else:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the hardware's conversion saturates
    elif CODE == E5M2:
        if BITS:
            return _round_float(x, 2, 15, 57344.0, 0x7F)
        else:
            return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif CODE == INT8:
        return (_round_integer(x, -127.0, 127.0) & 0xFF).to(tl.uint8)
    else:
        return _round_integer(x, 0.0, 255.0).to(tl.uint8)


@triton.jit
def decode(raw, CODE: tl.constexpr, TYPE: tl.constexpr, BITS: tl.constexpr):
    """Raw storage -> values in TYPE, exactly; the scale is applied by the caller."""
    if CODE == BF16:
        return raw.to(tl.bfloat16, bitcast=True).to(TYPE)
    elif CODE == E4M3:
        if BITS:
            # sign, exponent and mantissa as fp16's, whose exponent bias is 8 larger
            x = raw.to(tl.uint16)
            half = ((x & 0x80) << 8 | (x & 0x7F) << 7).to(tl.float16, bitcast=True)
            return tl.where((x & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0).to(TYPE)
        else:
            return raw.to(tl.float8e4nv, bitcast=True).to(TYPE)
    elif CODE == E5M2:
        if BITS:
            return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(TYPE)
        else:
            return raw.to(tl.float8e5, bitcast=True).to(TYPE)
    elif CODE == INT8:
        return raw.to(tl.int8, bitcast=True).to(TYPE)
    else:
        return raw.to(TYPE)
