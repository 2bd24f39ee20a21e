"""What a KV format is: how the K and V of a token are stored and how they are read back.

A format names a codec (how one scaled number becomes a code) and, for K and for V, the granularity of the scale:

    none         stored as is
    tensor       one static scale per layer
    channel      one static scale per KV head and channel
    token_head   one scale per token and KV head, computed at store time
    token_head_asym   scale and minimum per token and KV head

Tensors are `[batch, kv_heads, tokens, head_dim]`. Static scales broadcast against that shape. The stored value is
`code`, the value read back is `decode(code) * scale` (plus the minimum for the asymmetric kind).

Importing this module does not import torch, so that sizes and names of formats are at hand at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import torch

Granularity = Literal["none", "tensor", "channel", "token_head", "token_head_asym"]
STATIC: tuple[Granularity, ...] = ("tensor", "channel")


class Codec:
    """Rounds scaled values to codes (nearest even, saturating) and reads codes back."""

    code: str  # name of the codes' dtype in torch
    itemsize: int
    max: float

    @property
    def dtype(self) -> torch.dtype:
        """The codes' dtype."""
        import torch

        return getattr(torch, self.code)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of any shape -> codes of the same shape."""
        raise NotImplementedError(type(self).__name__)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """codes -> values in `dtype`, before the scale."""
        return codes.to(dtype)


class Bfloat16(Codec):
    """Brain float: rounds to nearest even, keeps float32's range."""

    code, itemsize = "bfloat16", 2
    max = 3.3895313892515355e38

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


class Float8(Codec):
    """e4m3fn (max 448) or e5m2 (max 57344). Values beyond the maximum, infinities too, saturate; NaN stays NaN.

    The clamp is explicit because the cast alone gives NaN in some PyTorch releases and saturates in others.
    """

    itemsize = 1

    def __init__(self, code: str, largest: float) -> None:
        self.code, self.max = code, largest

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().clamp(-self.max, self.max).to(self.dtype)


class Int8(Codec):
    """Symmetric: -127..127. int8 has no NaN, so NaN becomes 0 here; the cache counts such elements and the study stops."""

    code, itemsize = "int8", 1
    max = 127.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().round().clamp(-127, 127).nan_to_num(0.0).to(self.dtype)


class UInt8(Codec):
    """0..255, for the asymmetric format."""

    code, itemsize = "uint8", 1
    max = 255.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().round().clamp(0, 255).nan_to_num(0.0).to(self.dtype)


BF16, INT8, UINT8 = Bfloat16(), Int8(), UInt8()
E4M3, E5M2 = Float8("float8_e4m3fn", 448.0), Float8("float8_e5m2", 57344.0)


def nonzero_scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale of 0 (all-zero row, channel or tensor) becomes 1: zeros read back as zeros, never 0/0. NaN stays NaN."""
    return scale.masked_fill(scale == 0, 1.0)


def divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number, the same bits on every device: by a plain number, a GPU multiplies by the rounded reciprocal."""
    return x / x.new_full((), number).expand_as(x)


class KVFormat:
    """One way to store K and V. Subclasses live one per file and only fill in the class variables.

    `vllm` is the value of vLLM's `--kv-cache-dtype`, or None where vLLM has no such format.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    vllm: ClassVar[str | None] = None
    vllm_backend: ClassVar[str | None] = None
    summary: ClassVar[str]
    codec: ClassVar[Codec]
    k_granularity: ClassVar[Granularity]
    v_granularity: ClassVar[Granularity]
    rounds_query: ClassVar[bool] = False  # vLLM rounds the query to FP8 as well (its per-tensor e4m3 kernels)

    def granularity(self, part: str) -> Granularity:
        """Granularity of the scale of `part`, "k" or "v"."""
        return self.k_granularity if part == "k" else self.v_granularity

    @property
    def static_parts(self) -> tuple[str, ...]:
        """The parts, of "k" and "v", whose scale must be known before the first token is stored."""
        return tuple(part for part in ("k", "v") if self.granularity(part) in STATIC)

    @property
    def needs_calibration(self) -> bool:
        """Whether a scale of 1.0 would be meaningless (integer codes) and a calibrated one is required."""
        return bool(self.static_parts) and isinstance(self.codec, Int8)

    def bytes_per_token(self, kv_heads: int, head_dim: int) -> tuple[int, int]:
        """(bytes of codes, bytes of scales) that one token takes in one layer, K and V together."""
        scales = {"none": 0, "tensor": 0, "channel": 0, "token_head": 4, "token_head_asym": 8}
        codes = 2 * kv_heads * head_dim * self.codec.itemsize
        return codes, kv_heads * (scales[self.k_granularity] + scales[self.v_granularity])

    def store(self, x: torch.Tensor, part: str, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Encode `x` [B, H, T, D]; returns the tensors to keep, each [B, H, T, *].

        `scale` is the static scale, broadcastable to `x`; required exactly for static parts.
        """
        kind = self.granularity(part)
        if kind == "none":
            return (self.codec.encode(x),)
        x = x.float()
        if kind in STATIC:
            if scale is None:
                raise ValueError(f"{self.name} needs a static scale for {part}")
            return (self.codec.encode(x / scale),)
        if kind == "token_head":
            scale = nonzero_scale(divide(x.abs().amax(-1, keepdim=True), self.codec.max))
            return self.codec.encode(x / scale), scale
        low = x.amin(-1, keepdim=True)
        scale = nonzero_scale(divide(x.amax(-1, keepdim=True) - low, self.codec.max))
        return self.codec.encode((x - low) / scale), scale, low

    def load(
        self, stored: tuple[torch.Tensor, ...], part: str, scale: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Read back what `store` returned, as `dtype` [B, H, T, D]; scales are applied in float32."""
        import torch

        kind = self.granularity(part)
        if kind == "none":
            return self.codec.decode(stored[0], dtype)
        values = self.codec.decode(stored[0], torch.float32) * (scale if kind in STATIC else stored[1])
        if kind == "token_head_asym":
            values = values + stored[2]
        return values.to(dtype)

    def count_saturated(self, x: torch.Tensor, part: str, scale: torch.Tensor | None) -> torch.Tensor:
        """How many elements of `x` lie beyond what a static scale can represent (0-dim int64)."""
        import torch

        if self.granularity(part) not in STATIC:
            return x.new_zeros((), dtype=torch.int64)
        return ((x.float() / scale).abs() > self.codec.max).sum()
