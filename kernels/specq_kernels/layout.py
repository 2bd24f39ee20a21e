"""The paged cache: what is stored where. Pure torch; both the kernels and their references use it.

Pages keep one KV head's tokens together (`[pages, kv_heads, page_size, head_dim]`), so that a program reading one head
of a page reads page_size * head_dim contiguous elements.
"""

import contextlib
from dataclasses import dataclass, field

import torch

BF16, E4M3, E5M2, INT8, UINT8 = range(5)
NO_SCALE, TENSOR, CHANNEL, TOKEN_HEAD, TOKEN_HEAD_ASYM = range(5)

DTYPES = {
    BF16: torch.bfloat16,
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    INT8: torch.int8,
    UINT8: torch.uint8,
}
MAXIMA = {BF16: 0.0, E4M3: 448.0, E5M2: 57344.0, INT8: 127.0, UINT8: 255.0}


@dataclass(frozen=True)
class FormatSpec:
    """A KV format: its code, and the granularity of the scales of K and of V."""

    name: str
    code: int
    k_scale: int
    v_scale: int

    @property
    def dtype(self) -> torch.dtype:
        """Storage dtype."""
        return DTYPES[self.code]

    @property
    def max(self) -> float:
        """Largest magnitude of a code (255 for the asymmetric format)."""
        return MAXIMA[self.code]


SPECS: dict[str, FormatSpec] = {
    s.name: s
    for s in (
        FormatSpec("bf16", BF16, NO_SCALE, NO_SCALE),
        FormatSpec("fp8_e4m3", E4M3, TENSOR, TENSOR),
        FormatSpec("fp8_e5m2", E5M2, TENSOR, TENSOR),
        FormatSpec("fp8_per_token_head", E4M3, TOKEN_HEAD, TOKEN_HEAD),
        FormatSpec("int8_per_token_head", INT8, TOKEN_HEAD, TOKEN_HEAD),
        FormatSpec("int8_per_token_asym", UINT8, TOKEN_HEAD_ASYM, TOKEN_HEAD_ASYM),
        FormatSpec("int8_per_channel", INT8, CHANNEL, CHANNEL),
        FormatSpec("int8_per_tensor", INT8, TENSOR, TENSOR),
        FormatSpec("int8_k_channel_v_token", INT8, CHANNEL, TOKEN_HEAD),
    )
}

# Arguments of kernels that differ from call to call with batch and length: Triton is told not to compile anew where one of
# them happens to be 1 or a multiple of 16.
SIZES = (
    "table_row", "rows_total", "max_queries", "heads", "kv_heads", "window", "chunk_tokens", "spans", "span_tokens", "pairs",
    "length", "tokens", "rows",
)  # fmt: skip


def integers(
    t: torch.Tensor, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, name: str
) -> torch.Tensor:
    """`t` as the kernels read it: contiguous, of `dtype`. Raises ValueError for another shape (-1: any) or device."""
    fits = len(t.shape) == len(shape) and all(n in (-1, m) for n, m in zip(shape, t.shape, strict=True))
    if not fits or t.device != device:
        wanted = " x ".join("any" if n == -1 else str(n) for n in shape)
        raise ValueError(f"{name} of shape {tuple(t.shape)} on {t.device} must be {wanted} on {device}")
    return t.to(dtype).contiguous()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels are launched on the current device: makes it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass
class PagedKV:
    """Pages of one layer.

    k, v: `[pages, kv_heads, page_size, head_dim]` in the format's dtype.
    k_scale, v_scale: float32 `[pages, kv_heads, page_size]` per token and head (zero elements otherwise).
    k_low, v_low: float32, likewise, the row minima of the asymmetric format.
    k_static, v_static: float32, `[kv_heads, head_dim]`, static scales (per tensor and per head
        are broadcast to it, and must not differ along head_dim).
    """

    spec: FormatSpec
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_low: torch.Tensor
    v_low: torch.Tensor
    k_static: torch.Tensor = field(repr=False)
    v_static: torch.Tensor = field(repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for tensors with gaps: kernels address them by their shapes."""
        for name in ("k", "v", "k_scale", "v_scale", "k_low", "v_low", "k_static", "v_static"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} of a PagedKV must be contiguous")

    @classmethod
    def allocate(
        cls,
        name: str,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        k_static: torch.Tensor | float = 1.0,
        v_static: torch.Tensor | float = 1.0,
    ) -> "PagedKV":
        """Empty pages of format `name`. Static scales broadcast to [kv_heads, head_dim] (a number, per head [H, 1], ...).

        Raises ValueError for an unknown format or a page size that is no multiple of 16.
        """
        if name not in SPECS:
            raise ValueError(f"unknown KV format {name!r}; known are {', '.join(SPECS)}")
        if page_size % 16 or page_size < 16:
            raise ValueError(f"page_size {page_size} is not a multiple of 16")
        spec = SPECS[name]
        shape = (pages, kv_heads, page_size)

        def scales(kind: int, wanted: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape if kind in wanted else (0,), dtype=torch.float32, device=device)

        def static(value: torch.Tensor | float) -> torch.Tensor:
            t = torch.as_tensor(value, dtype=torch.float32, device=device)
            return t.expand(kv_heads, head_dim).contiguous()

        rows, low = (TOKEN_HEAD, TOKEN_HEAD_ASYM), (TOKEN_HEAD_ASYM,)
        return cls(
            spec,
            torch.zeros((*shape, head_dim), dtype=spec.dtype, device=device),
            torch.zeros((*shape, head_dim), dtype=spec.dtype, device=device),
            scales(spec.k_scale, rows),
            scales(spec.v_scale, rows),
            scales(spec.k_scale, low),
            scales(spec.v_scale, low),
            static(k_static),
            static(v_static),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of pages and per-token scales."""
        tensors = (self.k, self.v, self.k_scale, self.v_scale, self.k_low, self.v_low)
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[2]
