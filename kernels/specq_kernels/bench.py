"""Kernel benchmark on a CUDA GPU: `make bench-kernels`, or `python -m specq_kernels.bench [store accept replay verify]`.

Attention: geometries of one layer (query heads / KV heads / head_dim), page size 16, pages in random order, CUDA-graph
replays over disjoint page tables several times the L2 cache. Every kernel is checked against a float32 reference before it
is timed. Rates are KV bytes (scales counted) over time, in percent of a device copy's rate in the same run; `of bound` is
the share of the larger of two times, bytes at the copy rate and operations at the bf16 matrix rate. Other kernels
(`baselines`) run side by side where they are installed. Prints a table, and one JSON line last;
studies/results/kernels/ keeps them. `page FILE.json` prints the page there.
"""

import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from specq_kernels import (
    PagedKV,
    acceptance,
    baselines,
    reference,
    replay_attention,
    store_kv,
    verify_attention,
    verify_cuda,
)
from specq_kernels.attention import verify_backend

PAGE = 16
WORKING_SET = 1 << 29  # bytes walked before a page table comes round again: several times the L2 cache
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head")
GEOMETRIES = ((64, 8, 128), (32, 8, 128))  # a layer of Llama-3-70B and of Llama-3-8B
POINTS = tuple((batch, context) for batch in (1, 8, 32) for context in (2048, 8192, 32768))
QUERIES = (1, 4, 5, 8)
TOLERANCE = 3e-3


def graph_time(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Median microseconds of one call: see `graph_times`."""
    return statistics.median(graph_times(calls, repeats))


def graph_times(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Microseconds of one call in every repeat: all calls captured in one CUDA graph, replayed."""
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
    return times


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

    def run(self, which: int, **options: object) -> torch.Tensor:
        """Our kernel on one of the page tables."""
        return verify_attention(
            self.query, self.cache, self.tables[which], self.contexts, self.counts, self.shape[1], **options
        )

    def error(self, out: torch.Tensor, which: int = 0) -> float:
        """||out - ref|| / ||ref|| on the first row."""
        one = reference_row(self, which)
        return float((out[:1].float() - one).norm() / one.norm())

    def time(self, **options: object) -> float:
        """Microseconds of our kernel."""
        return graph_time([lambda i=i: self.run(i, **options) for i in range(self.sets)])


def reference_row(case: Case, which: int) -> torch.Tensor:
    """Float32 attention of the first row."""
    used = case.tables[which][:1]
    small = PagedKV(case.cache.spec, *(t[used[0].long()] if t.numel() else t for t in (
        case.cache.k, case.cache.v, case.cache.k_scale, case.cache.v_scale, case.cache.k_low, case.cache.v_low)),
        case.cache.k_static, case.cache.v_static)  # fmt: skip
    table = torch.arange(used.shape[1], device="cuda", dtype=torch.int32)[None]
    scale = case.shape[5] ** -0.5
    return reference.attention(case.query[:1], small, table, case.contexts[:1], case.counts[:1], scale)


def attention_row(kernel: str, name: str, geometry: tuple, point: tuple, queries: int, us: float, kv_bytes: int,
                  error: float, rates: tuple[float, float], note: str) -> dict:  # fmt: skip
    """One result: microseconds, GB/s, percent of the copy rate and of the bound that bytes and operations give."""
    copy, matrix = rates
    batch, context = point
    heads, kv_heads, dim = geometry
    operations = 4 * batch * heads * queries * context * dim
    bound = max(kv_bytes / copy / 1e3, operations / matrix / 1e6)
    return {
        "kernel": kernel, "format": name, "geometry": "/".join(map(str, geometry)), "batch": batch, "context": context,
        "queries": queries, "us": us, "gb_per_s": kv_bytes / us / 1e3, "percent_of_copy": 100 * kv_bytes / us / 1e3 / copy,
        "percent_of_bound": 100 * bound / us, "error": error, "note": note,
    }  # fmt: skip


def bench_verify(rates: tuple[float, float]) -> list[dict]:
    """Verify attention and its baselines at every point; checked before it is timed."""
    others, absent = baselines.listed()
    for name, reason in absent.items():
        print(f"{name} is left out: {reason}")
    rows = []
    for geometry in GEOMETRIES:
        group = geometry[0] // geometry[1]
        if verify_backend(torch.device("cuda", 0), geometry[2]) == "cuda":
            verify_cuda.build(verify_cuda.configs(FORMATS, geometry[2], group, QUERIES, PAGE))
        for point in POINTS:
            for name in FORMATS:
                for queries in QUERIES:
                    case = Case(name, *point, queries, *geometry)
                    at = (name, geometry, point, queries)
                    backend = verify_backend(torch.device("cuda", 0), geometry[2])
                    for kernel, fill in (("specq", False), ("specq_fill", True))[: 2 if point[0] < 32 else 1]:
                        error = case.error(case.run(0, fill=fill))
                        if not error < TOLERANCE:
                            raise SystemExit(f"{kernel} {name} {geometry} {point} q{queries}: relative error {error}")
                        us = case.time(fill=fill)
                        rows.append(attention_row(kernel, *at, us, case.kv_bytes, error, rates, backend))
                    sets = case.sets
                    del case
                    for other in others:
                        if name in other.formats:
                            rows += _baseline(other, at, sets, rates)
            print_points(rows, geometry, point)
    return rows


def _baseline(cls: type[baselines.Baseline], at: tuple, sets: int, rates: tuple[float, float]) -> list[dict]:
    """The fastest correct variant of one baseline at one point; none where none runs."""
    name, geometry, point, queries = at
    one = cls.build(*point, queries, *geometry, PAGE, sets, name)
    found = []
    for variant in one.variants:
        error = one.check(variant)
        if error < baselines.TOLERANCE[name]:
            us = graph_time([lambda i=i, v=variant: one.run(i, v) for i in range(sets)])
            found.append(attention_row(cls.name, *at, us, one.kv_bytes, error, rates, variant))
        else:
            print(f"{cls.name} {variant} {at}: relative error {error}, not timed")
    return sorted(found, key=lambda r: r["us"])[:1]


def print_points(rows: list[dict], geometry: tuple, point: tuple) -> None:
    """Microseconds (percent of the copy rate) of every kernel and format at one batch x context."""
    for queries in QUERIES:
        cells = [
            f"{r['kernel']} {r['format'].split('_')[0]} {r['us']:.1f} ({r['percent_of_copy']:.0f})"
            for r in rows
            if r["queries"] == queries and (r["batch"], r["context"]) == point
            and r["geometry"] == "/".join(map(str, geometry))
        ]  # fmt: skip
        print(
            f"{geometry[0]}/{geometry[1]}/{geometry[2]} {point[0]}x{point[1]} q{queries}: " + "  ".join(cells),
            flush=True,
        )


def slower(rows: list[dict]) -> list[str]:
    """Points where another kernel of the same format is faster than ours."""
    best: dict[tuple, dict] = {}
    for r in rows:
        key = (r["format"], r["geometry"], r["batch"], r["context"], r["queries"])
        if not r["kernel"].startswith("specq") and (key not in best or r["us"] < best[key]["us"]):
            best[key] = r
    out = []
    for r in rows:
        other = best.get((r["format"], r["geometry"], r["batch"], r["context"], r["queries"]))
        if r["kernel"] == "specq" and other and other["us"] < r["us"]:
            out.append(
                f"{r['geometry']} {r['batch']}x{r['context']} q{r['queries']} {r['format']}: {r['us']:.1f} us, "
                f"{other['kernel']} {other['us']:.1f} us"
            )
    return out


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

        def call(i: int, case: Case = case) -> torch.Tensor:
            return replay_attention(case.query, case.cache, case.tables[i], case.contexts, case.counts, context)

        error = case.error(call(0))
        if not error < TOLERANCE:
            raise SystemExit(f"replay {name}: relative error {error}")
        us = graph_time([lambda i=i: call(i) for i in range(min(4, case.sets))])
        pairs = queries * (context - queries) + queries * (queries + 1) / 2
        share = 100 * 4 * heads * dim * pairs / us / 1e6 / matrix
        rows.append({"kernel": "replay", "format": name, "us": us, "percent_of_matrix_rate": share, "error": error})
    return rows


def bench_growth(contexts: tuple[int, ...] = (256, 4096, 32768)) -> list[dict]:
    """Relative error of verify attention against context length, largest of five random draws."""
    rows = []
    for name in FORMATS:
        for context in contexts:
            errors = [(case := Case(name, 1, context, 4, 64, 8, 128)).error(case.run(0)) for _ in range(5)]
            rows.append({"kernel": "verify", "format": name, "context": context, "error": max(errors)})
    return rows


def describe() -> dict:
    """The machine, for the result file."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "baselines": baselines.versions(),
        "python": platform.python_version(),
        "command": " ".join(["python -m specq_kernels.bench", *sys.argv[1:]]),
    }


def page(result: dict) -> str:
    """The page of studies/results/kernels/, in Markdown, from one result."""
    m, names = result["machine"], ("specq", "specq_fill", "torch_sdpa", "flash_attention_3", "vllm_triton")
    versions = ", ".join(f"{k} {v}" for k, v in {**m["baselines"], "triton": m["triton"], "cuda": m["cuda"]}.items())
    out = [
        "# Kernels: what was measured",
        f"{m['gpu']}, {m['date']}, {versions}, made by `{m['command']}` and printed by `python -m specq_kernels.bench page`.",
        f"Copy by a kernel {result['copy_gb_per_s']:.0f} GB/s (bytes read plus written), bf16 matrix product"
        f" {result['matrix_tflops']:.0f} TFLOP/s.",
        "## Store, acceptance, replay",
        "| kernel | format or arms | µs | share |\n| --- | --- | --- | --- |\n"
        + "\n".join(
            [f"| store, {r['tokens']} tokens | {r['format']} | {r['us']:.1f} | {r['percent_of_copy']:.0f} % of copy |"
             for r in result["store"]]
            + [f"| acceptance, {r['positions']} × {r['width']} | {r['arms']} | {r['us']:.0f} |"
               f" {r['times_reading_once']:.2f} × reading the logits once |" for r in result["accept"]]
            + [f"| replay, 2048 queries at 8192 | {r['format']} | {r['us']:.0f} |"
               f" {r['percent_of_matrix_rate']:.0f} % of matrix rate |" for r in result["replay"]]
        ),
        "Relative error of verify attention against float32 over 256, 4096 and 32768 tokens: "
        + "; ".join(
            f"{f} " + ", ".join(f"{r['error']:.1e}" for r in result["growth"] if r["format"] == f) for f in FORMATS
        ) + ".",
    ]  # fmt: skip
    for geometry in GEOMETRIES:
        shape = "/".join(map(str, geometry))
        out += [
            f"## Verify attention, {shape} (query heads / KV heads / head_dim)",
            "Microseconds (percent of the copy rate in KV bytes). `specq` is the default, whose results do not depend on"
            " the batch; `specq_fill` cuts finer where the batch is small.",
        ]
        lines = [
            "| batch × context | queries | format | " + " | ".join(names) + " |",
            "| --- " * (3 + len(names)) + "|",
        ]
        rows = {}
        for r in result["verify"]:
            if r["geometry"] == shape:
                key = (r["batch"], r["context"], r["queries"], FORMATS.index(r["format"]))
                rows.setdefault(key, {})[r["kernel"]] = r
        for (batch, context, queries, f), found in sorted(rows.items()):
            best = min(found.values(), key=lambda r: r["us"])
            cells = []
            for name in names:
                r = found.get(name)
                text = f"{r['us']:.1f} ({r['percent_of_copy']:.0f})" if r else ""
                cells.append(f"**{text}**" if r is best else text)
            lines.append(f"| {batch} × {context} | {queries} | {FORMATS[f]} | " + " | ".join(cells) + " |")
        out.append("\n".join(lines))
    return "\n\n".join(out) + "\n"


def main(what: list[str]) -> None:
    """Run the named parts and print one JSON line last."""
    if what[:1] == ["page"]:
        print(page(json.loads(Path(what[1]).read_text(encoding="utf-8"))), end="")
        return
    what = what or ["store", "accept", "replay", "growth", "verify"]
    rates = copy_rate(), matrix_rate()
    result: dict = {"machine": describe(), "copy_gb_per_s": rates[0], "matrix_tflops": rates[1]}
    print(f"copy {rates[0]:.0f} GB/s, bf16 matrix product {rates[1]:.0f} TFLOP/s")
    for part, run in (
        ("store", lambda: bench_store(rates[0])),
        ("accept", lambda: bench_acceptance(rates[0])),
        ("replay", lambda: bench_replay(rates[1])),
        ("growth", bench_growth),
        ("verify", lambda: bench_verify(rates)),
    ):
        if part not in what:
            continue
        result[part] = run()
        if part != "verify":
            for row in result[part]:
                print(
                    "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
                    flush=True,
                )
    if "verify" in what:
        result["slower"] = slower(result["verify"])
        print("another kernel is faster at:", *(result["slower"] or ["no point"]), sep="\n  ")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
