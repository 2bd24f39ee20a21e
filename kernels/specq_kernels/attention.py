"""Attention of a few new tokens per sequence over long, quantized pages (decoding and verification).

Dequantization happens inside: K's per-token scale multiplies the scores, V's the probabilities, static scales go into the
query and the output. 8-bit codes are exact in fp16, so those formats compute in fp16: the query, with K's static scale
folded in, is divided by its row's largest magnitude, and probabilities are carried relative to a power of two above the
largest V scale seen. BF16 pages compute in bf16. Sums are float32.

A sequence is cut into chunks of a fixed number of tokens, each handled by its own program, and merged by log-sum-exp in
order: results depend on a row's own tokens, never on what shares its batch. On GPUs of compute capability 9.0 with nvcc
and ninja at hand the chunks run in CUDA C++ (verify.cu), elsewhere in the Triton kernel here.
"""

import logging

import torch
import triton
import triton.language as tl

from specq_kernels import native, verify_cuda
from specq_kernels.codec import BF16, INTERPRETED, decode, emulated
from specq_kernels.layout import SIZES, PagedKV, integers, on
from specq_kernels.store import CHANNEL, TENSOR, TOKEN_HEAD, TOKEN_HEAD_ASYM, check_head_dim, raw_view

LOG2E = tl.constexpr(1.4426950408889634)
MAX_GROUP, MAX_QUERIES = 16, 17
QUERY_TYPES = verify_cuda.QUERY_TYPES
CHUNKS = (2048, 1024, 512, 256)  # tokens of one program: the first by default
_log = logging.getLogger("specq_kernels")
_said: set[str] = set()


@triton.jit
def power_of_two_above(x):
    """The smallest power of two that is at least x (x >= 0; 0 stays 0): dividing by it changes no bit of a mantissa."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=SIZES)
def _attention_kernel(
    q_ptr, q_batch, q_token, q_head, k_pages, v_pages, k_scales, v_scales, k_lows, v_lows, k_static, v_static,
    table, table_row, context_lens, query_lens, part_ptr, lse_ptr, rows_total, max_queries, heads, kv_heads,
    scale, window, softcap, chunk_tokens,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, CODE: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, TYPE: tl.constexpr,
    M_TILES: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M (query, head) rows of one sequence and KV head, over one chunk of its tokens."""
    m_tile = tl.program_id(0) % M_TILES
    chunk = tl.program_id(0) // M_TILES
    batch = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    context = tl.load(context_lens + batch)
    queries = tl.load(query_lens + batch)
    rows = queries * GROUP
    first = m_tile * BLOCK_M
    start = chunk * chunk_tokens
    # causal bound of this tile's last row, and the window's start for its first row
    last_query = tl.minimum(first + BLOCK_M - 1, rows - 1) // GROUP
    end = context - queries + last_query + 1
    reached = (first < rows) & (start < end)
    stop = tl.minimum(end, start + chunk_tokens)
    if window > 0:
        low = context - queries + first // GROUP - window + 1
        start = tl.maximum(start, (tl.maximum(low, 0) // BLOCK_N) * BLOCK_N)
    if reached:
        r = first + tl.arange(0, BLOCK_M)
        live = r < rows
        d = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + r % GROUP
        out_row = (batch * max_queries + r // GROUP) * heads + head
        q_at = (
            q_ptr
            + batch.to(tl.int64) * q_batch
            + (r // GROUP)[:, None].to(tl.int64) * q_token
            + head[:, None].to(tl.int64) * q_head
        )
        q = tl.load(q_at + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        q_sum = tl.sum(q, 1)
        if K_KIND == TENSOR or K_KIND == CHANNEL:
            q = q * tl.load(k_static + kv_head * D + d, mask=d < D, other=0.0)[None, :]
        unit = tl.full([BLOCK_M], scale, tl.float32)
        if CODE != BF16:
            amax = tl.max(tl.abs(q), 1)
            amax = tl.where(amax == 0.0, 1.0, amax)
            q = q / amax[:, None]
            unit = unit * amax
        q = q.to(TYPE)
        at = context - queries + r // GROUP
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        shift = tl.zeros([BLOCK_M], tl.float32)  # sum of p times V's row minimum (asymmetric format)
        v_unit = 0.0
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n0 in range(start, stop, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            ok = n < stop
            page = tl.load(table + batch * table_row + n // PAGE, mask=ok, other=0).to(tl.int64)
            slot = (page * kv_heads + kv_head) * PAGE + n % PAGE
            inside = ok[:, None] & (d < D)[None, :]
            k = decode(tl.load(k_pages + slot[:, None] * D + d[None, :], mask=inside, other=0), CODE, TYPE, BITS)
            s = tl.dot(q, tl.trans(k)) * unit[:, None]
            if K_KIND == TOKEN_HEAD or K_KIND == TOKEN_HEAD_ASYM:
                s = s * tl.load(k_scales + slot, mask=ok, other=0.0)[None, :]
            if K_KIND == TOKEN_HEAD_ASYM:
                s = s + (q_sum * scale)[:, None] * tl.load(k_lows + slot, mask=ok, other=0.0)[None, :]
            if softcap > 0:
                s = cap(s, softcap)
            s = s * LOG2E
            seen = (n[None, :] <= at[:, None]) & ok[None, :]
            if window > 0:
                seen = seen & (n[None, :] > at[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - safe[:, None])
            alpha = tl.exp2(m - safe)
            total = total * alpha + tl.sum(p, 1)
            m = m_new
            v = decode(tl.load(v_pages + slot[:, None] * D + d[None, :], mask=inside, other=0), CODE, TYPE, BITS)
            if V_KIND == TOKEN_HEAD_ASYM:
                vl = tl.load(v_lows + slot, mask=ok, other=0.0)
                shift = shift * alpha + tl.sum(p * vl[None, :], 1)
            if V_KIND == TOKEN_HEAD or V_KIND == TOKEN_HEAD_ASYM:
                vs = tl.load(v_scales + slot, mask=ok, other=0.0)
                larger = tl.maximum(v_unit, power_of_two_above(tl.max(vs, 0)))
                alpha = alpha * tl.where(larger > 0.0, v_unit / larger, 0.0)
                vs = tl.where(larger > 0.0, vs / larger, 0.0)
                v_unit = larger
                p = p * vs[None, :]
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(TYPE), v, acc)
        if V_KIND == TOKEN_HEAD or V_KIND == TOKEN_HEAD_ASYM:
            acc = acc * v_unit
        if V_KIND == TOKEN_HEAD_ASYM:
            acc = acc + shift[:, None]
        if V_KIND == TENSOR or V_KIND == CHANNEL:
            acc = acc * tl.load(v_static + kv_head * D + d, mask=d < D, other=0.0)[None, :]
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # NaN stays NaN
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log2(total))
        place = chunk.to(tl.int64) * rows_total + out_row
        tl.store(part_ptr + place[:, None] * D + d[None, :], acc, mask=live[:, None] & (d < D)[None, :])
        tl.store(lse_ptr + place, lse, mask=live)


@triton.jit
def cap(s, softcap):
    """softcap * tanh(s / softcap), by tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates without overflow."""
    return softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit(do_not_specialize=SIZES)
def _merge_kernel(
    part_ptr, lse_ptr, out_ptr, context_lens, query_lens, sinks, rows_total, max_queries, heads, spans, span_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one output row; its spans weighted by their log-sum-exp (base 2) and added in order, so that the sum does
    not depend on how many spans the longest row of the batch has."""
    row = tl.program_id(0)
    batch = row // (max_queries * heads)
    query = (row // heads) % max_queries
    head = row % heads
    queries = tl.load(query_lens + batch)
    if query < queries:
        context = tl.load(context_lens + batch)
        chunks = tl.minimum(tl.cdiv(context - queries + query + 1, span_tokens), spans)
        c = tl.arange(0, BLOCK_S)
        d = tl.arange(0, BLOCK_D)
        lse = tl.load(lse_ptr + c.to(tl.int64) * rows_total + row, mask=c < chunks, other=float("-inf"))
        top = tl.max(lse, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2E
            top = tl.maximum(top, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(lse - top)
        place = (c.to(tl.int64) * rows_total + row)[:, None] * D + d[None, :]
        # a chunk outside a row's window has the weight 0 and is not read
        parts = tl.load(part_ptr + place, mask=(weight > 0.0)[:, None] & (d < D)[None, :], other=0.0) * weight[:, None]
        total = 0.0
        out = tl.zeros([BLOCK_D], tl.float32)
        for i in tl.static_range(BLOCK_S):
            total += tl.sum(tl.where(c == i, weight, 0.0), 0)
            out += tl.sum(tl.where((c == i)[:, None], parts, 0.0), 0)
        if HAS_SINKS:
            total = total + tl.exp2(sink - top)
        out = out / tl.where(total == 0.0, 1.0, total)
        tl.store(out_ptr + row.to(tl.int64) * D + d, out, mask=d < D)


def check_shapes(query: torch.Tensor, cache: PagedKV) -> int:
    """Query heads per KV head. Raises ValueError for heads or a head_dim that do not fit the cache."""
    heads, dim = query.shape[2:]
    kv_heads = cache.k.shape[1]
    check_head_dim(dim)
    if cache.k.shape[3] != dim or heads % kv_heads or not 1 <= heads // kv_heads <= MAX_GROUP:
        raise ValueError(
            f"{heads} query heads of {dim} do not fit {kv_heads} KV heads of {cache.k.shape[3]} (group 1 to 16)"
        )
    if query.stride(3) != 1 or query.dtype not in QUERY_TYPES:
        raise ValueError(
            f"a query of {query.dtype} with head_dim strided by {query.stride(3)}; bf16, fp16 or float32 and 1"
        )
    return heads // kv_heads


def check_rows(
    query: torch.Tensor, cache: PagedKV, block_table: torch.Tensor, context_lens: torch.Tensor, query_lens: torch.Tensor,
    max_context: int, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(table, context lengths, query lengths, sinks) as the kernels read them. Raises ValueError where they do not fit."""
    batch, device = query.shape[0], query.device
    if cache.k.device != device:
        raise ValueError(f"the query is on {device}, the cache on {cache.k.device}")
    table = integers(block_table, (batch, -1), device, torch.int32, "block_table")
    if table.shape[1] * cache.page_size < max_context:
        raise ValueError(
            f"a block_table of {table.shape[1]} pages of {cache.page_size} ends before {max_context} tokens"
        )
    contexts, counts = (
        integers(t, (batch,), device, torch.int32, name)
        for t, name in ((context_lens, "context_lens"), (query_lens, "query_lens"))
    )
    if sinks is not None:
        sinks = integers(sinks, (query.shape[2],), device, torch.float32, "sinks")
    return table, contexts, counts, sinks


def positive_scale(scale: float | None, dim: int) -> float:
    """The softmax scale, head_dim ** -0.5 by default. Raises ValueError unless it is positive."""
    if scale is not None and not scale > 0:
        raise ValueError(f"scale {scale} is not positive")
    return dim**-0.5 if scale is None else scale


def verify_backend(device: torch.device, dim: int) -> str:
    """`cuda` or `triton`: what `verify_attention` runs through on this device; a reason for Triton is logged once."""
    why = verify_cuda.why_not(device, dim)
    if why and not INTERPRETED and why not in _said:
        _said.add(why)
        _log.info("verify attention runs in Triton: %s", why)
    return "triton" if why else "cuda"


def filling_chunk(kv_heads: int, max_context: int, device: torch.device) -> int:
    """Largest chunk that gives every multiprocessor one and a half of these KV heads' chunks; the smallest if none does."""
    if device.type != "cuda":
        return CHUNKS[-1]
    wanted = 1.5 * torch.cuda.get_device_properties(device).multi_processor_count
    return next((c for c in CHUNKS if kv_heads * triton.cdiv(max_context, c) >= wanted), CHUNKS[-1])


def _triton_parts(
    query: torch.Tensor, cache: PagedKV, block_table: torch.Tensor, context_lens: torch.Tensor, query_lens: torch.Tensor,
    max_context: int, scale: float, window: int, softcap: float, chunk: int, tuning: dict,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:  # fmt: skip
    """What `verify_cuda.verify` returns, by the Triton kernel."""
    batch, max_queries, heads, dim = query.shape
    kv_heads, spec = cache.k.shape[1], cache.spec
    group, rows = heads // kv_heads, batch * max_queries * heads
    # fastest of a sweep on an H200 at head_dim 128; wider heads need smaller blocks to fit shared memory
    wide = dim > 128
    chosen = {
        "block_m": min(64, max(16, triton.next_power_of_2(max_queries * group))),
        "block_n": 64 if wide else 128,
        "warps": 4,
        "stages": 2 if wide else 3,
    } | tuning
    chunks, m_tiles = triton.cdiv(max_context, chunk), triton.cdiv(max_queries * group, chosen["block_m"])
    part = torch.empty(chunks, rows, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(chunks, rows, dtype=torch.float32, device=query.device)
    kind = tl.float32 if INTERPRETED else (tl.bfloat16 if spec.name == "bf16" else tl.float16)
    _attention_kernel[(m_tiles * chunks, batch * kv_heads)](
        query, *query.stride()[:3], raw_view(cache.k), raw_view(cache.v), cache.k_scale, cache.v_scale, cache.k_low,
        cache.v_low, cache.k_static, cache.v_static, block_table, block_table.stride(0), context_lens, query_lens,
        part, lse, rows, max_queries, heads, kv_heads, scale, window, softcap, chunk,
        GROUP=group, D=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_M=chosen["block_m"], BLOCK_N=chosen["block_n"],
        PAGE=cache.page_size, CODE=spec.code, K_KIND=spec.k_scale, V_KIND=spec.v_scale, TYPE=kind, M_TILES=m_tiles,
        BITS=emulated(query.device),
        num_warps=chosen["warps"], num_stages=chosen["stages"],
    )  # fmt: skip
    return torch.empty_like(query, memory_format=torch.contiguous_format), part, lse, chunk


def verify_attention(
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
    fill: bool = False,
    backend: str | None = None,
    chunk: int | None = None,
    tuning: dict | None = None,
) -> torch.Tensor:
    """Attention of 1 to 17 new tokens per sequence over paged K and V that already hold them.

    Args:
        query: `[batch, queries, heads, head_dim]`, bf16, fp16 or float32, head_dim contiguous.
        cache: pages of one layer.
        block_table: int32 `[batch, pages per row]`.
        context_lens: int32 `[batch]`, tokens in the cache, new ones included.
        query_lens: int32 `[batch]`, 0 to `queries`; outputs beyond are undefined.
        max_context: largest context, at least (an int: no device synchronisation).
        scale: softmax scale, head_dim ** -0.5 by default. window: sliding window in tokens, 0 for none.
        softcap: soft cap of the scores, 0 for none. sinks: float `[heads]`, one extra logit per head.
        fill: cut the sequences finer where the batch is too small to fill the GPU: faster there, but results then depend
            (in rounding) on the size of the batch.
        backend: `cuda` or `triton`; default `verify_backend`. chunk, tuning: tokens per program and launch options of
            the backend, for tests and the benchmark.

    Returns `[batch, queries, heads, head_dim]` in the query's dtype. Raises ValueError for shapes out of range.
    """
    if not 1 <= query.shape[1] <= MAX_QUERIES:
        raise ValueError(f"{query.shape[1]} queries per sequence; verify_attention takes 1 to {MAX_QUERIES}")
    group = check_shapes(query, cache)
    table, contexts, counts, sinks = check_rows(query, cache, block_table, context_lens, query_lens, max_context, sinks)
    batch, max_queries, heads, dim = query.shape
    if batch == 0 or max_context == 0:
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    if chunk is None:
        heads_of_kv = batch * cache.k.shape[1]
        chunk = filling_chunk(heads_of_kv, max_context, query.device) if fill else CHUNKS[0]
    common = (query, cache, table, contexts, counts, max_context, positive_scale(scale, dim), window, softcap, chunk)
    found = None
    with on(query.device):
        if (backend or verify_backend(query.device, dim)) == "cuda":
            try:
                found = verify_cuda.verify(*common, partial=sinks is not None, **(tuning or {}))
            except native.BuildError:
                if backend:
                    raise
        out, part, lse, span = found or _triton_parts(*common, tuning or {})
        if part is not None:
            rows = batch * max_queries * heads
            _merge_kernel[(rows,)](
                part, lse, out, contexts, counts, query if sinks is None else sinks, rows, max_queries, heads, len(part),
                span, D=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_S=triton.next_power_of_2(len(part)), GROUP=group,
                HAS_SINKS=sinks is not None, num_warps=1,
            )  # fmt: skip
    return out
