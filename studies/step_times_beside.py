"""Sections of the page of `studies.step_times` that need more than its timings: communication, the shape in vLLM, a study.

Communication: whole steps less the steps of one GPU's share (`share.json`), both timed on the same machine. vLLM: what
`specq validate --synthetic` measured (`vllm.json`, a validation.json), beside cycles of specq's own step times. A study: what
`specq study --random-weights` over the same GPUs took (`random.json`, its study.json).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specq.cost import Operating, cycle_times
from specq.cost.table import TableCost, TimingFile
from specq.errors import SpecqError
from studies.common.steps import Steps, communication, key


def communication_section(steps: Steps, share: TimingFile, machine: Mapping[str, Any]) -> list[str]:
    """Microseconds of an all-reduce by its tokens: a step less one GPU's share of it, over the all-reduces in it.

    `machine` tells how `share` was made. Raises SpecqError where the files do not belong together.
    """
    over, alone = steps.roofline.gpus, {key(r): r.seconds for r in share.records}
    if steps.file.share_of or share.share_of != over:
        raise SpecqError(
            f"share.json must hold one GPU's share of the {over} GPUs whose whole steps timings.json holds"
        )
    both = [r for r in steps.file.records if key(r) in alone]
    assumed = communication(steps.roofline, both)
    rows: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    for r, told in zip(both, assumed, strict=True):
        found, calls = r.seconds - alone[key(r)], 2 * steps.roofline.shapes[r.kind].depth
        at = rows.setdefault((r.batch * r.new_tokens, r.kind), [])
        at.append((1e6 * found / calls, 1e6 * told / calls, found / r.seconds))
    e = steps.roofline.efficiency
    return [
        f"## Communication: whole steps less one GPU's share of them, {len(both)} points",
        "",
        f"The share by itself: one {machine['gpu']}, {machine['date']}, `{machine['command']}` (share.json). The difference in"
        " microseconds per all-reduce, two a layer: median, smallest to largest over the points of so many tokens, and in"
        f" brackets the assumed one ({1e6 * e.reduce_seconds:.0f} microseconds and the bytes over {e.link:.2f} of the link);"
        " then its share of a step. It also holds the gather of the logits and what else changes when a GPU waits for another"
        " (gaps between kernels, clocks), which is why it does not rise evenly. NCCL's own kernels, in CUDA graphs; engines"
        " have quicker ones for few tokens.",
        "",
        "| tokens in the step | target | of its step | draft | of its step |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {tokens} | {_difference(rows.get((tokens, 'target')))} | {_difference(rows.get((tokens, 'draft')))} |"
            for tokens in sorted({tokens for tokens, _ in rows})
        ),
    ]


def _difference(found: Sequence[tuple[float, float, float]] | None) -> str:
    """Two cells: microseconds per all-reduce, measured and assumed, and the share of a step; empty where nothing was timed."""
    if not found:
        return " |"
    us, told, part = np.array(found).T
    return f"{np.median(us):.0f}, {us.min():.0f} to {us.max():.0f} ({told[0]:.0f}) | {100 * np.median(part):.0f} %"


def vllm_section(made: Mapping[str, Any], cost: TableCost, pair: str) -> list[str]:
    """Cycle times and speedups that vLLM showed with synthetic acceptance, beside those of specq's own step times."""
    engine, work = made["engine"], made["workload"]
    batch, context = work["requests_in_flight"], work["context"]
    named = any(c.get("draft_sampling") == "probabilistic" for c in made["cells"])
    greedy = " Drafts were greedy, as vLLM's are with synthetic acceptance: vllm.json names them probabilistic." * named
    lines = [
        "## The same shape in vLLM, acceptance synthetic",
        "",
        f"`specq validate STUDY --synthetic --pair {pair} --tensor-parallel {engine['tensor_parallel_size']}"
        f" {' '.join(f'--dtype {d}' for d in dict.fromkeys(c['target_kv_dtype'] for c in made['cells']))} --k"
        f" {','.join(map(str, dict.fromkeys(c['num_speculative_tokens'] for c in made['cells'])))} --batch {batch} --context"
        f" {context - work['output_tokens'] // 2} --num-prompts {work['prompts']} --passes {work['passes']}`:"
        f" {engine['tensor_parallel_size']} x {engine['device']}, vLLM {engine['vllm']}, torch {engine['versions']['torch']},"
        f" {', '.join(engine['dates'])}, {engine['timing_mode']}; dummy weights, {batch} requests in flight, {context:,} tokens"
        f" of context on average, {work['output_tokens']} tokens out, passes timed: {work['passes']}. The cycle is the median"
        " of steady steps, in which every request decodes, and the speedup beside it theirs, with emitted per cycle as asked,"
        " from the study of the embedded pair; throughput and time per token (as speedups) count prefill, which is most of this"
        " run. Own steps are those above, interpolated between their contexts, with the draft's cache in BF16; in vLLM"
        f" {engine['vllm']} the draft's cache has the target's format.{greedy}",
        "",
        "| KV cache | K | backend | ms per cycle, vLLM (steps) | own steps | own over vLLM, less 1 | emitted (counted) |"
        " speedup, vLLM | own steps | throughput, vLLM | time per token, vLLM |",
        "|" + 11 * " --- |",
    ]
    cells = [c for c in made["cells"] if c["status"] == "ok" and c["speed"]["cycle_seconds_repeats"]]
    times = {(c["target_kv_dtype"], c["num_speculative_tokens"]): seconds(c) for c in cells}
    for c in cells:
        fmt, k = c["target_kv_dtype"], c["num_speculative_tokens"]
        own = cycle_times(cost, Operating(batch, context, fmt, "bf16"), k)
        tokens, gain = emitted(c), c.get("speedup_measured") or {}
        vllm = [f"{gain[x]:.2f}" if gain.get(x) else "" for x in ("steady", "throughput", "latency")]
        lines.append(
            f"| {fmt} | {k} | {', '.join(c['attention_backends_logged'])} | {1e3 * times[fmt, k]:.1f}"
            f" ({c['speed']['steady_steps']}) | {1e3 * own[k]:.1f} | {100 * (own[k] / times[fmt, k] - 1):+.0f} % |"
            f" {tokens:.3f}{counted(c)} | {vllm[0]} | {tokens * own[0] / own[k]:.2f} | {vllm[1]} | {vllm[2]} |"
        )
    lines += ["", *ratios(times), *left_out(made)]
    return lines


def seconds(cell: Mapping[str, Any]) -> float:
    """Median seconds of a steady cycle."""
    return float(np.median(cell["speed"]["cycle_seconds_repeats"]))


def emitted(cell: Mapping[str, Any]) -> float:
    """Emitted per cycle at the rates that were asked for."""
    return 1 + sum(cell.get("asked_marginal_survival") or ())


def counted(cell: Mapping[str, Any]) -> str:
    """What the engine's counters said of it, in brackets."""
    return f" ({cell['counters']['mean_emitted']:.3f})" if cell.get("counters") else ""


def ratios(times: Mapping[tuple[str, int], float]) -> list[str]:
    """What an 8-bit cache does to a step of vLLM, K by K."""
    found = []
    for (fmt, k), t in times.items():
        if fmt != "bf16" and ("bf16", k) in times:
            found.append(f"- {fmt} at K = {k}: a cycle takes {t / times['bf16', k]:.2f} times BF16's.")
    return found


def left_out(made: Mapping[str, Any]) -> Sequence[str]:
    """The cells that did not run, or too shortly, with why; and that nothing else was asked for."""
    why: dict[str, list[str]] = {}
    for c in made["cells"]:
        if c["status"] != "ok" or not c["speed"]["cycle_seconds_repeats"]:
            reason = "too few steady steps" if c["status"] == "ok" else c.get("error") or c["status"]
            why.setdefault(reason, []).append(c["name"])
    work, ks = made["workload"], sorted({c["num_speculative_tokens"] for c in made["cells"]})
    return [
        *(f"- Not measured: {', '.join(names)} ({reason})." for reason, names in why.items()),
        f"- Not made: batches other than {work['requests_in_flight']}, contexts other than {work['context']:,}, K other than"
        f" {', '.join(map(str, ks))}.",
    ]


def study_section(study: Mapping[str, Any], steps: Steps) -> list[str]:
    """Seconds, memory and the step times of a study with random weights over all GPUs."""
    made, took, peak = study["environment"], study["timings_seconds"], study["peak_memory_gb"]
    cost, options = study["cost"]["details"], made["command"].partition(" ")[2]
    parameters = " and ".join(f"{study['pair'][role]['parameters'] / 1e9:.1f}" for role in ("target", "draft"))
    plain = next(
        r for r in cost["records"] if (r["kind"], r["kv_format"], r["new_tokens"]) == ("target", "bf16", 1)
    )  # fmt: skip
    graphs = steps.cost.step_time("target", plain["batch"], plain["context"], 1, "bf16")
    return [
        "## A study of the shape, random weights",
        "",
        f"`torchrun --nproc-per-node {made['processes']} -m specq.cli {options}`, {made['device']}, transformers"
        f" {made['transformers']}, {made['date']}: {took['total']:.0f} s, of which {took['load']:.0f} to build models of"
        f" {parameters} billion parameters, {took['sample']:.0f} to sample, {took['score']:.0f} to score in"
        f" {len(study['directories']) + 1} formats, {took['cost']:.0f} to time steps; at most {peak['gpu']:.1f} GB on the first"
        " GPU. Acceptance means nothing then. Its own step times are those of transformers, which launches every kernel from"
        f" Python: {1e3 * plain['seconds']:.0f} ms for plain decoding of {plain['batch']} rows at {plain['context']:,} tokens,"
        f" where the same in CUDA graphs takes {1e3 * graphs:.1f} ms (above): so `--cost measured` says little of an engine on"
        " a GPU, and a study says so.",
    ]
