"""Attention of long query chunks over the same pages (scoring a text), at matrix speed.

The pages of a row are read once into contiguous fp16 (bf16 for BF16 pages), scales applied relative to a power of two per
KV head, and a dense causal kernel runs over that. Against hundreds of queries that copy is a few percent of the time, and
it makes the dense kernel the same for every format. The rounding of a scaled code to fp16 is at most 2^-11.
"""

import torch
import triton
import triton.language as tl

from specq_kernels.attention import LOG2E, cap, check_rows, check_shapes, positive_scale, power_of_two_above
from specq_kernels.codec import BF16, INTERPRETED, decode, emulated
from specq_kernels.layout import SIZES, PagedKV, on
from specq_kernels.store import CHANNEL, TENSOR, TOKEN_HEAD, TOKEN_HEAD_ASYM, raw_view

HEADROOM = tl.constexpr(2.0**-14)  # values stay below 2^14 of their unit: room above and 2^28 below in fp16


@triton.jit
def _largest(
    scales, lows, static, table_at, context, kv_head, kv_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    """An upper bound of the magnitudes of one row and KV head."""
    if KIND == TENSOR or KIND == CHANNEL:
        d = tl.arange(0, BLOCK_D)
        return MAX * tl.max(tl.load(static + kv_head * D + d, mask=d < D, other=0.0), 0)
    best = tl.zeros([BLOCK_N], tl.float32)
    for n0 in range(0, context, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        ok = n < context
        page = tl.load(table_at + n // PAGE, mask=ok, other=0).to(tl.int64)
        slot = (page * kv_heads + kv_head) * PAGE + n % PAGE
        s = tl.load(scales + slot, mask=ok, other=0.0) * MAX
        if KIND == TOKEN_HEAD_ASYM:
            low = tl.load(lows + slot, mask=ok, other=0.0)
            s = tl.maximum(tl.abs(low), tl.abs(low + s))
        best = tl.maximum(best, s)
    return tl.max(best, 0)


@triton.jit(do_not_specialize=SIZES)
def _unit_kernel(
    k_scales, v_scales, k_lows, v_lows, k_static, v_static, table, table_row, context_lens, units, pairs, kv_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, K_KIND: tl.constexpr,
    V_KIND: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """One program: the units of K and V of one row and KV head."""
    pair = tl.program_id(0)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    context = tl.load(context_lens + batch)
    at = table + batch * table_row
    if tl.program_id(1) == 0:
        x = _largest(k_scales, k_lows, k_static, at, context, kv_head, kv_heads, D, BLOCK_D, BLOCK_N, PAGE, K_KIND, MAX)
    else:
        x = _largest(v_scales, v_lows, v_static, at, context, kv_head, kv_heads, D, BLOCK_D, BLOCK_N, PAGE, V_KIND, MAX)
    x = tl.where(x > 0.0, x, 1.0)
    tl.store(units + tl.program_id(1) * pairs + pair, power_of_two_above(x) * HEADROOM)


@triton.jit
def _unpack_part(
    pages, scales, lows, static, slot, ok, unit, out, kv_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, CODE: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    inside = ok[:, None] & (d < D)[None, :]
    raw = tl.load(pages + slot[:, None] * D + d[None, :], mask=inside, other=0)
    if CODE == BF16:
        return decode(raw, CODE, TYPE, BITS)
    x = decode(raw, CODE, tl.float32, BITS)
    if KIND == TENSOR or KIND == CHANNEL:
        x = x * (tl.load(static + kv_head * D + d, mask=d < D, other=0.0) / unit)[None, :]
    if KIND == TOKEN_HEAD or KIND == TOKEN_HEAD_ASYM:
        x = x * (tl.load(scales + slot, mask=ok, other=0.0) / unit)[:, None]
    if KIND == TOKEN_HEAD_ASYM:
        x = x + (tl.load(lows + slot, mask=ok, other=0.0) / unit)[:, None]
    return tl.where(inside, x, 0.0).to(TYPE)


@triton.jit(do_not_specialize=SIZES)
def _unpack_kernel(
    k_pages, v_pages, k_scales, v_scales, k_lows, v_lows, k_static, v_static, table, table_row, context_lens, units,
    k_out, v_out, pairs, kv_heads, length,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, CODE: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, TYPE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N tokens of one row and KV head, K or V; tokens beyond the row's context become 0."""
    pair = tl.program_id(1)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    context = tl.load(context_lens + batch)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = n < context
    page = tl.load(table + batch * table_row + n // PAGE, mask=ok, other=0).to(tl.int64)
    slot = (page * kv_heads + kv_head) * PAGE + n % PAGE
    d = tl.arange(0, BLOCK_D)
    place = (pair.to(tl.int64) * length + n)[:, None] * BLOCK_D + d[None, :]
    if tl.program_id(2) == 0:
        unit = tl.load(units + pair) if CODE != BF16 else 1.0
        x = _unpack_part(
            k_pages, k_scales, k_lows, k_static, slot, ok, unit, k_out, kv_head, D, BLOCK_D, CODE, K_KIND, TYPE, BITS
        )
        tl.store(k_out + place, x, mask=(n < length)[:, None])
    else:
        unit = tl.load(units + pairs + pair) if CODE != BF16 else 1.0
        x = _unpack_part(
            v_pages, v_scales, v_lows, v_static, slot, ok, unit, v_out, kv_head, D, BLOCK_D, CODE, V_KIND, TYPE, BITS
        )
        tl.store(v_out + place, x, mask=(n < length)[:, None])


@triton.jit
def _walk(
    acc, m, total, q, unit, k_desc, v_desc, base, start, stop, at, window, softcap,
    BLOCK_N: tl.constexpr, TYPE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens [start, stop); scores times `unit` are logits in base 2 (natural under a soft cap)."""
    for n0 in range(start, stop, BLOCK_N):
        k = k_desc.load([base + n0, 0])
        s = tl.dot(q, tl.trans(k))
        if CAPPED:
            s = cap(s * unit[:, None], softcap) * LOG2E
        if MASKED:
            n = n0 + tl.arange(0, BLOCK_N)
            seen = n[None, :] <= at[:, None]
            if WINDOW:
                seen = seen & (n[None, :] > at[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
        if CAPPED:
            m_new = tl.maximum(m, tl.max(s, 1))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - safe[:, None])
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * unit)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * unit[:, None] - safe[:, None])
        alpha = tl.exp2(m - safe)
        total = total * alpha + tl.sum(p, 1)
        m = m_new
        acc = acc * alpha[:, None]
        v = v_desc.load([base + n0, 0])
        acc = tl.dot(p.to(TYPE), v, acc)
    return acc, m, total


@triton.jit(do_not_specialize=SIZES)
def _dense_kernel(
    q_ptr, q_batch, q_token, q_head, k_ptr, v_ptr, units, context_lens, query_lens, sinks, out_ptr, pairs, max_queries,
    heads, kv_heads, length, scale, window, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr, HAS_SINKS: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head; the longest rows first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    pair = batch * kv_heads + head // GROUP
    context = tl.load(context_lens + batch)
    queries = tl.load(query_lens + batch)
    first = tile * BLOCK_M
    if first < queries:
        r = first + tl.arange(0, BLOCK_M)
        live = r < queries
        d = tl.arange(0, BLOCK_D)
        q_at = q_ptr + batch.to(tl.int64) * q_batch + r[:, None].to(tl.int64) * q_token + head.to(tl.int64) * q_head
        q = tl.load(q_at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        unit = tl.full([BLOCK_M], scale, tl.float32)
        if SCALED:
            q = q.to(tl.float32)
            amax = tl.max(tl.abs(q), 1)
            amax = tl.where(amax == 0.0, 1.0, amax)
            q = q / amax[:, None]
            unit = unit * amax * tl.load(units + pair)
        if not CAPPED:
            unit = unit * LOG2E
        q = q.to(TYPE)
        at = context - queries + r
        # tokens that every row of the tile sees lie in [full, diagonal)
        diagonal = ((context - queries + first + 1) // BLOCK_N) * BLOCK_N
        stop = tl.minimum(context, context - queries + first + BLOCK_M)
        start = 0
        full = 0
        if WINDOW:
            start = tl.maximum(context - queries + first - window + 1, 0) // BLOCK_N * BLOCK_N
            full = tl.cdiv(tl.maximum(context - queries + first + BLOCK_M - window, 0), BLOCK_N) * BLOCK_N
            full = tl.minimum(full, diagonal)
            full = tl.maximum(full, start)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        tokens = pairs * length
        k_desc = tl.make_tensor_descriptor(k_ptr, [tokens, BLOCK_D], [BLOCK_D, 1], [BLOCK_N, BLOCK_D])
        v_desc = tl.make_tensor_descriptor(v_ptr, [tokens, BLOCK_D], [BLOCK_D, 1], [BLOCK_N, BLOCK_D])
        base = pair * length
        if WINDOW:
            acc, m, total = _walk(
                acc, m, total, q, unit, k_desc, v_desc, base, start, full, at, window, softcap,
                BLOCK_N, TYPE, True, WINDOW, CAPPED,
            )  # fmt: skip
        acc, m, total = _walk(
                acc, m, total, q, unit, k_desc, v_desc, base, full, diagonal, at, window, softcap,
                BLOCK_N, TYPE, False, WINDOW, CAPPED,
            )  # fmt: skip
        acc, m, total = _walk(
                acc, m, total, q, unit, k_desc, v_desc, base, tl.maximum(diagonal, start), stop, at, window, softcap,
                BLOCK_N, TYPE, True, WINDOW, CAPPED,
            )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            total = total + tl.exp2(sink - tl.where(m == float("-inf"), 0.0, m))
        if SCALED:
            acc = acc * tl.load(units + pairs + pair)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # NaN stays NaN
        place = (batch * max_queries + r).to(tl.int64) * heads + head
        tl.store(out_ptr + place[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])


def _descriptor_memory(size: int, align: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cpu" if INTERPRETED else "cuda")


def unpack(
    cache: PagedKV, block_table: torch.Tensor, context_lens: torch.Tensor, max_context: int, block_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of every row, contiguous: K and V `[batch, kv_heads, length, padded head_dim]` in fp16 (BF16 pages: bf16) and
    their units `[2, batch, kv_heads]`; values are these times the unit. `length` is max_context rounded up to block_n."""
    batch, kv_heads, dim, spec = len(context_lens), cache.k.shape[1], cache.k.shape[3], cache.spec
    block_d, length, pairs = triton.next_power_of_2(dim), triton.cdiv(max_context, block_n) * block_n, batch * kv_heads
    kind, dtype = (tl.bfloat16, torch.bfloat16) if spec.name == "bf16" else (tl.float16, torch.float16)
    if INTERPRETED:
        kind, dtype = tl.float32, torch.float32
    k, v = (torch.empty(batch, kv_heads, length, block_d, dtype=dtype, device=cache.k.device) for _ in range(2))
    units = torch.empty(2, batch, kv_heads, dtype=torch.float32, device=cache.k.device)
    scales = (cache.k_scale, cache.v_scale, cache.k_low, cache.v_low, cache.k_static, cache.v_static)
    shape = {"D": dim, "BLOCK_D": block_d, "PAGE": cache.page_size, "K_KIND": spec.k_scale, "V_KIND": spec.v_scale}
    if spec.name != "bf16":
        _unit_kernel[(pairs, 2)](
            *scales, block_table, block_table.stride(0), context_lens, units, pairs, kv_heads, **shape,
            BLOCK_N=1024, MAX=spec.max, num_warps=8,
        )  # fmt: skip
    _unpack_kernel[(length // block_n, pairs, 2)](
        raw_view(cache.k), raw_view(cache.v), *scales, block_table, block_table.stride(0), context_lens, units,
        k, v, pairs, kv_heads, length, **shape, BLOCK_N=block_n, CODE=spec.code, TYPE=kind,
        BITS=emulated(cache.k.device), num_warps=4,
    )  # fmt: skip
    return k, v, units


def replay_attention(
    query: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_lens: torch.Tensor,
    max_context: int,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tuning: dict | None = None,
) -> torch.Tensor:
    """Causal attention of long query chunks over paged K and V; arguments as in `attention.verify_attention`, queries
    unlimited. Needs room for one unpacked copy of the rows' K and V of this layer, 2 bytes an element."""
    group = check_shapes(query, cache)
    batch, max_queries, _, dim = query.shape
    block_d = triton.next_power_of_2(dim)
    # fastest of a sweep on an H200 at head_dim 128
    chosen = {"block_m": 64, "block_n": 64, "warps": 4, "stages": 2 if block_d > 128 else 3} | (tuning or {})
    table, contexts, counts, sinks = check_rows(query, cache, block_table, context_lens, query_lens, max_context, sinks)
    if batch == 0 or max_context == 0 or max_queries == 0:
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    with on(query.device):
        return _replay(
            query,
            cache,
            table,
            contexts,
            counts,
            max_context,
            positive_scale(scale, dim),
            window,
            softcap,
            sinks,
            group,
            chosen,
        )


def _replay(
    query: torch.Tensor, cache: PagedKV, table: torch.Tensor, contexts: torch.Tensor, counts: torch.Tensor, max_context: int,
    scale: float, window: int, softcap: float, sinks: torch.Tensor | None, group: int, chosen: dict,
) -> torch.Tensor:  # fmt: skip
    batch, max_queries, heads, dim = query.shape
    kv_heads, block_d = cache.k.shape[1], triton.next_power_of_2(dim)
    k, v, units = unpack(cache, table, contexts, max_context, chosen["block_n"])
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    kind = tl.float32 if INTERPRETED else (tl.bfloat16 if cache.spec.name == "bf16" else tl.float16)
    triton.set_allocator(_descriptor_memory)
    _dense_kernel[(triton.cdiv(max_queries, chosen["block_m"]), batch * heads)](
        query, *query.stride()[:3], k, v, units, contexts, counts, query if sinks is None else sinks, out,
        batch * kv_heads, max_queries, heads, kv_heads, k.shape[2], scale, window, softcap,
        GROUP=group, D=dim, BLOCK_D=block_d, BLOCK_M=chosen["block_m"], BLOCK_N=chosen["block_n"],
        SCALED=cache.spec.name != "bf16", HAS_SINKS=sinks is not None, WINDOW=window > 0,
        CAPPED=softcap > 0, TYPE=kind,
        num_warps=chosen["warps"], num_stages=chosen["stages"],
    )  # fmt: skip
    return out
