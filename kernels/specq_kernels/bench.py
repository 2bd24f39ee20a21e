"""Kernel benchmark on a CUDA GPU: `make bench-kernels`, or `python -m specq_kernels.bench [table sweep store accept replay]`.

Attention: geometry of one layer (query heads / KV heads / head_dim), page size 16, pages in random order, CUDA-graph
replays over disjoint page tables several times the L2 cache. Every kernel is checked against the float32 reference before
it is timed. Rates are KV bytes (scales counted) over time, and percent of a device copy's rate in the same run. Prints a
table, and one JSON line last; studies/results/kernels/ keeps them.
"""

import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from specq_kernels import PagedKV, acceptance, reference, replay_attention, store_kv, verify_attention

PAGE = 16
WORKING_SET = 1 << 29  # bytes walked before a page table comes round again: several times the L2 cache
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head")
SWEPT = ("int8_per_token_head", "fp8_e4m3")


def graph_time(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one call: all calls captured in one CUDA graph, replayed."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


@triton.jit
def _copy_kernel(a, b, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(b + at, tl.load(a + at))


def copy_rate() -> float:
    """GB/s of a large device-to-device copy by a kernel, bytes read plus bytes written.

    A memcpy captured in a graph can go through a copy engine, which is slower than the multiprocessors.
    """
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    call = lambda: _copy_kernel[(a.numel() // 8192,)](a, b, BLOCK=8192, num_warps=8)  # noqa: E731
    return 2 * a.numel() * 4 / graph_time([call] * 2) / 1e3


def matrix_rate() -> float:
    """TFLOP/s of an 8192^3 bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / graph_time([lambda: a @ b] * 4) / 1e6


class Case:
    """Caches and page tables of one operating point in one format: `sets` disjoint copies, filled with random K and V."""

    def __init__(self, name: str, batch: int, context: int, queries: int, heads: int, kv_heads: int, dim: int) -> None:
        self.name, self.shape = name, (batch, context, queries, heads, kv_heads, dim)
        pages_each = batch * triton.cdiv(context, PAGE)
        spec_bytes = {"bf16": 2, "fp8_e4m3": 1}.get(name, 1)
        scale_bytes = 8 if "token" in name else 0
        self.kv_bytes = batch * context * kv_heads * (2 * dim * spec_bytes + scale_bytes)
        self.sets = max(1, min(64, triton.cdiv(WORKING_SET, self.kv_bytes)))
        pages = pages_each * self.sets
        static = 0.02
        self.cache = PagedKV.allocate(name, pages, kv_heads, PAGE, dim, "cuda", static, static)
        order = torch.randperm(pages, device="cuda", dtype=torch.int64).to(torch.int32)
        self.tables = order.view(self.sets, batch, -1)
        for start in range(0, pages * PAGE, 1 << 17):
            slots = torch.arange(start, min(start + (1 << 17), pages * PAGE), device="cuda")
            k, v = (torch.randn(len(slots), kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            store_kv(k, v, self.cache, slots)
        self.query = torch.randn(batch, queries, heads, dim, device="cuda", dtype=torch.bfloat16)
        self.contexts = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.counts = torch.full((batch,), queries, dtype=torch.int32, device="cuda")

    def run(self, which: int, tuning: dict | None = None, chunk: int | None = None) -> torch.Tensor:
        """Our kernel on one of the page tables."""
        return verify_attention(
            self.query, self.cache, self.tables[which], self.contexts, self.counts, self.shape[1], chunk=chunk, tuning=tuning
        )  # fmt: skip

    def error(self, out: torch.Tensor, which: int = 0) -> float:
        """||out - ref|| / ||ref|| on the first row."""
        one = reference_row(self, which)
        return float((out[:1].float() - one).norm() / one.norm())

    def time(self, tuning: dict | None = None, chunk: int | None = None) -> float:
        """Microseconds of our kernel."""
        return graph_time([lambda i=i: self.run(i, tuning, chunk) for i in range(self.sets)])


def reference_row(case: Case, which: int) -> torch.Tensor:
    """Float32 attention of the first row."""
    used = case.tables[which][:1]
    small = PagedKV(case.cache.spec, *(t[used[0].long()] if t.numel() else t for t in (
        case.cache.k, case.cache.v, case.cache.k_scale, case.cache.v_scale, case.cache.k_low, case.cache.v_low)),
        case.cache.k_static, case.cache.v_static)  # fmt: skip
    table = torch.arange(used.shape[1], device="cuda", dtype=torch.int32)[None]
    scale = case.shape[5] ** -0.5
    return reference.attention(case.query[:1], small, table, case.contexts[:1], case.counts[:1], scale)


def sweep(points: list[tuple], geometry: tuple = (64, 8, 128)) -> list[dict]:
    """Tuning: every configuration at a few points; prints the best ones."""
    rate, rows = copy_rate(), []
    print(f"copy {rate:.0f} GB/s")
    grid = [
        (swap, n, warps, stages)
        for swap in (False, True)
        for n in (64, 128, 256)
        for warps in (4, 8)
        for stages in (2, 3)
    ]
    for name in SWEPT:
        for batch, context, queries, chunks in points:
            case = Case(name, batch, context, queries, *geometry)
            found = []
            for swap, n, warps, stages in grid:
                for chunk in chunks:
                    tuning = {"swap": swap, "block_n": n, "warps": warps, "stages": stages}
                    try:
                        if case.error(case.run(0, tuning, chunk)) > 3e-3:
                            print("WRONG", name, tuning, case.error(case.run(0, tuning, chunk)))
                            continue
                        us = case.time(tuning, chunk)
                    except Exception as error:  # a configuration that does not fit is not an answer
                        print("failed", name, tuning, type(error).__name__, str(error)[:80])
                        continue
                    share = 100 * case.kv_bytes / us / 1e3 / rate
                    found.append({"format": name, "batch": batch, "context": context, "queries": queries, "chunk": chunk,
                                  **tuning, "us": us, "percent_of_copy": share})  # fmt: skip
            found.sort(key=lambda r: r["us"])
            rows += found
            for r in found[:3]:
                print(f"{name:20} {batch:3}x{context:5} q{queries} chunk {r['chunk']:5} swap {r['swap']:d} n{r['block_n']:4}"
                      f" w{r['warps']} s{r['stages']} {r['us']:8.1f} us {r['percent_of_copy']:5.1f} %", flush=True)  # fmt: skip
    return rows


def table(rate: float, geometry: tuple = (64, 8, 128)) -> list[dict]:
    """Verify attention with its defaults over the points of the geometry; checked before it is timed."""
    rows = []
    for batch in (1, 8, 32):
        for context in (2048, 8192, 32768):
            for name in FORMATS:
                for queries in (1, 4, 5, 8):
                    case = Case(name, batch, context, queries, *geometry)
                    error = case.error(case.run(0))
                    if not error < 3e-3:
                        raise SystemExit(f"{name} {batch}x{context} q{queries}: relative error {error}")
                    us = case.time()
                    share = 100 * case.kv_bytes / us / 1e3 / rate
                    rows.append({"kernel": "verify", "format": name, "batch": batch, "context": context,
                                 "queries": queries, "us": us, "percent_of_copy": share, "error": error})  # fmt: skip
    return rows


def bench_store(rate: float, tokens: int = 4096, kv_heads: int = 8, dim: int = 128) -> list[dict]:
    """Store at `tokens` tokens: bytes read (bf16 K and V) plus written over time."""
    rows = []
    for name in FORMATS:
        sets, pages = 16, 16 * tokens // PAGE
        cache = PagedKV.allocate(name, pages, kv_heads, PAGE, dim, "cuda", 0.02, 0.02)
        inputs = [
            [torch.randn(tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv"] for _ in range(sets)
        ]
        slots = torch.randperm(pages * PAGE, device="cuda").view(sets, tokens)
        us = graph_time([lambda i=i, c=cache, x=inputs, s=slots: store_kv(*x[i], c, s[i]) for i in range(sets)])
        written = kv_heads * (2 * dim * cache.k.element_size() + (8 if "token" in name else 0))
        moved = tokens * (2 * kv_heads * dim * 2 + written)
        share = 100 * moved / us / 1e3 / rate
        rows.append({"kernel": "store", "format": name, "tokens": tokens, "us": us, "percent_of_copy": share})
    return rows


def bench_acceptance(rate: float, width: int = 128_256, positions: int = 512) -> list[dict]:
    """Acceptance of 1 and 3 arms: time over the time to read both logits once at the copy rate."""
    rows = []
    for arms in (1, 3):
        t = torch.randn(arms, positions, width, device="cuda", dtype=torch.bfloat16)
        d = torch.randn(positions, width, device="cuda", dtype=torch.bfloat16)
        tokens = torch.randint(0, width, (positions,), device="cuda")
        us = graph_time([lambda t=t, d=d, k=tokens: acceptance(t, d, k)] * 2)
        once = (arms + 1) * positions * width * 2 / rate / 1e3
        row = {"kernel": "acceptance", "arms": arms, "positions": positions, "width": width, "us": us}
        rows.append(row | {"times_reading_once": us / once})
    return rows


def bench_replay(matrix: float, context: int = 8192, heads: int = 64, kv_heads: int = 8, dim: int = 128) -> list[dict]:
    """A chunk of 2048 queries at the end of `context` tokens: share of the bf16 matrix rate."""
    rows, queries = [], 2048
    for name in FORMATS:
        case = Case(name, 1, context, queries, heads, kv_heads, dim)
        for tuning in ({}, {"warps": 4}, {"block_n": 128}, {"stages": 2}, {"block_m": 64, "warps": 4}):

            def call(i: int, tuning: dict = tuning, case: Case = case) -> torch.Tensor:
                return replay_attention(
                    case.query, case.cache, case.tables[i], case.contexts, case.counts, context, tuning=tuning
                )

            try:
                us = graph_time([lambda i=i: call(i) for i in range(min(4, case.sets))])
            except Exception as error:
                print("failed", name, tuning, type(error).__name__)
                continue
            pairs = queries * (context - queries) + queries * (queries + 1) / 2
            flops = 4 * heads * dim * pairs
            share = 100 * flops / us / 1e6 / matrix
            rows.append({"kernel": "replay", "format": name, **tuning, "us": us, "percent_of_matrix_rate": share})
    return rows


def describe() -> dict:
    """The machine, for the result file."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": " ".join(["python -m specq_kernels.bench", *sys.argv[1:]]),
    }


def main(what: list[str]) -> None:
    """Run the named parts and print one JSON line last."""
    what = what or ["store", "accept", "replay", "table"]
    result: dict = {"machine": describe()}
    if "sweep" in what:
        points = [(32, 8192, 4, (4096,)), (1, 32768, 4, (1024,)), (32, 8192, 1, (4096,))]
        result["sweep"] = sweep(points)
    if {"store", "accept", "table"} & set(what):
        rate = copy_rate()
        result["copy_gb_per_s"] = rate
        result["store"] = bench_store(rate) if "store" in what else []
        result["acceptance"] = bench_acceptance(rate) if "accept" in what else []
    if "replay" in what:
        result["matrix_tflops"] = matrix_rate()
        result["replay"] = bench_replay(result["matrix_tflops"])
    if "table" in what:
        result["verify"] = table(result["copy_gb_per_s"])
    for part in ("store", "acceptance", "replay", "verify"):
        for row in result.get(part, []):
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
