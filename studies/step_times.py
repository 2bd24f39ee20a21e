"""Step times of a registered pair's shape with random weights, by specq's own kernels, on one GPU or tensor parallel.

    torchrun --nproc-per-node 2 studies/step_times.py --pair llama70b-1b --out DIR     measure: timings.json, machine.json
    python studies/step_times.py --pair llama70b-1b --share 2 --out DIR                the same of one of 2 GPUs, by itself
    python studies/step_times.py --pair llama70b-1b --page DIR                         page and plot from those

One decoder layer of each GPU's share (norms, products, rotary embedding, store, attention, all-reduces) runs in CUDA graphs
over weights and pages larger than the L2 cache; a step is its time times the number of layers, plus the LM head with the
gather of its logits. No scheduler, sampler or launch is in it: what an engine adds comes on top. `--cost` reads timings.json.

`--share N` measures on one GPU what one of N does between its all-reduces: times without communication, which calibrate
`--cost roofline:NxGPU@timings.json`. The page then adds the communication by the data sheet. Files are written after every
(model, format, context); the same command with the same DIR goes on where it was stopped.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from specq import files, pairs
from specq.cost import Operating, cycle_times, speedup
from specq.cost.calibration import Calibration, fit
from specq.cost.gpus import get_gpu
from specq.cost.roofline import Roofline
from specq.cost.table import TableCost, Timing, TimingFile, read_file
from specq.errors import SpecqError, printable
from specq.kv import get_format
from specq.pairs import Shape
from specq.shape import ModelShape
from studies.common.curves import best_k, emitted
from studies.common.steps import Steps, whole_steps

BATCHES, CONTEXTS, NEW = (1, 4, 8, 16, 32, 64), (2048, 8192, 32768), (1, 2, 3, 5, 9)
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head")
PAGE, MEMORY = 16, 0.92 * 141e9  # bytes of one H200 that an engine would use
ALPHAS, K_MAX = (0.6, 0.7, 0.8, 0.9), 8
COPIES = {"target": 2, "draft": 4}  # layers whose weights exist: more bytes than the L2 cache holds
# formats and new tokens per row; a draft's step has one, or two after a cycle whose drafts were all accepted
TIMED = {"target": (FORMATS, NEW), "draft": (FORMATS[:1], NEW[:2])}
DEVICE = "cuda"
CALLS, REPEATS = 16, 9  # layers in one graph, so that its start weighs little, and how often it is timed
Group = tuple[str, str, int]  # model, KV format, context: what is measured and written together


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


def groups() -> list[Group]:
    """All of them, in the order in which they are measured."""
    return [(role, fmt, context) for role, (formats, _) in TIMED.items() for fmt in formats for context in CONTEXTS]


def fitting(shapes: dict, gpus: int, group: Group) -> list[int]:
    """The batches that fit the GPUs; a draft's where the target's cache is in the smallest format."""
    role, fmt, context = group
    return [b for b in BATCHES if fits(shapes, gpus, fmt if role == "target" else "fp8_e4m3", b, context)]


def check_divides(shapes: dict, gpus: int) -> None:
    """Raises SpecqError where a model cannot be cut into equal shares."""
    for role, s in shapes.items():
        for name in ("heads", "kv_heads", "intermediate", "vocab"):
            if getattr(s, name) % gpus:
                raise SpecqError(f"the {role}'s {name} ({getattr(s, name)}) cannot be divided over {gpus} GPUs")


class Share:
    """What one of n tensor-parallel GPUs holds of a model: `copies` layers' weights and the LM head's."""

    def __init__(self, shape: Shape, gpus: int, copies: int) -> None:
        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16) * size[-1] ** -0.5

        self.shape, self.gpus = shape, gpus
        self.heads, self.kv_heads, self.dim = shape.heads // gpus, shape.kv_heads // gpus, shape.head_dim
        hidden, inner = shape.hidden, shape.intermediate // gpus
        self.layers = [
            {
                "norms": torch.ones(2, hidden, device=DEVICE, dtype=torch.bfloat16),
                "qkv": random((self.heads + 2 * self.kv_heads) * self.dim, hidden),
                "out": random(hidden, self.heads * self.dim),
                "up": random(2 * inner, hidden),
                "down": random(hidden, inner),
            }
            for _ in range(copies)
        ]
        self.head = random(shape.vocab // gpus, hidden)

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """Summed over the GPUs, where the others are there."""
        if dist.is_initialized():
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
        """Logits on every GPU, gathered; this one's columns of them where there is no other."""
        mine = x @ self.head.T
        if not dist.is_initialized():
            return mine
        out = torch.empty(self.gpus * len(x), mine.shape[1], device=DEVICE, dtype=mine.dtype)
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
    cache = PagedKV.allocate(fmt, batch * each, share.kv_heads, PAGE, share.dim, DEVICE, 0.02, 0.02)
    for at in range(0, batch * each * PAGE, 1 << 17):
        slots = torch.arange(at, min(at + (1 << 17), batch * each * PAGE), device=DEVICE)
        k, v = (torch.randn(len(slots), share.kv_heads, share.dim, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
        store_kv(k, v, cache, slots)
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.int32)
    return cache, order.view(batch, each)


def layers_seconds(share: Share, cache: object, table: object, batch: int, context: int, new: int) -> float:
    """Seconds of all layers in one step of `new` tokens a row."""
    from specq_kernels.bench import graph_time

    at = context + torch.arange(new, device=DEVICE).repeat(batch, 1)
    slots = (table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()
    angle = torch.randn(batch * new, 1, share.dim // 2, device=DEVICE)
    state = {
        "cache": cache, "table": table, "batch": batch, "slots": slots, "longest": context + new,
        "contexts": torch.full((batch,), context + new, dtype=torch.int32, device=DEVICE),
        "counts": torch.full((batch,), new, dtype=torch.int32, device=DEVICE),
        "cos": angle.cos().bfloat16(), "sin": angle.sin().bfloat16(),
    }  # fmt: skip
    x = torch.randn(batch * new, share.shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    layer = graph_time([lambda i=i: share.layer(x, i, state) for i in range(CALLS)], REPEATS)
    return layer * share.shape.layers / 1e6


def head_seconds(share: Share, tokens: int) -> float:
    """Seconds of the LM head over `tokens` tokens."""
    from specq_kernels.bench import graph_time

    x = torch.randn(tokens, share.shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    return graph_time([lambda: share.logits(x)] * CALLS, REPEATS) / 1e6


def memory(shapes: dict, gpus: int) -> list[dict]:
    """Bytes that one GPU's share of the target's weights and caches really takes, beside what capacity says."""
    from specq_kernels import PagedKV

    found, target = [], shapes["target"]
    for fmt in FORMATS:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        kept = [
            PagedKV.allocate(fmt, 8 * 8192 // PAGE, target.kv_heads // gpus, PAGE, target.head_dim, DEVICE, 1.0, 1.0)
            for _ in range(target.layers)
        ]
        measured = torch.cuda.memory_allocated() - before
        del kept
        told = 8 * 8192 * kv_bytes(shapes, fmt)["target"] / gpus
        found.append({"kv_format": fmt, "batch": 8, "context": 8192, "measured": measured, "capacity": told})
    return found


def compile_kernels(share: Share, formats: Sequence[str], queries: Sequence[int]) -> str:
    """Compiles the CUDA kernels of a share at once, in parallel; says which attention kernel is the one measured."""
    from specq_kernels import native, store_cuda, verify_cuda
    from specq_kernels.attention import verify_backend
    from specq_kernels.layout import SPECS

    here = torch.device(DEVICE)
    if verify_backend(here, share.dim) == "cuda":
        wanted = verify_cuda.configs(formats, share.dim, share.heads // share.kv_heads, queries, PAGE)
        wanted = [c for c in wanted if c.cluster > 1]  # contexts of more than one chunk
        codes = [SPECS[f] for f in formats if f != "bf16"]
        with ThreadPoolExecutor() as pool, contextlib.suppress(native.BuildError):
            store = [pool.submit(store_cuda.library, s, share.dim, PAGE, native.architecture(here)) for s in codes]
            verify_cuda.build(wanted)
            for future in store:
                future.result()
    return verify_backend(here, share.dim)


def describe(pair: str, gpus: int, share_of: int | None, attention: dict) -> dict:
    """What must be the same for times to stand in one file."""
    import triton

    start = f"torchrun --nproc-per-node {gpus}" if gpus > 1 else "python"
    options = f" --share {share_of}" if share_of else ""
    return {
        "pair": pair, "gpus": gpus, "share_of": share_of, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "attention": attention, "command": f"{start} studies/step_times.py --pair {pair}{options} --out DIR",
    }  # fmt: skip


def resumed(folder: Path, machine: dict) -> list[dict]:
    """The records that an earlier run left in `folder`. Raises SpecqError where another machine or command made them."""
    if not (folder / "machine.json").exists():
        if (folder / "timings.json").exists():
            raise SpecqError(f"{folder} holds timings of an unknown machine: give another --out")
        return []
    before = files.read_json(folder / "machine.json")
    for key, value in machine.items():
        if before.get(key) != value:
            raise SpecqError(
                f"{folder} was measured with {key} = {before.get(key)}, here it is {value}: give another --out"
            )
    if not (folder / "timings.json").exists():
        return []
    return [r.model_dump(exclude={"repeats"}) for r in read_file(str(folder / "timings.json")).records]


def missing(records: Sequence[dict], shapes: dict, gpus: int, group: Group) -> dict[int, list[int]]:
    """New tokens that are still to be timed in a group, by batch."""
    role, fmt, context = group
    have = {
        (r["batch"], r["new_tokens"])
        for r in records
        if (r["kind"], r["kv_format"], r["context"]) == (role, fmt, context)
    }
    left = {b: [n for n in TIMED[role][1] if (b, n) not in have] for b in fitting(shapes, gpus, group)}
    return {b: new for b, new in left.items() if new}


def timings_text(records: Sequence[dict], share_of: int | None) -> str:
    """timings.json, a record a line."""
    lines = ",\n".join(json.dumps(r) for r in records)
    return f'{{"share_of": {json.dumps(share_of)}, "records": [\n{lines}\n]}}\n'


def measure(pair: str, out: Path, share_of: int | None) -> None:
    """See the module; every rank runs this, the first writes."""
    began = time.perf_counter()
    rank, gpus = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if share_of and gpus > 1:
        raise SpecqError(f"--share is for one GPU by itself; here are {gpus}")
    over = share_of or gpus
    found = pairs.find(pair, None, None)
    shapes = {"target": found.target.shape, "draft": found.draft.shape}
    check_divides(shapes, over)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    if gpus > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)

    def say(what: str) -> None:
        if rank == 0:
            print(f"{time.perf_counter() - began:5.0f} s  {what}", flush=True)

    with torch.inference_mode():
        shares = {role: Share(shapes[role], over, COPIES[role]) for role in shapes}
        attention = {role: compile_kernels(s, *TIMED[role]) for role, s in shares.items()}
        say("kernels: " + ", ".join(f"{role} {kind}" for role, kind in attention.items()))
        machine = describe(pair, gpus, share_of, attention)
        records = resumed(out, machine)
        if rank == 0 and not (out / "machine.json").exists():
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            out.mkdir(parents=True, exist_ok=True)
            files.write_json(out / "machine.json", machine | {"date": date, "memory": memory(shapes, over)})
        heads = {role: functools.cache(functools.partial(head_seconds, share)) for role, share in shares.items()}
        for group in groups():
            role, fmt, context = group
            left = missing(records, shapes, over, group)
            for batch, new in left.items():
                cache, table = pages(shares[role], fmt, batch, context)
                for n in new:
                    seconds = layers_seconds(shares[role], cache, table, batch, context, n) + heads[role](batch * n)
                    at = {"kind": role, "batch": batch, "context": context, "new_tokens": n, "kv_format": fmt}
                    records.append(at | {"seconds": round(seconds, 9)})
                del cache, table
            if rank == 0 and left:
                files.write_text(out / "timings.json", timings_text(records, share_of))
                say(f"{role} {fmt}, context {context:,}: {sum(map(len, left.values()))} step times")
    say(f"{len(records)} step times in {out}")
    if gpus > 1:
        dist.destroy_process_group()


def gains(cost: TableCost, fmt: str, batch: int, context: int, alpha: float) -> np.ndarray:
    """Speedup over plain decoding in the same format at K = 0..K_MAX, if each draft is accepted with probability alpha."""
    return speedup(emitted(alpha, K_MAX), cycle_times(cost, Operating(batch, context, fmt, "bf16"), K_MAX))


def page(pair: str, folder: Path) -> None:
    """README.md, calibrated.json, roofline.csv and speed.png from timings.json and machine.json."""
    machine, file = files.read_json(folder / "machine.json"), read_file(str(folder / "timings.json"))
    records, over = file.records, file.share_of or machine["gpus"]
    found = pairs.find(pair, None, None)
    registered = {"target": found.target.shape, "draft": found.draft.shape}
    shapes = {role: ModelShape.of_registered(s) for role, s in registered.items()}
    gpu = get_gpu("h200")
    calibration = fit(records, shapes, gpu, over, "timings.json", file.share_of)
    roofline = Roofline(gpu, *shapes.values(), over)
    fitted = Roofline(gpu, *shapes.values(), over, calibration)
    files.write_json(folder / "calibrated.json", asdict(calibration.efficiency))
    before, after = ({key(r): e for r, e in zip(records, errors(m, file), strict=True)} for m in (roofline, fitted))
    steps = Steps(file, roofline)
    table = steps.cost
    times = {key(r): r for r in records}
    lines = [
        f"# Step times of {pair}",
        "",
        *header(machine, over),
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
        *left_out(registered, over, records),
        "",
        *times_section(times, before, after, file.share_of),
        "",
        *calibration_section(calibration, times, before, after),
        "",
        "## Best K and speedup over plain decoding in the same format, if each draft is accepted with probability alpha",
        "",
        f"K is the smallest within 1 % of the best, up to {K_MAX}, the largest that was timed (where {K_MAX} stands, more may"
        f" be better); behind it the best speedup. Times between {', '.join(map(str, NEW))} new tokens are interpolated; the"
        " draft's cache is BF16.",
        "",
        *(added_section(steps) if file.share_of else []),
        *gains_section(table, times),
        "",
        "![tokens per second against K](speed.png)",
    ]
    files.write_text(folder / "roofline.csv", points_csv(times, before, after))
    files.write_text(folder / "README.md", "\n".join(map(wrapped, lines)) + "\n")
    whose = f"one GPU's share of {over}, measured on one {machine['gpu']}, and assumed communication"
    plot(table, times, folder / "speed.png", f"alpha 0.8, {whose if file.share_of else f'{over} x ' + machine['gpu']}")


def wrapped(line: str) -> str:
    """A paragraph at 120 columns; tables, headings and pictures as they are."""
    return line if line.startswith(("|", "#", "!")) else textwrap.fill(line, 120, break_on_hyphens=False)


def key(r: Timing) -> tuple:
    """What a timing is of."""
    return r.kind, r.kv_format, r.batch, r.context, r.new_tokens


def errors(roofline: Roofline, file: TimingFile) -> np.ndarray:
    """Relative error of the roofline at every timing: steps beside steps, a share beside the same share."""
    terms = [roofline.terms(r.kind, r.batch, r.context, r.new_tokens, r.kv_format) for r in file.records]
    told = [(t.alone if file.share_of else t.seconds)(roofline.efficiency) for t in terms]
    return np.array(told) / np.array([r.seconds for r in file.records]) - 1


def header(machine: dict, over: int) -> list[str]:
    """What was measured, on what, and what is not in it."""
    made = (
        f"torch {machine['torch']}, triton {machine['triton']}, CUDA {machine['cuda']}, NCCL {machine['nccl']},"
        f" {machine['date']}; `{machine['command']}`."
    )
    kernels = ", ".join(f"{role} {kind}" for role, kind in machine["attention"].items())
    what = (
        "Random weights; a step is one layer's time in CUDA graphs times the layers, plus the LM head: no scheduler, no"
        f" sampler, no launches. Attention kernels: {kernels}."
    )
    if not machine["share_of"]:
        return [f"{machine['gpus']} x {machine['gpu']}, tensor parallel, {made}", what]
    return [
        f"One {machine['gpu']}, {made}",
        what,
        "",
        f"**Measured is one GPU's share of {over} tensor-parallel GPUs, by itself: heads, KV heads, MLP and vocabulary divided"
        f" by {over}, no all-reduce and no gather of logits. No step over {over} GPUs was measured.** Step times, memory and"
        " the roofline's errors here compare share with share; only the last section adds communication, by assumed factors.",
    ]


def left_out(shapes: dict, gpus: int, records: Sequence[Timing]) -> list[str]:
    """The points that a server of these GPUs could not hold, and those that a stopped run has not come to."""
    found = []
    for role, fmt, context in groups():
        if role == "target" and (large := sorted(set(BATCHES) - set(fitting(shapes, gpus, (role, fmt, context))))):
            found.append(f"{fmt} {', '.join(map(str, large))} x {context}")
    room = f"{gpus} x {MEMORY / 1e9:.0f} GB"
    what = f"Not measured, since weights and caches of both models do not fit {room} (batch x context): "
    lines = [what + "; ".join(found) + "."] if found else [f"Every point fits {room}."]
    have = [r.model_dump() for r in records]
    if later := [g for g in groups() if missing(have, shapes, gpus, g)]:
        lines += [
            "",
            "Not measured yet: " + "; ".join(f"{role} {fmt} at {context}" for role, fmt, context in later) + ".",
        ]
    return lines


def times_section(times: dict, before: dict, after: dict, share_of: int | None) -> list[str]:
    """Times of a step beside the roofline's errors, assumed and calibrated."""
    whose = f"one GPU's share (1/{share_of}) of a step, without communication" if share_of else "a step"
    lines = [
        f"## Milliseconds of {whose}: plain decoding (1 new token) and verification of K = 4 (5)",
        "",
        "Behind each time: how far the roofline is off with assumed factors, and calibrated.",
        "",
        "| batch x context | " + " | ".join(f"{f}: 1, 5 new" for f in FORMATS) + " | draft, 1 new |",
        "| --- |" + " --- |" * (len(FORMATS) + 1),
    ]

    def cell(*at: object) -> str | None:
        if at not in times:
            return None
        return f"{1e3 * times[at].seconds:.2f} ({100 * before[at]:+.0f}, {100 * after[at]:+.0f} %)"

    for context in CONTEXTS:
        for batch in BATCHES:
            mine = [[cell("target", fmt, batch, context, n) for n in (1, 5)] for fmt in FORMATS]
            cells = [", ".join(filter(None, pair)) or "-" for pair in mine]
            cells.append(cell("draft", "bf16", batch, context, 1) or "-")
            if set(cells) != {"-"}:
                lines.append(f"| {batch} x {context} | " + " | ".join(cells) + " |")
    return lines


def calibration_section(calibration: Calibration, times: dict, before: dict, after: dict) -> list[str]:
    """The factors found, and the roofline's errors over all points: by new tokens, of a format's ratio, of speedups."""
    e = calibration.efficiency
    unknown = (
        f" Not determined by the times: {', '.join(calibration.undetermined)}." if calibration.undetermined else ""
    )
    ratios = [format_ratio_error(after, at) for at in after if at[1] != "bf16" and of_bf16(at) in after]
    rows = [("target", f"{n} new" if n == 1 else f"{n} new (K = {n - 1})", n) for n in NEW]
    rows += [("draft", "draft, 1 new", 1)]
    return [
        f"## The roofline beside all {len(after)} points",
        "",
        f"Calibrated: bandwidth x {e.bandwidth:.2f}, matrix rate x {e.matrix:.2f} in products and x {e.attention:.2f} in"
        f" attention, {1e6 * e.layer_seconds:.1f} microseconds a layer (norms and rotary embedding, unfused here, are in it),"
        f" {1e6 * e.step_seconds:.0f} a step (calibrated.json).{unknown} Every point with both errors:"
        " [roofline.csv](roofline.csv).",
        "",
        "| roofline over measured, less 1 | points | assumed: mean, largest | calibrated: mean, root mean square, largest |",
        "| --- | --- | --- | --- |",
        *(_error_row(name, before, after, lambda at, r=role, n=n: at[0] == r and at[4] == n) for role, name, n in rows),
        _error_row("all", before, after, lambda at: True),
        *([f"| an 8-bit target's step over BF16's | {len(ratios)} | | {_spread(ratios)} |"] if ratios else []),
        *(
            f"| speedup at K = {k} | {len(gaps)} | | {_spread(gaps)} |"
            for k in (4, 8)
            if (gaps := [speedup_error(times, after, at, k) for at in times if at[0] == "target" and at[4] == 1
                         and whole(times, *at[1:4])])
        ),
    ]  # fmt: skip


def _error_row(name: str, before: dict, after: dict, wanted: Callable[[tuple], bool]) -> str:
    old, new = ([x[at] for at in x if wanted(at)] for x in (before, after))
    assumed = f"{100 * np.mean(old):+.0f} %, {100 * max(old, key=abs):+.0f} %" if old else ""
    return f"| {name} | {len(new)} | {assumed} | {_spread(new) if new else ''} |"


def _spread(errors: Sequence[float]) -> str:
    mean, rms = 100 * np.mean(errors), 100 * np.sqrt(np.mean(np.square(errors)))
    return f"{mean:+.1f} %, {rms:.1f} %, {100 * max(errors, key=abs):+.0f} %"


def speedup_error(times: dict, errors: dict, at: tuple, k: int) -> float:
    """Relative error of the speedup at K, whatever is accepted, at a target's point `at` of 1 new token."""
    _, fmt, batch, context, _ = at
    draft, verify = ("draft", "bf16", batch, context, 1), ("target", fmt, batch, context, k + 1)
    told = {x: times[x].seconds * (1 + errors[x]) for x in (at, draft, verify)}
    cycle, told_cycle = k * times[draft].seconds + times[verify].seconds, k * told[draft] + told[verify]
    return told[at] / told_cycle / (times[at].seconds / cycle) - 1


def points_csv(times: dict, before: dict, after: dict) -> str:
    """roofline.csv: every timing with the roofline's relative errors."""
    lines = ["model,kv_format,batch,context,new_tokens,milliseconds,error_assumed,error_calibrated"]
    lines += [
        f"{','.join(map(str, at))},{1e3 * r.seconds:.4f},{before[at]:+.4f},{after[at]:+.4f}" for at, r in times.items()
    ]
    return "\n".join(lines) + "\n"


def of_bf16(at: tuple) -> tuple:
    """The same step (kind, format, batch, context, new tokens) with a BF16 cache."""
    return at[0], "bf16", *at[2:]


def format_ratio_error(errors: dict, at: tuple) -> float:
    """Relative error of a step's time over BF16's, from the relative errors of both."""
    return (1 + errors[at]) / (1 + errors[of_bf16(at)]) - 1


def added_section(steps: Steps) -> list[str]:
    """How the communication in what follows was come by."""
    share: dict[str, list[float]] = {}
    for alone, whole_step in zip(steps.file.records, whole_steps(steps.file, steps.roofline), strict=True):
        share.setdefault(alone.kind, []).append(1 - alone.seconds / whole_step.seconds)
    told = ", ".join(f"{100 * min(x):.0f} to {100 * max(x):.0f} % of a {kind}'s step" for kind, x in share.items())
    return [
        f"**Communication here is not measured.** To each share's time is added {steps.communication_told}. That is {told}.",
        "",
    ]


def gains_section(table: TableCost, times: dict) -> list[str]:
    """Best K and its speedup for every point, format and alpha."""
    lines = [
        "| batch x context | KV cache | " + " | ".join(f"alpha {a}" for a in ALPHAS) + " |",
        "| --- | --- |" + " --- |" * len(ALPHAS),
    ]
    for context in CONTEXTS:
        for batch in BATCHES:
            for fmt in FORMATS:
                if whole(times, fmt, batch, context):
                    curves = [gains(table, fmt, batch, context, a) for a in ALPHAS]
                    best = " | ".join(f"K = {best_k(g)}, {g.max():.2f}" for g in curves)
                    lines.append(f"| {batch} x {context} | {fmt} | {best} |")
    return lines


def whole(times: dict, fmt: str, batch: int, context: int) -> bool:
    """Whether every time that a speedup curve needs was measured."""
    return ("draft", "bf16", batch, context, 1) in times and all(
        ("target", fmt, batch, context, n) in times for n in NEW
    )


def plot(table: TableCost, times: dict, path: Path, title: str) -> None:
    """Tokens per second of a sequence against K at alpha 0.8: a panel per context, colours by batch, line styles by format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    figure, axes = plt.subplots(1, len(CONTEXTS), figsize=(12, 4.2), sharey=True, squeeze=False, layout="constrained")
    styles = dict(zip(FORMATS, ("-", "--", ":"), strict=True))
    colours = {b: f"C{i}" for i, b in enumerate(b for b in BATCHES if b in (1, 8, 16, 32, 64))}
    for axis, context in zip(axes[0], CONTEXTS, strict=True):
        for batch, colour in colours.items():
            for fmt, style in styles.items():
                if whole(times, fmt, batch, context):
                    speeds = gains(table, fmt, batch, context, 0.8) / table.step_time("target", batch, context, 1, fmt)
                    axis.plot(range(K_MAX + 1), speeds, style, color=colour)
        axis.set(title=f"context {context:,}", xlabel="num_speculative_tokens")
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens per second of one sequence")
    handles = [Line2D([], [], color=c, label=f"batch {b}") for b, c in colours.items()]
    handles += [Line2D([], [], color="0.3", linestyle=s, label=f) for f, s in styles.items()]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="llama70b-1b")
    parser.add_argument("--share", type=int, metavar="N", help="measure one GPU's share of N, N >= 2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.share is not None and args.share < 2:
        parser.error("--share N: one GPU's share of at least 2")
    if not (args.out or args.page):
        parser.error("give --out DIR to measure, --page DIR to write the page of what is there, or both")
    try:
        if args.out:
            measure(args.pair, args.out, args.share)
        if args.page:
            page(args.pair, args.page)
    except SpecqError as error:
        print(f"step_times: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
