"""Step times of a registered pair's shape with random weights, by specq's own kernels, on one GPU or tensor parallel.

    torchrun --nproc-per-node 2 studies/step_times.py --pair llama70b-1b --out DIR     measure: timings.json, machine.json
    python studies/step_times.py --pair llama70b-1b --page DIR                          page and plot from those

One decoder layer of each GPU's share (norms, products, rotary embedding, store, attention, all-reduces) runs in CUDA graphs
over weights and pages larger than the L2 cache; a step is its time times the number of layers, plus the LM head with the
gather of its logits. No scheduler, sampler or launch is in it: what an engine adds comes on top. `--cost` reads timings.json.
"""

import argparse
import datetime
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from specq import pairs
from specq.cost.calibration import fit
from specq.cost.gpus import get_gpu
from specq.cost.roofline import Roofline
from specq.cost.table import TableCost, Timing, read_records
from specq.kv import get_format
from specq.pairs import Shape
from specq.shape import ModelShape

BATCHES, CONTEXTS, NEW = (1, 4, 8, 16, 32, 64), (2048, 8192, 32768), (1, 2, 3, 5, 9)
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head")
PAGE, MEMORY = 16, 0.92 * 141e9  # bytes of one H200 that an engine would use
ALPHAS, K_MAX = (0.6, 0.7, 0.8, 0.9), 8


def fits(shapes: dict, gpus: int, fmt: str, batch: int, context: int) -> bool:
    """Whether weights of both models, the target's cache and the draft's in BF16 fit the GPUs."""
    weights = sum(2 * s.parameters for s in shapes.values())
    return (weights + batch * (context + NEW[-1]) * sum(kv_bytes(shapes, fmt).values())) / gpus < MEMORY


def kv_bytes(shapes: dict, fmt: str) -> dict:
    """KV bytes per token of target (in `fmt`) and draft (BF16)."""
    return {
        role: sum(ModelShape.of_registered(s).kv_bytes(get_format(fmt if role == "target" else "bf16"), 1))
        for role, s in shapes.items()
    }


class Share:
    """What one of n tensor-parallel GPUs holds of a model: `copies` layers' weights and the LM head's."""

    def __init__(self, shape: Shape, gpus: int, copies: int) -> None:
        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5

        self.shape, self.gpus = shape, gpus
        self.heads, self.kv_heads, self.dim = shape.heads // gpus, shape.kv_heads // gpus, shape.head_dim
        hidden, inner = shape.hidden, shape.intermediate // gpus
        self.layers = [
            {
                "norms": torch.ones(2, hidden, device="cuda", dtype=torch.bfloat16),
                "qkv": random((self.heads + 2 * self.kv_heads) * self.dim, hidden),
                "out": random(hidden, self.heads * self.dim),
                "up": random(2 * inner, hidden),
                "down": random(hidden, inner),
            }
            for _ in range(copies)
        ]
        self.head = random(shape.vocab // gpus, hidden)

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """Summed over the GPUs."""
        if self.gpus > 1:
            dist.all_reduce(x)
        return x

    def layer(self, x: torch.Tensor, i: int, state: dict) -> torch.Tensor:
        """One decoder layer over `x` [tokens, hidden] and the pages of `state`."""
        from specq_kernels import store_kv, verify_attention

        w, tokens, hidden = self.layers[i % len(self.layers)], len(x), x.shape[1]
        h = F.rms_norm(x, (hidden,), w["norms"][0])
        q, k, v = (h @ w["qkv"].T).view(tokens, -1, self.dim).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (rotated(t, state["cos"], state["sin"]) for t in (q, k))
        store_kv(k, v, state["cache"], state["slots"])
        q = q.view(state["batch"], -1, self.heads, self.dim)
        out = verify_attention(
            q, state["cache"], state["table"], state["contexts"], state["counts"], state["longest"], fill=True
        )
        x = x + self.reduced(out.reshape(tokens, -1) @ w["out"].T)
        gate, up = (F.rms_norm(x, (hidden,), w["norms"][1]) @ w["up"].T).chunk(2, dim=1)
        return x + self.reduced((F.silu(gate) * up) @ w["down"].T)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab] on every GPU."""
        mine = x @ self.head.T
        if self.gpus == 1:
            return mine
        out = torch.empty(self.gpus * len(x), mine.shape[1], device="cuda", dtype=mine.dtype)
        dist.all_gather_into_tensor(out, mine)
        return out


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def pages(share: Share, fmt: str, batch: int, context: int) -> tuple:
    """(pages filled with random K and V, block table in random order) with room for the new tokens."""
    from specq_kernels import PagedKV, store_kv

    each = -(-(context + NEW[-1]) // PAGE)
    cache = PagedKV.allocate(fmt, batch * each, share.kv_heads, PAGE, share.dim, "cuda", 0.02, 0.02)
    for at in range(0, batch * each * PAGE, 1 << 17):
        slots = torch.arange(at, min(at + (1 << 17), batch * each * PAGE), device="cuda")
        k, v = (torch.randn(len(slots), share.kv_heads, share.dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        store_kv(k, v, cache, slots)
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32)
    return cache, order.view(batch, each)


def step_seconds(share: Share, cache: object, table: object, batch: int, context: int, new: int) -> float:
    """Seconds of one step of `new` tokens a row."""
    from specq_kernels.bench import graph_time

    at = context + torch.arange(new, device="cuda").repeat(batch, 1)
    slots = (table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()
    angle = torch.randn(batch * new, 1, share.dim // 2, device="cuda")
    state = {
        "cache": cache, "table": table, "batch": batch, "slots": slots, "longest": context + new,
        "contexts": torch.full((batch,), context + new, dtype=torch.int32, device="cuda"),
        "counts": torch.full((batch,), new, dtype=torch.int32, device="cuda"),
        "cos": angle.cos().bfloat16(), "sin": angle.sin().bfloat16(),
    }  # fmt: skip
    x = torch.randn(batch * new, share.shape.hidden, device="cuda", dtype=torch.bfloat16)
    repeats = max(2, len(share.layers))
    layer = graph_time([lambda i=i: share.layer(x, i, state) for i in range(repeats)], repeats=5)
    head = graph_time([lambda: share.logits(x)] * 2, repeats=5)
    return (layer * share.shape.layers + head) / 1e6


def memory(shapes: dict, gpus: int) -> list[dict]:
    """Bytes that one GPU's share of the target's weights and caches really takes, beside what capacity says."""
    from specq_kernels import PagedKV

    found, target = [], shapes["target"]
    for fmt in FORMATS:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        kept = [
            PagedKV.allocate(fmt, 8 * 8192 // PAGE, target.kv_heads // gpus, PAGE, target.head_dim, "cuda", 1.0, 1.0)
            for _ in range(target.layers)
        ]
        measured = torch.cuda.memory_allocated() - before
        del kept
        told = 8 * 8192 * kv_bytes(shapes, fmt)["target"] / gpus
        found.append({"kv_format": fmt, "batch": 8, "context": 8192, "measured": measured, "capacity": told})
    return found


def measure(pair: str, out: Path) -> None:
    """See the module; every rank runs this, the first writes."""
    from specq_kernels import verify_cuda
    from specq_kernels.attention import verify_backend

    rank, gpus = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(rank)
    if gpus > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    found = pairs.find(pair, None, None)
    shapes = {"target": found.target.shape, "draft": found.draft.shape}
    records, left_out = [], []
    with torch.inference_mode():
        sizes = memory(shapes, gpus)
        for role, copies in (("target", 2), ("draft", 4)):
            share = Share(shapes[role], gpus, copies)
            if verify_backend(torch.device("cuda", rank), share.dim) == "cuda":  # all compiled at once, not one by one
                verify_cuda.build(verify_cuda.configs(FORMATS, share.dim, share.heads // share.kv_heads, NEW, PAGE))
            for fmt in FORMATS if role == "target" else ("bf16",):
                for context in CONTEXTS:
                    for batch in BATCHES:
                        if not fits(shapes, gpus, fmt if role == "target" else "fp8_e4m3", batch, context):
                            left_out.append([role, fmt, batch, context])
                            continue
                        cache, table = pages(share, fmt, batch, context)
                        for new in NEW if role == "target" else NEW[:2]:
                            seconds = step_seconds(share, cache, table, batch, context, new)
                            records.append(
                                {"kind": role, "batch": batch, "context": context, "new_tokens": new, "kv_format": fmt,
                                 "seconds": seconds}
                            )  # fmt: skip
                        del cache, table
            del share
            torch.cuda.empty_cache()
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "timings.json").write_text(json.dumps({"records": records}, indent=0) + "\n")
        machine = {
            "pair": pair, "gpus": gpus, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": f"torchrun --nproc-per-node {gpus} studies/step_times.py --pair {pair}",
            "memory": sizes, "do_not_fit": left_out,
        }  # fmt: skip
        (out / "machine.json").write_text(json.dumps(machine, indent=1) + "\n")
        print(f"{len(records)} step times, {len(left_out)} points do not fit")
    if gpus > 1:
        dist.destroy_process_group()


def survival(alpha: float) -> np.ndarray:
    """S_1..S_K of independent acceptance at alpha."""
    return alpha ** np.arange(1, K_MAX + 1)


def gains(cost: TableCost, fmt: str, batch: int, context: int, alpha: float) -> np.ndarray:
    """Speedup over plain decoding in the same format at K = 0..K_MAX, for independent acceptance (DESIGN's formula)."""
    plain, draft = cost.step_time("target", batch, context, 1, fmt), cost.step_time("draft", batch, context, 1, "bf16")
    cycles = [k * draft + cost.step_time("target", batch, context, k + 1, fmt) for k in range(K_MAX + 1)]
    return (1 + np.concatenate([[0.0], survival(alpha).cumsum()])) * plain / np.array(cycles)


def page(pair: str, folder: Path) -> None:
    """README.md, calibrated.json and speedup.png from timings.json and machine.json."""
    machine = json.loads((folder / "machine.json").read_text())
    records, _ = read_records(str(folder / "timings.json"))
    table = TableCost(records, "timings.json", {})
    found = pairs.find(pair, None, None)
    shapes = {r: ModelShape.of_registered(s.shape) for r, s in (("target", found.target), ("draft", found.draft))}
    gpu = get_gpu("h200")
    calibration = fit(records, shapes, gpu, machine["gpus"], "timings.json")
    roofline = Roofline(gpu, *shapes.values(), machine["gpus"])
    fitted = Roofline(replace(gpu, efficiency=calibration.efficiency), *shapes.values(), machine["gpus"])
    factors = asdict(calibration.efficiency)
    (folder / "calibrated.json").write_text(json.dumps(factors, indent=1) + "\n")

    def error(model: Roofline, r: Timing) -> float:
        return model.step_time(r.kind, r.batch, r.context, r.new_tokens, r.kv_format) / r.seconds - 1

    lines = [
        f"# Step times of {pair}",
        "",
        f"{machine['gpus']} x {machine['gpu']}, tensor parallel, torch {machine['torch']}, NCCL {machine['nccl']},"
        f" {machine['date']}; `{machine['command']}`.",
        "Random weights; a step is one layer's time in CUDA graphs times the layers, plus the LM head: no scheduler, no",
        "sampler, no launches.",
        "",
        "## Memory of one GPU's cache, 8 sequences of 8,192 tokens",
        "",
        "| KV cache | measured | `specq capacity` |",
        "| --- | --- | --- |",
        *(
            f"| {m['kv_format']} | {m['measured'] / 1e9:.3f} GB | {m['capacity'] / 1e9:.3f} GB |"
            for m in machine["memory"]
        ),
        "",
        "## Milliseconds of a step: plain decoding (1 new token) and verification of K = 4 (5), and what the roofline says",
        "",
        "| batch x context | "
        + " | ".join(f"{f}: 1, 5 new (roofline, calibrated)" for f in FORMATS)
        + " | draft, 1 new |",
        "| --- |" + " --- |" * (len(FORMATS) + 1),
    ]
    times = {(r.kind, r.kv_format, r.batch, r.context, r.new_tokens): r for r in records}
    for context in CONTEXTS:
        for batch in BATCHES:
            cells = []
            for fmt in FORMATS:
                mine = [times.get(("target", fmt, batch, context, n)) for n in (1, 5)]
                shown = [
                    f"{1e3 * r.seconds:.2f} ({100 * error(roofline, r):+.0f}, {100 * error(fitted, r):+.0f} %)"
                    for r in mine
                    if r
                ]
                cells.append(", ".join(shown) or "does not fit")
            draft = times.get(("draft", "bf16", batch, context, 1))
            cells.append(f"{1e3 * draft.seconds:.2f}" if draft else "")
            if set(cells[:-1]) != {"does not fit"}:
                lines.append(f"| {batch} x {context} | " + " | ".join(cells) + " |")
    e, before = np.array([error(fitted, r) for r in records]), np.array([error(roofline, r) for r in records])
    lines += [
        "",
        f"Over {len(records)} points the roofline's relative error is {100 * np.sqrt((before**2).mean()):.0f} % (root mean"
        f" square; largest {100 * np.abs(before).max():.0f} %), calibrated on them {100 * np.sqrt((e**2).mean()):.0f} %"
        f" ({100 * np.abs(e).max():.0f} %): bandwidth x {factors['bandwidth']:.2f}, matrix rate x {factors['matrix']:.2f},"
        f" {1e6 * factors['layer_seconds']:.1f} microseconds a layer, {1e6 * factors['step_seconds']:.0f} a step"
        " (calibrated.json).",
        "",
        "## Best K and speedup over plain decoding in the same format, if each draft is accepted with probability alpha",
        "",
        "| batch x context | KV cache | " + " | ".join(f"alpha {a}" for a in ALPHAS) + " |",
        "| --- | --- |" + " --- |" * len(ALPHAS),
    ]
    for context in CONTEXTS:
        for batch in BATCHES:
            for fmt in FORMATS:
                if ("target", fmt, batch, context, 9) in times and ("draft", "bf16", batch, context, 1) in times:
                    curves = [gains(table, fmt, batch, context, a) for a in ALPHAS]
                    best = " | ".join(f"K = {g.argmax()}, {g.max():.2f}" for g in curves)
                    lines.append(f"| {batch} x {context} | {fmt} | {best} |")
    lines += ["", "![speedup against K](speedup.png)"]
    (folder / "README.md").write_text("\n".join(lines) + "\n")
    plot(table, times, folder / "speedup.png")


def plot(table: TableCost, times: dict, path: Path) -> None:
    """Speedup against K at alpha 0.8, a panel per context, a line per batch and format."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(CONTEXTS), figsize=(13, 4.2), sharey=True)
    styles = dict(zip(FORMATS, ("-", "--", ":"), strict=True))
    for axis, context in zip(axes, CONTEXTS, strict=True):
        for colour, batch in enumerate(b for b in BATCHES if b in (1, 8, 32, 64)):
            for fmt, style in styles.items():
                if ("target", fmt, batch, context, 9) not in times:
                    continue
                curve = gains(table, fmt, batch, context, 0.8)
                axis.plot(range(K_MAX + 1), curve, style, color=f"C{colour}", label=f"batch {batch}, {fmt}")
        axis.set(title=f"context {context:,}", xlabel="num_speculative_tokens")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    axes[0].set_ylabel("speedup over plain decoding, same format (alpha 0.8)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="llama70b-1b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.out:
        measure(args.pair, args.out)
    if args.page:
        page(args.pair, args.page)


if __name__ == "__main__":
    main()
