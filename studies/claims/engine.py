"""What a real engine showed beside the claims about speed: a validation.json of synthetic acceptance."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from studies.common.results import Table


def steady_cells(made: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cells of a validation.json that ran, and long enough beside plain decoding to tell the speedup of steady steps."""
    return [c for c in made["cells"] if (c.get("speedup_measured") or {}).get("steady")]


def engine_losses(made: Mapping[str, Any]) -> str:
    """A sentence on the formats that lost in an engine at a K that gained with BF16; empty where none did."""
    speeds = {
        (c["target_kv_dtype"], c["num_speculative_tokens"]): c["speedup_measured"]["steady"] for c in steady_cells(made)
    }
    lost = [
        f"at K = {k}, where BF16 makes steady decoding {speeds['bf16', k]:.2f} times as fast, {fmt} makes it {gain:.2f} times"
        for (fmt, k), gain in speeds.items()
        if gain < 1 < speeds.get(("bf16", k), 0)
    ]
    engine = f"vLLM {made['engine']['vllm']}"
    return f" An engine can add a loss of its own: in {engine}, {'; '.join(lost)} (last table)." if lost else ""


def engine_table(made: Mapping[str, Any], kernels: Mapping[str, Any]) -> Table:
    """Cycles of steady steps and speedups of every cell that ran; acceptance synthetic, in every format its study's."""
    e, work = made["engine"], made["workload"]
    rows = [
        [c["target_kv_dtype"], c["num_speculative_tokens"], sum(c.get("asked_marginal_survival") or ()),
         c["counters"]["mean_emitted"] - 1 if c.get("counters") else None,
         1e3 * float(np.median(c["speed"]["cycle_seconds_repeats"])), c["speedup_measured"]["steady"],
         c["speedup_measured"]["throughput"], c["speedup_measured"]["latency"]]
        for c in steady_cells(made)
    ]  # fmt: skip
    return Table(
        f"vLLM {e['vllm']} itself on {e['tensor_parallel_size']} x {e['device']}, the 70B shape with dummy weights, synthetic"
        f" acceptance, {work['requests_in_flight']} requests in flight, {work['context']:,} tokens of context"
        " ([step times](../llama70b-1b/README.md)):",
        ["KV cache", "K", "mu asked", "counted", "ms per cycle", "speedup", "of throughput", "of time per token"],
        ["", "", ".3f", ".3f", ".1f", ".2f", ".2f", ".2f"], rows,
        "Cycle and speedup: of steps in which every request decodes, with mu as asked; throughput and time per token count"
        " prefill, which is most of these runs. One run a cell, and the draft's cache has the target's format there."
        + _attention_told(kernels, work["requests_in_flight"], 1 + max(r[1] for r in rows)),
    )  # fmt: skip


def _attention_told(kernels: Mapping[str, Any], batch: int, queries: int) -> str:
    """FlashAttention 3 by itself at an engine's batch and queries of a verification: FP8's time over BF16's, over contexts."""
    times = {
        (r["context"], r["format"]): r["us"]
        for r in kernels["verify"]
        if (r["kernel"], r["geometry"], r["batch"], r["queries"]) == ("flash_attention_3", "64/8/128", batch, queries)
    }
    over = [us / times[context, "bf16"] for (context, fmt), us in times.items() if fmt == "fp8_e4m3"]
    if not over:
        return ""
    told = "so it does not explain FP8's longer cycles; " if max(over) < 1 else ""
    return (
        f" FlashAttention 3, the kernel behind FLASH_ATTN there, takes by itself {min(over):.2f} to {max(over):.2f} times as"
        f" long with FP8 as with BF16 at batch {batch} and {queries} queries ([kernels](../kernels/README.md)), {told}the cause"
        " was not found."
    )
