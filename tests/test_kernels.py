"""Triton kernels against their float32 references: in the interpreter on a CPU, on the hardware with `make test-gpu`.

The matrix of formats x head_dim x group x queries x page size is covered pairwise with fresh random inputs per case; on a
GPU larger lengths join. Outputs are poisoned where a kernel could leave them unwritten.
"""

import functools
import itertools
import math
import os

import pytest
import torch

triton = pytest.importorskip("triton")

from specq_kernels import (  # noqa: E402
    PagedKV,
    acceptance,
    draw,
    native,
    reference,
    replay_attention,
    store_cuda,
    store_kv,
    verify_attention,
    verify_cuda,
)
from specq_kernels.codec import INTERPRETED, emulated  # noqa: E402
from specq_kernels.layout import CHANNEL, SPECS  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
if os.environ.get("SPECQ_REQUIRE_GPU") == "1" and (INTERPRETED or not torch.cuda.is_available()):
    pytest.fail("SPECQ_REQUIRE_GPU=1 and the kernels would not run on a GPU", pytrace=False)
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no GPU and no interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

# the interpreter computes masked lanes with numpy, which warns about their infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORMATS = list(SPECS)
QUERY_DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-6 if INTERPRETED else 3e-3


@pytest.fixture(autouse=True)
def poisoned():
    """torch.empty gives NaN and largest integers: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def _pairs(case):
    return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}


def pairwise(*axes):
    """A small set of tuples in which every pair of values of two axes occurs (greedy)."""
    wanted = {(i, a, j, b) for i, j in itertools.combinations(range(len(axes)), 2) for a in axes[i] for b in axes[j]}
    chosen = []
    while wanted:
        best = max(itertools.product(*axes), key=lambda case: len(_pairs(case) & wanted))
        chosen.append(best)
        wanted -= _pairs(best)
    return chosen


def paged(name, lengths, kv_heads, dim, page, seed, magnitude=1.0):
    """(cache filled by the reference, block table, context lengths) with pages in random order."""
    g = torch.Generator().manual_seed(seed)
    pages = sum(-(-n // page) for n in lengths) + 3
    cache = PagedKV.allocate(name, pages, kv_heads, page, dim, DEVICE, k_static=0.03, v_static=0.02)
    order = torch.randperm(pages, generator=g).to(torch.int32)
    table = torch.zeros(len(lengths), max(-(-n // page) for n in lengths), dtype=torch.int32)
    slots, used = [], 0
    for row, n in enumerate(lengths):
        count = -(-n // page)
        table[row, :count] = order[used : used + count]
        used += count
        at = torch.arange(n)
        slots.append(table[row, at // page].long() * page + at % page)
    slots = torch.cat(slots)
    k, v = (torch.randn(len(slots), kv_heads, dim, generator=g) * magnitude for _ in range(2))
    v = v * (0.1 + 3 * torch.rand(len(slots), kv_heads, 1, generator=g))
    reference.store_kv(k.to(DEVICE), v.to(DEVICE), cache, slots.to(DEVICE))
    return cache, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def error(out, expected, counts):
    """||out - ref|| / ||ref|| over the valid rows."""
    a, b = (torch.cat([t[i, :n].float().flatten() for i, n in enumerate(counts)]) for t in (out, expected))
    assert not a.isnan().any()
    return float((a - b).norm() / b.norm())


def attend(function, name, lengths, counts, heads, kv_heads, dim, page, seed=0, **kw):
    """(kernel output, reference output) of one random case."""
    cache, table, contexts = paged(name, lengths, kv_heads, dim, page, seed)
    g = torch.Generator().manual_seed(seed + 1)
    q = torch.randn(len(lengths), max(counts), heads, dim, generator=g).to(DEVICE, QUERY_DTYPE)
    n = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    reference_kw = {k: v for k, v in kw.items() if k in ("window", "softcap", "sinks")}
    expected = reference.attention(q, cache, table, contexts, n, dim**-0.5, **reference_kw)
    return function(q, cache, table, contexts, n, max(lengths), **kw), expected


def raw(t):
    """Bytes of a tensor, to compare bit by bit."""
    return t.contiguous().view(torch.uint8) if t.numel() else t


STORE_CASES = pairwise(FORMATS, (64, 80, 96, 112, 128, 192, 256), (16, 48), (1, 3))


@pytest.mark.parametrize(("name", "dim", "page", "heads"), STORE_CASES, ids=str)
def test_store_is_bit_equal_to_the_reference(name, dim, page, heads):
    """Codes, scales and minima are those of the reference bit for bit, for strided inputs of any magnitude; slots of -1
    write nothing, and nothing else is touched (Q-01, Q-05, Q-13 inside: zeros, saturation, ties)."""
    g = torch.Generator().manual_seed(dim)
    tokens = 21
    k = torch.randn(tokens, heads, 2 * dim, generator=g)[..., ::2] * 10.0 ** torch.randint(
        -4, 4, (tokens, heads, 1), generator=g
    )
    v = torch.randn(heads, tokens, dim, generator=g).transpose(0, 1)
    k[3, 0], v[5] = 0.0, 0.0
    k[4, 0, :4] = torch.tensor([1.5, 2.5, -1e6, 465.0])
    slots = torch.randperm(4 * page, generator=g)[:tokens]
    slots[7] = -1
    stores = [store_kv, reference.store_kv] + ([] if INTERPRETED else [functools.partial(store_kv, bits=True)])
    caches = []
    for store in stores:
        cache = PagedKV.allocate(name, 4, heads, page, dim, DEVICE, k_static=0.02, v_static=0.03)
        for pages in (cache.k, cache.v):
            pages.view(torch.int8 if pages.element_size() == 1 else torch.int16).fill_(77)
        store(k.to(DEVICE), v.to(DEVICE), cache, slots.to(DEVICE))
        caches.append(cache)
    for part in ("k", "v", "k_scale", "v_scale", "k_low", "v_low"):
        assert all(torch.equal(raw(getattr(c, part)), raw(getattr(caches[1], part))) for c in caches), part


@pytest.mark.parametrize("dim", [80, 96, 112])
def test_padded_lanes_enter_no_extreme(dim):
    """Rows of one sign, whose minimum or maximum a lane of 0 beyond head_dim would change."""
    x = 1.0 + torch.rand(4, 2, dim, generator=torch.Generator().manual_seed(dim)).to(DEVICE)
    for k, v in ((x, -x), (-x, x)):
        caches = [PagedKV.allocate("int8_per_token_asym", 1, 2, 16, dim, DEVICE) for _ in "ab"]
        for cache, store in zip(caches, (store_kv, reference.store_kv), strict=True):
            store(k, v, cache, torch.arange(4, device=DEVICE))
        for part in ("k", "v", "k_scale", "v_scale", "k_low", "v_low"):
            assert torch.equal(*(raw(getattr(c, part)) for c in caches)), part


def test_what_the_kernels_cannot_address_is_refused_or_made_fit():
    """Slots, tables, lengths and tokens with gaps or of another integer type give the same results; other shapes, tables
    that end too early and negative scales raise ValueError."""
    cache, table, contexts = paged("bf16", [40, 33], 2, 64, 16, 0)
    q = torch.randn(2, 2, 4, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, QUERY_DTYPE)
    n = torch.tensor([2, 2], dtype=torch.int32, device=DEVICE)
    expected = verify_attention(q, cache, table, contexts, n, 40)
    gaps = torch.stack([table, table], -1)[..., 0].long()
    assert not gaps.is_contiguous() or gaps.dtype == torch.long
    assert torch.equal(verify_attention(q, cache, gaps, contexts.long(), n.long(), 40), expected)
    x = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    stored = []
    for slots in (torch.arange(0, 8, 2, device=DEVICE), torch.arange(8, device=DEVICE)[::2].to(torch.int32)):
        one = PagedKV.allocate("int8_per_token_head", 1, 2, 16, 64, DEVICE)
        store_kv(x, x, one, slots)
        stored.append(one)
    assert torch.equal(stored[0].k, stored[1].k) and torch.equal(stored[0].k_scale, stored[1].k_scale)
    for wrong in (
        lambda: verify_attention(q, cache, table[:1], contexts, n, 40),
        lambda: verify_attention(q, cache, table[:, :1], contexts, n, 40),
        lambda: verify_attention(q, cache, table, contexts[:1], n, 40),
        lambda: verify_attention(q, cache, table, contexts, n, 40, scale=-1.0),
        lambda: replay_attention(q, cache, table, contexts, n, 40, sinks=torch.zeros(3, device=DEVICE)),
        lambda: store_kv(x, x, cache, torch.arange(3, device=DEVICE)),
        lambda: acceptance(x[:1], x[0], torch.arange(3, device=DEVICE)),
    ):
        with pytest.raises(ValueError):
            wrong()


@pytest.mark.parametrize("name", ["bf16", "int8_per_token_head"])
def test_nan_reaches_the_output_and_stale_pages_do_not(name):
    """A NaN query or key makes its own row NaN, in one chunk or several; NaN in slots beyond a row's end changes nothing."""
    cache, table, contexts = paged(name, [70, 50], 2, 64, 16, 0)
    q = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, QUERY_DTYPE)
    n = torch.tensor([3, 3], dtype=torch.int32, device=DEVICE)
    calls = [
        lambda q, chunk=chunk: verify_attention(q, cache, table, contexts, n, 70, chunk=chunk) for chunk in (32, 1024)
    ]
    calls.append(lambda q: replay_attention(q, cache, table, contexts, n, 70))
    clean = [call(q) for call in calls]
    stale = torch.arange(70, 80, device=DEVICE)
    at = table[0].long()[stale // 16], slice(None), stale % 16
    for pages in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if pages.numel() and pages.dtype.is_floating_point:
            pages[at] = float("nan")
    bad = q.clone()
    bad[1, 2, 3, 5] = float("nan")
    for call, expected in zip(calls, clean, strict=True):
        assert torch.equal(call(q), expected)
        out = call(bad)
        assert out[1, 2, 3].isnan().all() and out.isnan().sum() == 64
    scale = cache.k if name == "bf16" else cache.k_scale
    scale[table[1, 0].long(), 0, 3] = float("nan")
    for call in calls:
        assert call(q).isnan().any(-1).nonzero()[:, 0].unique().tolist() == [1]


@pytest.mark.skipif(INTERPRETED, reason="CUDA C++ needs the hardware")
@pytest.mark.parametrize("dim", store_cuda.HEAD_DIMS)
@pytest.mark.parametrize("name", [f for f in FORMATS if f != "bf16"])
def test_cuda_store_is_bit_equal_to_the_reference(name, dim):
    """bf16 tokens of every magnitude, scales out of the ordinary, zeros, infinities and NaN, strided heads, slots of -1:
    the CUDA C++ kernel writes the reference's bytes."""
    g = torch.Generator().manual_seed(dim)
    tokens, heads, page = 1000, 3, 16
    k, v = (
        torch.randn(tokens, 2 * heads, dim, generator=g)
        * 10.0 ** torch.randint(-36, 30, (tokens, 2 * heads, 1), generator=g)
        for _ in range(2)
    )
    v = torch.where(torch.rand(tokens, 1, 1, generator=g) < 0.5, v, torch.randn(v.shape, generator=g) * 3)
    k[3], v[5] = 0.0, 0.0
    k[4, :, :4] = torch.tensor([math.inf, -math.inf, 1.0, -2.0])
    k[8, :, ::3] = -0.0
    k, v = (t.to(DEVICE, torch.bfloat16)[:, ::2] for t in (k, v))
    slots = torch.randperm(64 * page, generator=g)[:tokens].to(DEVICE)
    slots[7] = -1
    caches = []
    for store in (store_kv, reference.store_kv):
        cache = PagedKV.allocate(
            name, 64, heads, page, dim, DEVICE, k_static=1e-30 if dim == 64 else 0.02, v_static=0.03
        )
        cache.k_static[1] = 7.0
        if cache.spec.k_scale == CHANNEL:
            cache.k_static[1, 3] = 2e30
        store(k, v, cache, slots)
        caches.append(cache)
    assert store_cuda.takes(k, v, cache.spec) or native.why_not(k.device, "store.cu")
    for part in ("k", "v", "k_scale", "v_scale", "k_low", "v_low"):
        a, b = (getattr(c, part) for c in caches)
        if part.endswith(("scale", "low")):  # NaN has many bits
            assert torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0)), part
        else:
            assert torch.equal(raw(a), raw(b)), part


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "bf16"])
def test_hardware_and_integer_encoding_agree(name):
    """Encoding by integer bits gives the codes of the conversion, over every exponent, ties, NaN and infinities (Q-01)."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1, 64, generator=g) * 2.0 ** torch.randint(-30, 20, (512, 1, 64), generator=g)
    x[0, 0, :9] = torch.tensor([448, 464, 465, 1000, -1000, 17, 19, math.inf, -math.inf])
    x[1, 0, :4] = torch.tensor([2.0**-10, 3 * 2.0**-10, 2.0**-17, 3 * 2.0**-17])
    x[2, 0, 0] = math.nan
    x = x.to(DEVICE)
    slots = torch.arange(512, device=DEVICE)
    stored = []
    for bits in (True, False) if not INTERPRETED else (True,):
        cache = PagedKV.allocate(name, 32, 1, 16, 64, DEVICE)
        store_kv(x, x, cache, slots, bits=bits)
        stored.append(cache.k.float().cpu())
    expected = PagedKV.allocate(name, 32, 1, 16, 64, DEVICE)
    reference.store_kv(x, x, expected, slots)
    for got in stored:
        assert torch.equal(got.nan_to_num(-1.0), expected.k.float().cpu().nan_to_num(-1.0))
        assert got[0, 0, 2, 0].isnan() or name == "bf16" or got.isnan().sum() == 1


@pytest.mark.parametrize("name", [f for f in FORMATS if SPECS[f].code in (1, 2)])
def test_q29_older_gpus_emulate_the_codes(name, monkeypatch):
    """Q-29: a GPU of capability 8.0 (it has no e4m3), like the interpreter, reads codes by their bits: every code but NaN
    comes back as torch reads it, through the attention of a single token."""
    with monkeypatch.context() as old:
        old.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        assert emulated(torch.device("cuda")) and emulated(torch.device("cpu"))
        assert native.capability.__wrapped__(0) == (8, 0)
    monkeypatch.setattr("specq_kernels.attention.emulated", lambda _: True)
    codes = torch.arange(256, dtype=torch.uint8).view(SPECS[name].dtype)
    finite = codes.float().isfinite().view(4, 64).all(0)
    cache = PagedKV.allocate(name, 4, 1, 16, 64, DEVICE)
    cache.v.view(torch.uint8)[:, 0, 0] = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(4, 64)
    cache.v_scale.fill_(1.0)
    one = torch.ones(4, dtype=torch.int32, device=DEVICE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[:, None]
    q = torch.zeros(4, 1, 1, 64, device=DEVICE)
    out = verify_attention(q, cache, table, one, one, 1, backend="triton")[:, 0, 0].cpu()
    assert torch.equal(out[:, finite], codes.float().view(4, 64)[:, finite])


def test_q05_zeros_and_q13_ties_in_raw_codes():
    """Q-05: an all-zero row has a finite, positive scale; Q-13: amax 127, [.6,1.5,2.5,-.6,-1.5,-2.5] -> [1,2,2,-1,-2,-2],
    K and V both."""
    cache = PagedKV.allocate("int8_per_token_head", 1, 1, 16, 64, DEVICE)
    x = torch.zeros(2, 1, 64)
    x[1, 0, :7] = torch.tensor([127.0, 0.6, 1.5, 2.5, -0.6, -1.5, -2.5])
    store_kv(x.to(DEVICE), x.to(DEVICE), cache, torch.tensor([0, 1], device=DEVICE))
    for codes, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        assert codes[0, 0, 1, :7].tolist() == [127, 1, 2, 2, -1, -2, -2]
        assert scales[0, 0, :2].tolist() == [1.0, 1.0] and codes[0, 0, 0].abs().sum() == 0


VERIFY_CASES = pairwise(FORMATS, (64, 80, 128), (1, 6, 7, 16), (1, 2, 5, 17), (16, 32))
BACKENDS = [("triton", 32), ("triton", 1024)] + ([] if INTERPRETED else [("cuda", 128), ("cuda", 512)])


@pytest.mark.parametrize(("name", "dim", "group", "queries", "page"), VERIFY_CASES, ids=str)
def test_verify_attention(name, dim, group, queries, page):
    """Ragged rows, one of them without queries, split and unsplit, through every backend: the reference's output."""
    kv_heads = 1 if group > 6 else 2
    lengths, counts = [max(queries, 40), 17 + queries, 90], [queries, 0, max(1, queries - 1)]
    for backend, chunk in BACKENDS:
        if backend == "cuda" and dim not in verify_cuda.HEAD_DIMS:
            continue
        kw = {"tuning": {"block_n": 32, "block_m": 64 if group * queries > 32 else 16}} if backend == "triton" else {}
        out, expected = attend(
            verify_attention,
            name,
            lengths,
            counts,
            group * kv_heads,
            kv_heads,
            dim,
            page,
            backend=backend,
            chunk=chunk,
            **kw,
        )
        assert error(out, expected, counts) < TOLERANCE, (backend, chunk)


# group, queries, page size, options
CUDA_CASES = [
    (1, 1, 16, {}),
    (8, 1, 16, {}),
    (8, 4, 32, {}),
    (6, 5, 16, {}),
    (8, 8, 48, {}),
    (16, 17, 16, {}),
    (7, 5, 16, {"window": 900}),
    (8, 4, 16, {"softcap": 5.0}),
    (8, 3, 16, {"window": 300, "softcap": 3.0, "sinks": True}),
]


@pytest.fixture(scope="module")
def cuda_kernels():
    """The CUDA C++ kernels of every format, compiled side by side."""
    device = torch.device(DEVICE)
    if INTERPRETED or verify_cuda.why_not(device, 128):
        pytest.skip(f"no CUDA C++ kernels: {verify_cuda.why_not(device, 128)}")
    wanted = {
        verify_cuda.Config(
            spec, dim, verify_cuda.row_blocks(dim, group * queries)[0], group, page, capped="softcap" in kw
        )
        for spec in SPECS.values()
        for dim in verify_cuda.HEAD_DIMS
        for group, queries, page, kw in CUDA_CASES
    }
    verify_cuda.build(wanted)


@pytest.mark.parametrize("dim", list(verify_cuda.HEAD_DIMS))
@pytest.mark.parametrize("name", FORMATS)
def test_cuda_verify_attention(cuda_kernels, name, dim):
    """The CUDA C++ kernel over one and several clusters, ragged rows, every number of row tiles, small and large pages,
    window, soft cap and sinks: the reference's output, and the same bits alone and in company."""
    lengths = [5000, 700, 30, 4097]
    for group, queries, page, options in CUDA_CASES:
        counts, kw = [queries, max(1, queries - 1), queries, 0], dict(options)
        if "sinks" in kw:
            kw["sinks"] = torch.randn(2 * group, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        out, expected = attend(
            verify_attention, name, lengths, counts, 2 * group, 2, dim, page, seed=queries, backend="cuda", **kw
        )
        assert error(out, expected, counts) < TOLERANCE, (group, queries, page, kw)
    cache, table, contexts = paged(name, lengths, 2, dim, 16, 3)
    q = torch.randn(4, 4, 16, dim, generator=torch.Generator().manual_seed(4)).to(DEVICE, QUERY_DTYPE)
    n = torch.full((4,), 4, dtype=torch.int32, device=DEVICE)
    whole = verify_attention(q, cache, table, contexts, n, 5000, backend="cuda")
    for rows in ([0, 1, 2, 3], [1], [2, 0], [3, 1]):
        longest = max(lengths[r] for r in rows)
        part = verify_attention(
            q[rows], cache, table[rows].contiguous(), contexts[rows], n[rows], longest, backend="cuda"
        )
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dim", [96, 112, 192, 256])
@pytest.mark.parametrize("name", ["bf16", "int8_per_token_head"])
def test_q18_head_dims_that_are_no_power_of_two(name, dim):
    """Q-18: head_dim 96, 112, 192, 256 match; the second half of the channels counts."""
    out, expected = attend(verify_attention, name, [50], [2], 4, 2, dim, 16, chunk=32, backend="triton")
    assert error(out, expected, [2]) < TOLERANCE
    cache, table, contexts = paged(name, [50], 2, dim, 16, 0)
    q = torch.randn(1, 2, 4, dim, generator=torch.Generator().manual_seed(1)).to(DEVICE, QUERY_DTYPE)
    n = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    full = verify_attention(q, cache, table, contexts, n, 50)
    q[..., dim // 2 :] = 0
    assert not torch.allclose(full, verify_attention(q, cache, table, contexts, n, 50), atol=1e-2)


def test_q18_unsupported_shapes_are_refused():
    """A head_dim, group, page size, format or query count that no kernel supports raises ValueError naming it."""
    with pytest.raises(ValueError, match="head_dim 72"):
        cache = PagedKV.allocate("bf16", 1, 1, 16, 72, DEVICE)
        x = torch.zeros(1, 1, 72, device=DEVICE)
        store_kv(x, x, cache, torch.zeros(1, dtype=torch.long, device=DEVICE))
    with pytest.raises(ValueError, match="page_size 24"):
        PagedKV.allocate("bf16", 1, 1, 24, 64, DEVICE)
    with pytest.raises(ValueError, match="fp4"):
        PagedKV.allocate("fp4", 1, 1, 16, 64, DEVICE)
    for heads, queries, why in ((17, 1, "17 query heads"), (3, 18, "18 queries")):
        with pytest.raises(ValueError, match=why):
            attend(verify_attention, "bf16", [30], [queries], heads, 1, 64, 16)


def test_q20_query_heads_find_their_kv_head():
    """Q-20: Hq=8, Hkv=2, V of KV head h constant h+1: head i gives floor(i/4)+1; per-head static scales 1 and 10 too."""
    for name, static in (("bf16", 1.0), ("fp8_e4m3", torch.tensor([[1.0], [10.0]]))):
        cache = PagedKV.allocate(name, 2, 2, 16, 64, DEVICE, v_static=static)
        v = torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(20, 2, 64) * torch.as_tensor(static).view(1, -1, 1)
        k = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(0))
        store_kv(k.to(DEVICE), v.to(DEVICE), cache, torch.arange(20, device=DEVICE))
        q = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE, QUERY_DTYPE)
        table = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
        one = torch.ones(1, dtype=torch.int32, device=DEVICE)
        out = verify_attention(q, cache, table, 20 * one, one, 20)[0, 0].float().cpu()
        expected = torch.tensor([1.0] * 4 + [2.0] * 4) * torch.as_tensor(static).view(-1).repeat_interleave(
            8 // torch.as_tensor(static).numel()
        )
        assert torch.allclose(out, expected[:, None].expand(8, 64), rtol=1e-2)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "int8_per_token_head", "int8_per_token_asym"])
@pytest.mark.parametrize("chunk", [32, 1024])
def test_window_softcap_and_sinks(name, chunk):
    """Sliding window, soft cap and attention sinks, together and split over chunks outside the window as well."""
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for kw in ({"window": 20}, {"softcap": 5.0}, {"sinks": sinks}, {"window": 9, "softcap": 3.0, "sinks": sinks}):
        out, expected = attend(verify_attention, name, [150, 33], [3, 2], 6, 2, 64, 16, chunk=chunk, **kw)
        assert error(out, expected, [3, 2]) < TOLERANCE, kw


@pytest.mark.parametrize("name", FORMATS)
def test_replay_attention(name):
    """Query chunks longer than a tile, behind a prefix, ragged: the reference's output."""
    tuning = {"block_m": 32, "block_n": 32} if INTERPRETED else None
    lengths, counts = ([90, 70], [50, 70]) if INTERPRETED else ([1500, 700], [1024, 700])
    out, expected = attend(replay_attention, name, lengths, counts, 4, 2, 64, 16, tuning=tuning)
    assert error(out, expected, counts) < TOLERANCE


@pytest.mark.parametrize("name", ["bf16", "fp8_per_token_head"])
def test_replay_window_softcap_and_sinks(name):
    """Windows shorter and longer than a block, soft cap and sinks, together as well."""
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    tuning = {"block_m": 32, "block_n": 16} if INTERPRETED else None
    for kw in (
        {"window": 9},
        {"window": 40},
        {"softcap": 4.0},
        {"sinks": sinks},
        {"window": 50, "softcap": 3.0, "sinks": sinks},
    ):
        out, expected = attend(replay_attention, name, [120, 70], [60, 70], 4, 2, 64, 16, tuning=tuning, **kw)
        assert error(out, expected, [60, 70]) < TOLERANCE, kw


def test_results_do_not_depend_on_the_batch_and_repeat_bit_for_bit():
    """A row's output is bit-equal alone, in company, in another order, and when run again."""
    lengths, counts = [128, 300, 33], [2, 2, 2]
    cache, table, contexts = paged("int8_per_token_head", lengths, 2, 64, 16, 3)
    q = torch.randn(3, 2, 8, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE, QUERY_DTYPE)
    n = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    whole = verify_attention(q, cache, table, contexts, n, 300, chunk=32)
    assert torch.equal(whole, verify_attention(q, cache, table, contexts, n, 300, chunk=32))
    for rows in ([1], [2, 0], [2, 1, 0]):
        part = verify_attention(
            q[rows], cache, table[rows].contiguous(), contexts[rows], n[rows], max(lengths[r] for r in rows), chunk=32
        )
        assert torch.equal(part, whole[rows])


def test_power_of_two_scales_give_the_same_attention():
    """Check 3: static scales s and 2s store other codes, read back bit-equal, and give the same attention: the scale only
    enters the query and the output, by powers of two."""
    read, attended = [], []
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 2, 4, 64, generator=torch.Generator().manual_seed(6)).to(DEVICE, QUERY_DTYPE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[None]
    for s in (1 / 32, 1 / 16):
        cache = PagedKV.allocate("fp8_e4m3", 4, 2, 16, 64, DEVICE, k_static=s, v_static=s)
        g = torch.Generator().manual_seed(5)
        k, v = (
            torch.randn(60, 2, 64, generator=g).sign() * (0.5 + torch.rand(60, 2, 64, generator=g)) for _ in range(2)
        )
        store_kv(k.to(DEVICE), v.to(DEVICE), cache, torch.arange(60, device=DEVICE))
        read.append([reference.dequantize(cache, p) for p in "kv"])
        attended.append(verify_attention(q, cache, table, 60 * one, 2 * one, 60).float())
    assert all(torch.equal(a, b) for a, b in zip(*read, strict=True))
    assert float((attended[0] - attended[1]).norm() / attended[0].norm()) < TOLERANCE


@pytest.mark.skipif(INTERPRETED, reason="long contexts need the hardware")
@pytest.mark.parametrize("length", [256, 4096, 32768])
def test_error_does_not_grow_with_the_context(length):
    """FP8 over 256, 4k and 32k tokens stays within the tolerance of short contexts."""
    out, expected = attend(verify_attention, "fp8_e4m3", [length], [4], 64, 8, 128, 16)
    assert error(out, expected, [4]) < TOLERANCE


ACCEPTANCE_CASES = [
    (300, 300, None, 1.0, torch.float32),
    (300, 280, 290, 0.7, torch.bfloat16),
    (5000, 5200, None, 1.3, torch.float32),
    (300, 280, 290, 0.0, torch.float32),
]
if not INTERPRETED:
    ACCEPTANCE_CASES += [
        (128_256, 128_256, None, 1.0, torch.bfloat16),
        (262_144, 151_936, 262_000, 0.8, torch.bfloat16),
    ]


@pytest.mark.parametrize(("width", "draft_width", "size", "temperature", "dtype"), ACCEPTANCE_CASES, ids=str)
def test_acceptance_columns(width, draft_width, size, temperature, dtype):
    """Every column of three arms against float64 sums; unequal widths, padded ids, temperature 0."""
    g = torch.Generator().manual_seed(width)
    t = (torch.randn(3, 6, width, generator=g) * 3).to(DEVICE, dtype)
    d = (torch.randn(6, draft_width, generator=g) * 3).to(DEVICE, dtype)
    tokens, drafted = (torch.randint(0, 270, (6,), generator=g).to(DEVICE) for _ in range(2))
    if temperature == 0:
        drafted = d[:, :size].argmax(-1)  # a draft of probability 0 has no ratio
    got = acceptance(t, d, tokens, temperature, drafted, size)
    for name, expected in reference.acceptance(t, d, tokens, temperature, drafted, size).items():
        a, b = getattr(got, name).double().cpu(), expected.double().cpu().expand(3, 6)
        assert torch.equal(a.isinf(), b.isinf()), name
        assert torch.allclose(a[a.isfinite()], b[b.isfinite()], atol=5e-5, rtol=5e-5), name


def test_equal_logits_accept_exactly():
    """Check 1 in the kernel: a draft with the target's own logits has alpha and ratio of exactly 1 and KL of exactly 0."""
    t = (torch.randn(2, 5, 999, generator=torch.Generator().manual_seed(0)) * 4).to(DEVICE)
    t[1] = t[0]
    tokens = torch.arange(5, device=DEVICE)
    got = acceptance(t, t[0], tokens, 1.0, tokens)
    assert (got.alpha == 1).all() and (got.ratio == 1).all() and (got.kl == 0).all() and got.top1_agrees.all()


def test_ties_take_the_lowest_id():
    """Equal maxima within a run of lanes and across runs: the lowest id is the argmax, of target and draft."""
    t = torch.zeros(2, 3, 700)
    t[:, 0, [5, 6]], t[:, 1, [300, 650]], t[:, 2, [8, 16, 699]] = 4.0, 4.0, 4.0
    got = acceptance(t.to(DEVICE), t[0].to(DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE))
    assert got.top1.tolist() == [[5, 300, 8]] * 2 and got.draft_top1[0].tolist() == [5, 300, 8]


def test_alpha_of_disjoint_rows_is_not_negative_and_low_temperatures_are_exact():
    """alpha of rows without a common id is 0 within its accuracy and never below; T = 0.001 and logits of 30,000 keep the
    tolerance of ordinary ones."""
    g = torch.Generator().manual_seed(0)
    width = 4000
    t, d = torch.randn(1, 4, width, generator=g), torch.randn(4, width, generator=g)
    t[..., ::2], d[..., 1::2] = float("-inf"), float("-inf")
    tokens = torch.ones(4, dtype=torch.long, device=DEVICE)
    alpha = acceptance(t.to(DEVICE), d.to(DEVICE), tokens).alpha
    assert (alpha >= 0).all() and (alpha < 1e-5).all()
    t = torch.randn(2, 4, width, generator=g)
    for scale, temperature, offset in ((1.0, 0.001, 0.0), (1.0, 1.0, 30000.0)):
        x = (t * scale + offset).to(DEVICE)
        got = acceptance(x, x[1], tokens, temperature)
        for name, expected in reference.acceptance(x, x[1], tokens, temperature).items():
            a, b = getattr(got, name).double().cpu(), expected.double().cpu().expand(2, 4)
            assert torch.allclose(a, b, atol=5e-5, rtol=5e-5), (name, temperature, offset)


def test_nan_rows_stay_nan():
    """A NaN logit makes its own row's figures NaN and no other's."""
    t = torch.randn(1, 3, 500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    t[0, 1, 7] = float("nan")
    got = acceptance(t, t[0].nan_to_num(0.0), torch.zeros(3, dtype=torch.long, device=DEVICE))
    for column in (got.alpha, got.kl, got.entropy, got.logp):
        assert column[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("width", "size", "dtype"), [(9, 7, torch.float32), (5000, 5000, torch.bfloat16), (9000, 8193, torch.float32)]
)
def test_draw_inverts_the_cdf(width, size, dtype):
    """The CDF at an id reaches its uniform and the CDF before it does not, ids of probability 0 are never drawn, and a row
    gives the same alone."""
    g = torch.Generator().manual_seed(width)
    rows = 12
    x = (3 * torch.randn(rows, width, generator=g)).to(DEVICE, dtype)
    x[:, 1] = float("-inf")
    x[0, : size - 2] = float("-inf")
    u = torch.rand(rows, generator=g).to(DEVICE)
    u[1], u[2], u[3], u[4] = 0.0, 1 - 2**-24, 1.0, 0.5
    for temperature in (1.0, 0.3):
        ids = draw(x, u, temperature, size)
        p = (x[:, :size].double() / temperature).softmax(-1)
        cdf = p.cumsum(-1)
        at = cdf.gather(1, ids[:, None])[:, 0]
        mine = p.gather(1, ids[:, None])[:, 0]
        assert (mine > 0).all() and (at >= u - 2e-6).all() and (at - mine <= u + 2e-6).all()
        assert ids[1] == 0
        assert torch.equal(draw(x[5:6], u[5:6], temperature, size), ids[5:6])
    with pytest.raises(ValueError, match="not positive"):
        draw(x, u, 0.0)


def test_draw_has_the_distribution_of_the_logits():
    """At 4,000 evenly spaced uniforms each id comes as often as its probability says, to one draw."""
    p = torch.tensor([0.1, 0.0, 0.25, 0.05, 0.6], dtype=torch.float64)
    count = 4000
    logits = p.log().float().expand(count, 5).contiguous().to(DEVICE)
    ids = draw(logits, ((torch.arange(count) + 0.5) / count).to(DEVICE))
    assert (torch.bincount(ids.cpu(), minlength=5) - count * p).abs().max() <= 1
