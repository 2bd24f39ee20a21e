"""The attention function and mask that specq registers with transformers under the name "specq".

Any causal LM that goes through transformers' AttentionInterface runs on our cache without model code of ours: the cache
returns its layer as K and V, and the function below reads it: through the kernels where the layer lies in their pages
(`paged`), in torch otherwise. The mask arrives as transformers' own index function (causal, sliding window, chunked),
evaluated here on each row's true positions.
"""

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

from specq.errors import SpecqError
from specq.kv.cache import QuantizedLayer
from specq.kv.paged import PagedLayer

NAME = "specq"
# what transformers builds its masks from, by the code of the functions it returns
_SLIDING, _BOTH = sliding_window_overlay(1).__code__, and_masks(causal_mask_function, causal_mask_function).__code__


class LazyMask:
    """A mask that is built when attention knows each row's length; all layers of one kind and device share it in a forward
    pass."""

    def __init__(self, function: Callable, query_length: int) -> None:
        self.function, self.query_length = function, query_length
        self._built: dict[torch.device, torch.Tensor] = {}

    @property
    def window(self) -> int | None:
        """The window (0: none) where this is one of the kernels' own masks, causal or causal within a sliding window, by
        what transformers built it from; None for every other mask."""
        if self.function is causal_mask_function:
            return 0
        if self.function.__code__ is not _BOTH:
            return None
        parts = inspect.getclosurevars(self.function).nonlocals["mask_functions"]
        others = [f for f in parts if f is not causal_mask_function]
        if len(parts) != 2 or len(others) != 1 or others[0].__code__ is not _SLIDING:
            return None
        return inspect.getclosurevars(others[0]).nonlocals["sliding_window"]

    def build(self, layer: QuantizedLayer, device: torch.device) -> torch.Tensor | None:
        """Boolean `[B or 1, 1, query, slots]`, True where attention is allowed; None for a plain causal square."""
        state, new = layer.rows, self.query_length
        if self.function is causal_mask_function and state.longest == 0:
            return None
        if device not in self._built:
            lengths = state.lengths if state.uniform is None else state.lengths[:1]
            queries = (lengths[:, None] + torch.arange(new))[:, None, :, None].to(device)
            slots = torch.arange(state.longest + new, device=device)[None, None, None, :]
            rows = torch.arange(len(lengths), device=device)[:, None, None, None]
            allowed = self.function(rows, torch.zeros_like(rows), queries, slots)
            self._built[device] = allowed.expand(len(lengths), 1, new, state.longest + new)
        return self._built[device]


def mask(q_length: int, mask_function: Callable = causal_mask_function, **kwargs: object) -> LazyMask:
    """What transformers calls once per kind of layer and forward pass (AttentionMaskInterface)."""
    if kwargs.get("use_vmap"):
        raise SpecqError("this model builds its attention mask from token types, which specq cannot score yet")
    return LazyMask(mask_function, q_length)


def _scores(
    query: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor | None, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Masked scores `[B, kv_heads, group, query, slots]` in float32."""
    batch, heads, new, dim = query.shape
    grouped = query.view(batch, k.shape[1], heads // k.shape[1], new, dim)
    s = torch.einsum("bhgqd,bhkd->bhgqk", grouped.float(), k.float()) * scaling
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if allowed is None:
        allowed = torch.ones(new, k.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    return s.masked_fill(~allowed[:, :, None], float("-inf"))


def attend_in_pieces(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Attention written out: soft cap, sinks, and K/V cut into `splits` pieces merged by log-sum-exp.

    query `[B, heads, q, D]`, k and v `[B, kv_heads, n, D]` -> `[B, heads, q, D]`. Splitting changes the order of
    summation and nothing else, which is what the null arm is for.
    """
    s = _scores(query, k, allowed, scaling, softcap)
    out, total = 0.0, None
    for piece, values in zip(s.tensor_split(splits, -1), v.tensor_split(splits, -2), strict=True):
        if piece.shape[-1] == 0:
            continue
        lse = piece.logsumexp(-1, keepdim=True)
        part = torch.einsum("bhgqk,bhkd->bhgqd", (piece - lse).exp().nan_to_num(0.0), values.float())
        merged = lse if total is None else torch.logaddexp(total, lse)
        old = 0.0 if total is None else (total - merged).exp().nan_to_num(0.0)
        out, total = out * old + part * (lse - merged).exp().nan_to_num(0.0), merged
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[1], -1, 1, 1)
        out = out * (total - torch.logaddexp(total, sink)).exp()
    return out.reshape(query.shape[0], query.shape[1], query.shape[2], v.shape[3]).to(query.dtype)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: QuantizedLayer,
    value: QuantizedLayer,
    attention_mask: LazyMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [B, heads, q, D] over a quantized cache layer -> (`[B, q, heads, D]`, None)."""
    if not isinstance(key, QuantizedLayer) or not isinstance(attention_mask, LazyMask):
        raise SpecqError(f"{type(module).__name__} does not pass specq's cache and mask through to attention")
    query = key.round_query(query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = softcap if softcap is not None else getattr(module, "attn_logit_softcapping", None)
    if isinstance(key, PagedLayer) and (window := attention_mask.window) is not None:
        return key.attend(query, scaling, window, softcap, s_aux), None
    k, v = key.read(query.dtype)
    allowed = attention_mask.build(key, query.device)
    if softcap is not None or s_aux is not None or key.rows.splits > 1:
        out = attend_in_pieces(query, k, v, allowed, scaling, softcap, s_aux, key.rows.splits)
    else:
        grouped = query.shape[1] != k.shape[1]
        causal = allowed is None and query.shape[2] > 1
        out = F.scaled_dot_product_attention(
            query, k, v, attn_mask=allowed, scale=scaling, is_causal=causal, enable_gqa=grouped
        )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `attn_implementation="specq"` known to transformers. Safe to call twice."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
