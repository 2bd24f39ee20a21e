"""Fused Triton kernels for a quantized, paged KV cache, and their float32 references.

    store_kv           quantize K and V of new tokens and scatter them into pages, one launch
    verify_attention   a few query tokens per sequence over long pages, split over the sequence (decoding, verification)
    replay_attention   long query chunks over the same pages
    acceptance         log p, log q, alpha, ratio, KL, entropies from logits, without a softmax in memory
    draw               tokens drawn from logits by inverse CDF, likewise

Pages are `[pages, kv_heads, page_size, head_dim]`, scales `[pages, kv_heads, page_size]` in float32; `layout.PagedKV` holds
them. Everything runs in Triton's interpreter on a CPU (TRITON_INTERPRET=1, set before triton is imported).
"""

import importlib

from specq_kernels.layout import SPECS, FormatSpec, PagedKV

__all__ = ["SPECS", "FormatSpec", "PagedKV", "acceptance", "draw", "replay_attention", "store_kv", "verify_attention"]


_HOMES = {
    "store_kv": "store",
    "verify_attention": "attention",
    "replay_attention": "replay",
    "acceptance": "accept",
    "draw": "drawing",
}


def __getattr__(name: str) -> object:
    """Entry functions import triton when they are first asked for: the layout and references must not need it."""
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"specq_kernels.{_HOMES[name]}"), name)
