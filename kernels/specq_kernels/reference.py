"""Float32 references of every kernel, in plain torch. Slow, obvious, and what the kernels are tested against."""

import torch

from specq_kernels.layout import CHANNEL, NO_SCALE, TENSOR, TOKEN_HEAD_ASYM, FormatSpec, PagedKV


def encode(x: torch.Tensor, spec: FormatSpec) -> torch.Tensor:
    """Scaled float32 values -> codes: nearest even, saturating; NaN stays NaN in floats and becomes 0 in integers."""
    if spec.max == 0.0:
        return x.to(spec.dtype)
    if spec.dtype.is_floating_point:
        return x.clamp(-spec.max, spec.max).to(spec.dtype)
    low = 0.0 if spec.dtype == torch.uint8 else -spec.max
    return x.round().clamp(low, spec.max).nan_to_num(0.0).to(spec.dtype)


def quantize(
    x: torch.Tensor, spec: FormatSpec, kind: int, static: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """x `[tokens, kv_heads, head_dim]` -> (codes, scale [tokens, kv_heads] or None, row minimum or None)."""
    x = x.float()
    if kind == NO_SCALE:
        return encode(x, spec), None, None
    if kind in (TENSOR, CHANNEL):
        return encode(x / static, spec), None, None
    low = x.amin(-1) if kind == TOKEN_HEAD_ASYM else None
    span = x.amax(-1) - low if kind == TOKEN_HEAD_ASYM else x.abs().amax(-1)
    # by a tensor: dividing by a number multiplies by its reciprocal on a GPU, which rounds differently
    scale = span / torch.full_like(span, spec.max)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    shifted = x - low[..., None] if low is not None else x
    return encode(shifted / scale[..., None], spec), scale, low


def store_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKV, slots: torch.Tensor) -> None:
    """Reference of `store.store_kv`."""
    live = slots >= 0
    page, at = slots[live] // cache.page_size, slots[live] % cache.page_size
    for x, kind, static, pages, scales, lows in (
        (k, cache.spec.k_scale, cache.k_static, cache.k, cache.k_scale, cache.k_low),
        (v, cache.spec.v_scale, cache.v_static, cache.v, cache.v_scale, cache.v_low),
    ):
        codes, scale, low = quantize(x[live], cache.spec, kind, static)
        pages.view(torch.int8 if pages.element_size() == 1 else torch.int16)[page, :, at] = codes.view(
            torch.int8 if codes.element_size() == 1 else torch.int16
        )
        if scale is not None:
            scales[page, :, at] = scale
        if low is not None:
            lows[page, :, at] = low


def dequantize(cache: PagedKV, part: str) -> torch.Tensor:
    """All pages read back, float32 `[pages, kv_heads, page_size, head_dim]`."""
    pages, kind = getattr(cache, part), getattr(cache.spec, f"{part}_scale")
    x = pages.float()
    if kind in (TENSOR, CHANNEL):
        return x * getattr(cache, f"{part}_static")[:, None, :]
    if kind == NO_SCALE:
        return x
    x = x * getattr(cache, f"{part}_scale")[..., None]
    return x + getattr(cache, f"{part}_low")[..., None] if kind == TOKEN_HEAD_ASYM else x


def attention(
    query: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `attention.verify_attention` and `attention.replay_attention`, float32 `[batch, queries, heads, D]`."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    k_all, v_all = dequantize(cache, "k"), dequantize(cache, "v")
    group = query.shape[2] // k_all.shape[1]
    for b in range(query.shape[0]):
        n, new = int(context_lens[b]), int(query_lens[b])
        if new == 0:
            continue
        used = block_table[b, : -(-n // cache.page_size)].long()
        k, v = (t[used].transpose(0, 1).flatten(1, 2)[:, :n].repeat_interleave(group, 0) for t in (k_all, v_all))
        q = query[b, :new].float().transpose(0, 1)
        s = q @ k.transpose(1, 2) * scale
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        at = torch.arange(n - new, n, device=query.device)[:, None]
        slot = torch.arange(n, device=query.device)[None, :]
        seen = slot <= at
        if window > 0:
            seen &= slot > at - window
        s = s.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            s = torch.cat([s, sinks.float().view(-1, 1, 1).expand(-1, new, 1)], -1).softmax(-1)[..., :-1]
        else:
            s = s.softmax(-1)
        out[b, :new] = (s @ v).transpose(0, 1)
    return out


def acceptance(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    drafted: torch.Tensor | None = None,
    size: int | None = None,
    draft_temperature: float | None = None,
) -> dict[str, torch.Tensor]:
    """Reference of `accept.acceptance` in float64: its columns by name."""
    size = target_logits.shape[2] if size is None else min(size, target_logits.shape[2])

    def log_probs(logits: torch.Tensor, t: float) -> torch.Tensor:
        x = logits.double()[..., :size]
        x = torch.nn.functional.pad(x, (0, size - x.shape[-1]), value=float("-inf"))
        if t == 0:
            return torch.full_like(x, float("-inf")).scatter_(-1, x.argmax(-1, keepdim=True), 0.0)
        return (x / t).log_softmax(-1)

    lp = log_probs(target_logits, temperature)
    lq = log_probs(draft_logits, temperature if draft_temperature is None else draft_temperature).expand_as(lp)
    p, q, base = lp.exp(), lq.exp(), lp[:1].exp()

    def pick(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x.gather(-1, ids.expand(x.shape[:2])[..., None])[..., 0]

    zero = torch.zeros_like(p)
    out = {
        "logp": pick(lp, tokens[None]),
        "logq": pick(lq, tokens[None]),
        "alpha": torch.minimum(p, q).sum(-1),
        "alpha_greedy": pick(p, lq.argmax(-1)),
        "alpha_strict": (p * q).sum(-1),
        "kl": torch.where(base > 0, base * (lp[:1] - lp), zero).sum(-1),
        "entropy": -torch.where(p > 0, p * lp, zero).sum(-1),
        "draft_entropy": -torch.where(q > 0, q * lq, zero).sum(-1),
        "top1": lp.argmax(-1),
        "draft_top1": lq.argmax(-1),
        "top1_agrees": lp.argmax(-1) == lp[:1].argmax(-1),
    }
    if drafted is not None:
        out["ratio"] = (pick(lp, drafted[None]) - pick(lq, drafted[None])).clamp(max=0.0).exp()
    return out
