"""Claims about size and speed, judged by closed forms, rooflines, and steps and kernels timed on a GPU."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specq.cost.table import TimingFile, read_file
from specq.kv import get_format
from studies.common.curves import System, alpha_of, best_k
from studies.common.results import CONFIRMED, REFUTED, Claim, Table, verdict

FP8, INT8 = "fp8_e4m3", "int8_per_token_head"
SHORT = (512, 1024, 2048)  # tokens: "under 2k"
MATTERS = 0.02  # of speed
HIGH, KNEE, LOW = 4.5, 4.0, 3.5  # the published mu
KNEE_K = 8  # a fixed K that can accept 4.5
CLAIMED_LOSS = (0.20, 0.30)
MARGINAL = 3.0


def claims(config: Mapping[str, Any], folder: Path) -> list[Claim]:
    """All four; paths of `config` lie relative to `folder`."""
    systems = [System.of(entry, folder) for entry in config["systems"]]
    kernels = json.loads((folder / config["kernels"]).read_text())
    return [
        knee(systems, config["batches"], config["k_max"]),
        sizes(systems[0]),
        short_contexts(systems, config["batches"], config["k"], kernels, read_file(str(folder / config["steps"]))),
        losses(systems, config["batches"], config["k"]),
    ]


def fixed_k_loss(high: float, low: float) -> float:
    """Share of the speed that is lost when mu falls at one K and one cycle time: speed goes as mu + 1."""
    return 1 - (low + 1) / (high + 1)


def knee(systems: list[System], batches: list[int], k_max: int) -> Claim:
    """(b): what 4.5 -> 3.5 costs, at a fixed K and with K chosen anew, and whether the slope changes near 4."""
    fixed = fixed_k_loss(HIGH, LOW)
    alphas = {mu: alpha_of(mu, KNEE_K) for mu in (HIGH, KNEE, LOW)}
    rows, retuned, kept, slopes = [], [], [], []
    for system, batch in itertools.product(systems, batches):
        curves = {mu: system.speedup(a, batch, 2048, "bf16", k_max) for mu, a in alphas.items()}
        best = {mu: best_k(c) for mu, c in curves.items()}
        top = {mu: float(c[best[mu]]) for mu, c in curves.items()}
        loss = 1 - top[LOW] / top[HIGH]
        gain = 1 - (top[LOW] - 1) / (top[HIGH] - 1) if top[HIGH] > 1 else None
        slope = (top[HIGH] - top[KNEE]) / (top[KNEE] - top[LOW]) if top[KNEE] > top[LOW] else None
        retuned.append(loss)
        kept += [] if gain is None else [gain]
        slopes += [] if slope is None else [slope]
        rows.append([system.name, batch, top[HIGH], best[HIGH], top[LOW], best[LOW], loss, gain, slope])
    inside = [CLAIMED_LOSS[0] <= x <= CLAIMED_LOSS[1] for x in (fixed, *retuned)]
    why = (
        f"At one K the speed goes as mu + 1, a straight line without a knee: 4.5 to 3.5 accepted costs {fixed:.1%}, in every"
        f" format and at every batch. With K chosen anew it costs {min(retuned):.1%} to {max(retuned):.1%}, and the slope above"
        f" 4 is {min(slopes):.2f} to {max(slopes):.2f} times that below: a smooth curve. Two other quantities do lose the"
        f" published 20-30 %: 4.5 -> 3.5 *emitted* (mean acceptance length) costs {fixed_k_loss(HIGH - 1, LOW - 1):.1%} at one"
        f" K, and of the gain (speedup minus 1) {min(kept):.0%} to {max(kept):.0%} are lost, within the published range in"
        f" {sum(CLAIMED_LOSS[0] <= x <= CLAIMED_LOSS[1] for x in kept)} of {len(kept)} rows."
    )
    table = Table(
        f"Speedup over plain decoding at context 2048, acceptance alpha^k with mu as given at K = {KNEE_K}, best K to"
        f" {k_max}; slope: of the speedup in mu, above 4 over below 4:",
        ["system", "batch", "mu 4.5", "K", "mu 3.5", "K", "speed lost", "gain lost", "slope"],
        ["", "", ".2f", "", ".2f", "", ".1%", ".1%", ".2f"], rows,
    )  # fmt: skip
    claim = "The speedup has a knee near mu = 4: going from 4.5 to 3.5 accepted costs 20-30 % of it."
    return Claim("b", claim, verdict(inside), why, [table])


def sizes(system: System) -> Claim:
    """(c): the published KV sizes, which are those of Llama 3.1 70B."""
    shape, rows, held = system.target, [], []
    published = [("10.7 GB", 32768, 1, 10.7, 1), ("1.34 GB", 4096, 1, 1.34, 2), ("1.34 GB", 32768, 8, 1.34, 2),
                 ("42.9 GB", 131072, 1, 42.9, 1)]  # fmt: skip
    for said, context, gpus, value, digits in published:
        size = {f: sum(shape.kv_bytes(get_format(f), context, gpus)) / 1e9 for f in ("bf16", FP8, INT8)}
        held.append(round(size["bf16"], digits) == value)
        rows.append([said, context, gpus, *size.values(), 1 - size[FP8] / size["bf16"], 1 - size[INT8] / size["bf16"]])
    saved = [rows[0][-2] == 0.5, abs(rows[0][-1] - 0.5) < 0.005]
    scales = get_format(INT8).bytes_per_token(shape.kv_heads, shape.head_dim)
    why = (
        "2 x 80 layers x 8 KV heads x head_dim 128 x tokens x 2 bytes: the sizes are those of one sequence of Llama 3.1 70B in"
        " BF16, in units of 10^9 bytes; 1.34 GB is 4,096 tokens, or one of eight GPUs at 32,768. FP8 with static scales saves"
        f" exactly half. INT8 per token and head keeps {scales[1]} bytes of scales beside {scales[0]} of codes per token and"
        f" layer and saves {rows[0][-1]:.1%}."
    )
    said = verdict([all(held), *saved]) if all(held) else REFUTED
    table = Table(
        "", ["published", "tokens", "GPUs", "BF16, GB per GPU", "FP8", "INT8 per token and head", "FP8 saves", "INT8 saves"],
        ["", ",d", "", ".3f", ".3f", ".3f", ".1%", ".1%"], rows,
    )  # fmt: skip
    return Claim("c", "KV sizes of 10.7 GB, 1.34 GB and 42.9 GB, of which 8 bits save 50 %.", said, why, [table])


def short_contexts(
    systems: list[System], batches: list[int], k: int, kernels: Mapping[str, Any], steps: TimingFile
) -> Claim:
    """(d): what the format does to the time per token under 2k tokens of context, acceptance unchanged."""
    rows, outcome, matters = [], [], set()
    for system, batch, context in itertools.product(systems, batches, SHORT):
        base = system.times(batch, context, "bf16", k)
        gains = [float(base[n] / system.times(batch, context, f, k)[n] - 1) for f in (FP8, INT8) for n in (0, k)]
        outcome.append(max(map(abs, gains)) <= MATTERS)
        matters |= set() if outcome[-1] else {batch}
        rows.append([system.name, batch, context, *gains])
    free = sorted(set(batches) - matters)
    plain = max(max(r[3::2]) for r in rows)
    drafted = max(rows, key=lambda r: max(r[4::2]))
    why = (
        f"Counted as mattering: more than {MATTERS:.0%} of speed. It hangs on the batch: up to 2,048 tokens the format changes"
        f" less than that at batch {', '.join(map(str, free)) or 'none'} in every system, and up to {plain:.0%} of plain"
        f" decoding at batch {batches[-1]}, where K and V of all rows together rival the weights: the whole batch's cache"
        f" counts, not the context of one request. With K = {k} it is at most {max(drafted[4::2]):.0%} (batch {drafted[1]}),"
        " since drafting and arithmetic fill part of the cycle. The second and the third table are measured: whole steps of a"
        " 70B model's half, and one layer's attention, on a GPU."
    )
    table = Table(
        f"Speed over BF16 by rooflines, plain decoding and K = {k} at equal acceptance:",
        ["system", "batch", "context", "FP8, plain", f"FP8, K = {k}", "INT8, plain", f"INT8, K = {k}"],
        ["", "", ",d", "+.1%", "+.1%", "+.1%", "+.1%"], rows,
    )  # fmt: skip
    claim = "Under 2k tokens of context the KV format does not matter for speed."
    return Claim("d", claim, verdict(outcome), why, [table, _step_table(steps), _kernel_table(kernels)])


def _step_table(steps: TimingFile) -> Table:
    """Target steps at the shortest context that was timed, of plain decoding and of verification of K = 4."""
    times = {(r.batch, r.new_tokens, r.kv_format): r.seconds for r in steps.records
             if r.kind == "target" and r.context == SHORT[-1]}  # fmt: skip
    rows = [
        [batch, new, *(1e3 * times[batch, new, f] for f in ("bf16", FP8, INT8)),
         *(times[at] / times[batch, new, f] - 1 for f in (FP8, INT8))]
        for at in sorted(times) for batch, new, fmt in [at] if fmt == "bf16" and new in (1, 5)
    ]  # fmt: skip
    whose = f"one GPU's share of {steps.share_of}, without communication" if steps.share_of else "the whole target"
    return Table(
        f"Milliseconds of a step of llama70b at {SHORT[-1]:,} tokens, {whose}, as timed by `studies/step_times.py`"
        " ([step times](../llama70b-1b/README.md)):",
        ["batch", "new tokens", "BF16", "FP8", "INT8", "FP8 gains", "INT8 gains"],
        ["", "", ".2f", ".2f", ".2f", "+.1%", "+.1%"], rows,
    )  # fmt: skip


def _kernel_table(kernels: Mapping[str, Any]) -> Table:
    """Attention of one layer over 2,048 tokens per row as timed by `make bench-kernels`, best of specq's two splittings."""
    times: dict[tuple, dict[str, float]] = {}
    for r in kernels["verify"]:
        if r["kernel"].startswith("specq") and r["context"] <= SHORT[-1] and r["geometry"] == "64/8/128":
            at = times.setdefault((r["batch"], r["context"], r["queries"]), {})
            at[r["format"]] = min(r["us"], at.get(r["format"], float("inf")))
    rows = [
        [*at, us["bf16"], us[FP8], us[INT8], us["bf16"] / us[FP8] - 1, us["bf16"] / us[INT8] - 1]
        for at, us in sorted(times.items())
        if {"bf16", FP8, INT8} <= set(us)
    ]
    machine = kernels["machine"]
    return Table(
        f"Attention over the cache alone, microseconds per layer on one {machine['gpu']} (64 query and 8 KV heads of 128;"
        " `make bench-kernels`):",
        ["batch", "context", "queries", "BF16", "FP8", "INT8", "FP8 gains", "INT8 gains"],
        ["", ",d", "", ".1f", ".1f", ".1f", "+.0%", "+.0%"], rows,
    )  # fmt: skip


def losses(systems: list[System], batches: list[int], k: int) -> Claim:
    """(i): the mu below which K = k is slower than plain decoding at the same format, and whether a format moves it."""
    rows, below, above = [], False, False
    for system, batch, context in itertools.product(systems, batches, (2048, 32768)):
        if not system.fits(batch, context, "bf16"):
            continue
        at = {f: system.break_even(batch, context, f, k) for f in ("bf16", FP8, INT8)}
        for fmt in (FP8, INT8):
            low, high = at["bf16"], min(at[fmt], k)  # pays with BF16 and not with the format, at the same mu
            below |= low < min(high, MARGINAL)
            above |= max(low, MARGINAL) < high
        rows.append([system.name, batch, context, *at.values()])
    said = (CONFIRMED if not above else "depends") if below else REFUTED
    lowest, highest = min(min(r[3:]) for r in rows), max(max(r[3:]) for r in rows)
    why = (
        "It can, at every point where the columns differ: a pair whose mu lies between them gains with BF16 and loses with the"
        f" format at K = {k}, without a token of acceptance lost, since a format speeds up plain decoding more than a cycle"
        " that drafting or arithmetic fills. But 3.0 is no border: speculation pays above mu = cycle time / plain step - 1,"
        f" which is {lowest:.2f} to {highest:.2f} at these points and depends on the batch and on the draft's cost. And the"
        " loss is one of a fixed K: with K chosen anew, speculation is never slower than plain decoding (K = 0)."
    )
    table = Table(
        f"mu at which K = {k} is as fast as plain decoding in the same format, where the batch fits in BF16:",
        ["system", "batch", "context", "BF16", "FP8", "INT8"], ["", "", ",d", ".2f", ".2f", ".2f"], rows,
    )  # fmt: skip
    return Claim("i", "Below mu = 3.0 a quantized cache can turn speculation into a loss.", said, why, [table])
