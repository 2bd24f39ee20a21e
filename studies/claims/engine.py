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


def engine_table(made: Mapping[str, Any]) -> Table:
    """Cycles of steady steps and speedups of every cell that ran; acceptance synthetic, in every format its study's."""
    e, work = made["engine"], made["workload"]
    rows = [
        [c["target_kv_dtype"], c["num_speculative_tokens"], sum(c.get("asked_marginal_survival") or ()),
         1e3 * float(np.median(c["speed"]["cycle_seconds_repeats"])), c["speedup_measured"]["steady"],
         c["speedup_measured"]["throughput"], c["speedup_measured"]["latency"]]
        for c in steady_cells(made)
    ]  # fmt: skip
    return Table(
        f"vLLM {e['vllm']} itself on {e['tensor_parallel_size']} x {e['device']}, the 70B shape with dummy weights, synthetic"
        f" acceptance, {work['requests_in_flight']} requests in flight, {work['context']:,} tokens of context"
        " ([step times](../llama70b-1b/README.md)):",
        ["KV cache", "K", "mu", "ms per cycle", "speedup", "of throughput", "of time per token"],
        ["", "", ".2f", ".1f", ".2f", ".2f", ".2f"], rows,
        "Cycle and speedup: of steps in which every request decodes; throughput and time per token count prefill, which is most"
        " of these runs. One run a cell, and the draft's cache has the target's format there. Attention alone takes hardly"
        " longer with FP8 (the last table of (d)): what makes FP8's cycles long lies elsewhere in that engine's steps, and was"
        " not found.",
    )  # fmt: skip
