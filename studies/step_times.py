"""Step times of a registered pair's shape with random weights, by specq's own kernels, on one GPU or tensor parallel.

    torchrun --nproc-per-node 2 -m studies.step_times --pair llama70b-1b --out DIR     measure: timings.json, machine.json
    python -m studies.step_times --pair llama70b-1b --share 2 --out DIR                the same of one of 2 GPUs, by itself
    python -m studies.step_times --pair llama70b-1b --page DIR                         page and plot from those

One decoder layer of each GPU's share (norms, products, rotary embedding, store, attention, all-reduces; what lies between the
products fused by torch.compile) runs in CUDA graphs over weights and pages larger than the L2 cache; a step is its time times
the number of layers, plus the LM head with the gather of its logits. No scheduler, sampler or launch is in it: what an engine
adds comes on top. `--cost` reads timings.json.

`--share N` measures on one GPU what one of N does between its all-reduces: times without communication, which calibrate
`--cost roofline:NxGPU@timings.json`. The page then adds the communication by the data sheet. Files are written after every
(model, format, context); the same command with the same DIR goes on where it was stopped.

Beside whole steps the page takes, where DIR has them: share.json and share-machine.json, what `--share` wrote, which tell the
communication; vllm.json, a validation.json of `specq validate --synthetic --pair`; random.json, a study.json of
`--random-weights`.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from specq import __version__, files, pairs
from specq.cost.table import read_file
from specq.errors import SpecqError, printable
from specq.kv import get_format
from specq.pairs import Shape
from specq.shape import ModelShape

BATCHES, CONTEXTS, NEW = (1, 4, 8, 16, 32, 64), (2048, 8192, 32768), (1, 2, 3, 5, 9)
FORMATS = ("bf16", "fp8_e4m3", "int8_per_token_head")
PAGE, MEMORY = 16, 0.92 * 141e9  # bytes of one H200 that an engine would use
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

    def layer(self, x: torch.Tensor, y: torch.Tensor, i: int, state: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """One decoder layer over the pages of `state`: the residual stream `x` and what is still to be added to it, `y`, both
        [tokens, hidden] -> the same two of the next layer."""
        from specq_kernels import store_kv, verify_attention

        w, tokens = self.layers[i % len(self.layers)], len(x)
        x, h = fused(added_and_normed)(x, y, w["norms"][0])
        q, k, v = (h @ w["qkv"].T).view(tokens, -1, self.dim).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = fused(rotated)(q, k, state["cos"], state["sin"])
        store_kv(k, v, state["cache"], state["slots"])
        q = q.view(state["batch"], -1, self.heads, self.dim)
        out = verify_attention(
            q, state["cache"], state["table"], state["contexts"], state["counts"], state["longest"], fill=True
        )
        x, h = fused(added_and_normed)(x, self.reduced(out.reshape(tokens, -1) @ w["out"].T), w["norms"][1])
        return x, self.reduced(fused(gated)(h @ w["up"].T) @ w["down"].T)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits on every GPU, gathered; this one's columns of them where there is no other."""
        mine = x @ self.head.T
        if not dist.is_initialized():
            return mine
        out = torch.empty(self.gpus * len(x), mine.shape[1], device=DEVICE, dtype=mine.dtype)
        dist.all_gather_into_tensor(out, mine)
        return out


@functools.cache
def fused(function: Callable) -> Callable:
    """`function` as one kernel, or few: engines fuse what lies between the products. As it is on a CPU."""
    return torch.compile(function, dynamic=True) if DEVICE == "cuda" else function


def added_and_normed(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, its RMS norm)."""
    x = x + y
    return x, F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotary embedding of queries and keys [tokens, heads, dim]."""
    return tuple(
        torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1) for a, b in (x.chunk(2, dim=-1) for x in (q, k))
    )


def gated(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the columns times the second."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


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


def layers_seconds(share: Share, cache: object, table: object, batch: int, context: int, new: int) -> list[float]:
    """Seconds of all layers in one step of `new` tokens a row, of every repeat."""
    from specq_kernels.bench import graph_times

    at = context + torch.arange(new, device=DEVICE).repeat(batch, 1)
    slots = (table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()
    angle = torch.randn(batch * new, 1, share.dim // 2, device=DEVICE)
    state = {
        "cache": cache, "table": table, "batch": batch, "slots": slots, "longest": context + new,
        "contexts": torch.full((batch,), context + new, dtype=torch.int32, device=DEVICE),
        "counts": torch.full((batch,), new, dtype=torch.int32, device=DEVICE),
        "cos": angle.cos().bfloat16(), "sin": angle.sin().bfloat16(),
    }  # fmt: skip
    x, y = torch.randn(2, batch * new, share.shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    layer = graph_times([lambda i=i: share.layer(x, y, i, state)[1] for i in range(CALLS)], REPEATS)
    return [share.shape.layers * t / 1e6 for t in layer]


def head_seconds(share: Share, tokens: int) -> float:
    """Seconds of the LM head over `tokens` tokens."""
    from specq_kernels.bench import graph_times

    x = torch.randn(tokens, share.shape.hidden, device=DEVICE, dtype=torch.bfloat16)
    return statistics.median(graph_times([lambda: share.logits(x)] * CALLS, REPEATS)) / 1e6


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
        "pair": pair, "gpus": gpus, "share_of": share_of, "gpu": torch.cuda.get_device_name(), "specq": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "attention": attention, "command": f"{start} -m studies.step_times --pair {pair}{options} --out DIR",
    }  # fmt: skip


def resumed(folder: Path, machine: dict) -> list[dict]:
    """The records that an earlier run left in `folder`. Raises SpecqError where another machine or command made them."""
    if not (folder / "machine.json").exists():
        if (folder / "timings.json").exists():
            raise SpecqError(f"{folder} holds timings of an unknown machine: give another --out")
        return []
    before = files.read_json(folder / "machine.json")
    for key, value in machine.items():
        if key != "command" and before.get(key) != value:
            raise SpecqError(
                f"{folder} was measured with {key} = {before.get(key)}, here it is {value}: give another --out"
            )
    if not (folder / "timings.json").exists():
        return []
    return [r.model_dump() for r in read_file(str(folder / "timings.json")).records]


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
                    head = heads[role](batch * n)
                    layers = layers_seconds(shares[role], cache, table, batch, context, n)
                    repeats = [round(t + head, 9) for t in layers]
                    at = {"kind": role, "batch": batch, "context": context, "new_tokens": n, "kv_format": fmt}
                    records.append(at | {"seconds": statistics.median(repeats), "repeats": repeats})
                del cache, table
            if rank == 0 and left:
                files.write_text(out / "timings.json", timings_text(records, share_of))
                say(f"{role} {fmt}, context {context:,}: {sum(map(len, left.values()))} step times")
    say(f"{len(records)} step times in {out}")
    if gpus > 1:
        dist.destroy_process_group()


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
            from studies.step_times_page import page  # its constants are this module's

            page(args.pair, args.page)
    except SpecqError as error:
        print(f"step_times: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
