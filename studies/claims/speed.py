"""Claims about size and speed, judged by closed forms, rooflines, and steps and kernels timed on a GPU."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specq.config import StudyConfig
from specq.cost.table import TimingFile, read_file
from specq.kv import get_format
from studies.claims.engine import engine_losses, engine_table
from studies.claims.priced import FORMATS, FP8, INT8, MATTERS, Priced, counts, margin_told, points, where_from
from studies.common.curves import System, alpha_of, measure, value_of
from studies.common.results import REFUTED, Claim, Table, verdict

SHORT = (512, 1024, 2048)  # tokens: "under 2k"
HIGH, KNEE, LOW = 4.5, 4.0, 3.5  # the claimed mu
KNEE_KS = (StudyConfig().current_k, 8)  # at which mu may be quoted: the default, and a larger one that also accepts 4.5
CLAIMED_LOSS = (0.20, 0.30)
MARGINAL = 3.0


def claims(config: Mapping[str, Any], folder: Path) -> list[Claim]:
    """All four; paths of `config` lie relative to `folder`."""
    priced = [Priced.of(entry, folder) for entry in config["systems"]]
    kernels = json.loads((folder / config["kernels"]).read_text())
    return [
        knee(priced, config["k_max"]),
        sizes(priced[0].systems[0]),
        short_contexts(priced, config["k"], kernels, read_file(str(folder / config["steps"]))),
        losses(priced, config["k"], json.loads((folder / config["engine"]).read_text()), kernels),
    ]


def fixed_k_loss(high: float, low: float) -> float:
    """Share of the speed that is lost when mu falls at one K and one cycle time: speed goes as mu + 1."""
    return 1 - (low + 1) / (high + 1)


def knee(priced: Sequence[Priced], k_max: int) -> Claim:
    """(b): what 4.5 -> 3.5 costs, at a fixed K and at the fastest K for each mu, and whether the slope changes near 4.

    A case is the fixed K, or a row: a system, a batch and the K at which mu is quoted, which says how alike the drafts are.
    """
    fixed, rows, told = fixed_k_loss(HIGH, LOW), [], []
    for quoted in KNEE_KS:
        alphas = [alpha_of(mu, quoted) for mu in (HIGH, KNEE, LOW)]
        mine = [_knee_row(pair, batch, quoted, alphas, k_max) for pair in priced for batch in pair.batches]
        rows += mine
        lost, gain, slope = ([r[at] for r in mine if r[at] is not None] for at in (-3, -2, -1))
        told.append(
            f"Quoted at K = {quoted} (alpha {alphas[-1]:.2f} to {alphas[0]:.2f}): {min(lost):.1%} to {max(lost):.1%}, in the"
            f" claimed range in {_claimed(lost)} of {len(lost)} rows, the speedup {min(slope):.2f} to {max(slope):.2f} times as"
            f" steep above 4 as below it; of the gain (speedup minus 1) {min(gain):.1%} to {max(gain):.1%}, in the range in"
            f" {_claimed(gain)}."
        )
    within = [bool(_claimed([x])) for x in (fixed, *(r[-3] for r in rows))]
    why = (
        f"At one K the speed goes as mu + 1, a straight line without a knee: 4.5 to 3.5 accepted costs {fixed:.1%}, in every"
        f" format and at every batch (4.5 to 3.5 *emitted* {fixed_k_loss(HIGH - 1, LOW - 1):.1%}). At the fastest K for each mu"
        f" the loss goes by the K at which mu is quoted, the system and the batch. {' '.join(told)} With alpha^k a mu near K"
        " means that drafts go on being accepted far beyond K, which a mu at K does not show."
    )
    table = Table(
        f"Speedup over plain decoding at context {SHORT[-1]:,} with a BF16 cache, acceptance alpha^k with mu as quoted at one"
        f" K, {KNEE_KS[0]} (the default of `--current-k`) or {KNEE_KS[1]}, each at its fastest K; slope: of the speedup in mu,"
        " above 4 over below 4:",
        ["system", "batch", "mu quoted at", "mu 4.5", "K", "mu 3.5", "K", "speed lost", "gain lost", "slope"],
        ["", "", "", ".2f", "", ".2f", "", ".1%", ".1%", ".2f"], rows,
        where_from(priced, "the fastest K is below the largest timed"),
    )  # fmt: skip
    claim = "The speedup has a knee near mu = 4: going from 4.5 to 3.5 accepted costs 20-30 % of it."
    return Claim("b", claim, verdict(within), why, [table])


def _knee_row(pair: Priced, batch: int, quoted: int, alphas: Sequence[float], k_max: int) -> list[Any]:
    """Of a pair and a batch: speedups at HIGH and LOW with their K, shares of speed and of gain lost, and the slope's change.

    `alphas` are those of HIGH, KNEE and LOW quoted at K = `quoted`.
    """
    system, curves = pair.curves(alphas, batch, SHORT[-1], k_max)
    (high, middle, low), best = ([f(c) for c in curves] for f in (lambda c: float(c.max()), lambda c: int(c.argmax())))
    gain = 1 - (low - 1) / (high - 1) if high > 1 else None
    slope = (high - middle) / (middle - low) if middle > low else None
    return [system.name, batch, quoted, high, best[0], low, best[2], 1 - low / high, gain, slope]


def _claimed(shares: Sequence[float]) -> int:
    """How many of the shares lie in the claimed range."""
    return sum(CLAIMED_LOSS[0] <= x <= CLAIMED_LOSS[1] for x in shares)


def sizes(system: System) -> Claim:
    """(c): the claimed KV sizes, which are those of Llama 3.1 70B."""
    shape, rows, held = system.target, [], []
    claimed = [("10.7 GB", 32768, 1, 10.7, 1), ("1.34 GB", 4096, 1, 1.34, 2), ("1.34 GB", 32768, 8, 1.34, 2),
               ("42.9 GB", 131072, 1, 42.9, 1)]  # fmt: skip
    for said, context, gpus, value, digits in claimed:
        size = {f: sum(shape.kv_bytes(get_format(f), context, gpus)) / 1e9 for f in FORMATS}
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
        "", ["claimed", "tokens", "GPUs", "BF16, GB per GPU", "FP8", "INT8 per token and head", "FP8 saves", "INT8 saves"],
        ["", ",d", "", ".3f", ".3f", ".3f", ".1%", ".1%"], rows,
    )  # fmt: skip
    return Claim("c", "KV sizes of 10.7 GB, 1.34 GB and 42.9 GB, of which 8 bits save 50 %.", said, why, [table])


def short_contexts(priced: Sequence[Priced], k: int, kernels: Mapping[str, Any], steps: TimingFile) -> Claim:
    """(d): what the format does to the time per token under 2k tokens of context, acceptance unchanged."""
    rows, measured, outcome = [], [], []
    which: dict[bool | None, set[int]] = {True: set(), False: set(), None: set()}  # batches by `counts`
    for system, batch, context in points(priced, SHORT, k):
        gains = [x for f in (FP8, INT8) for x in system.gains(batch, context, f, k)]
        most = max(abs(value_of(x)) for x in gains)
        counted = counts(most, system)
        which[counted].add(batch)
        outcome.append(None if counted is None else not counted)
        rows.append([system.name, batch, context, *gains])
        measured += [rows[-1]] if system.k_timed is not None else []
    free, unclear = sorted(which[False] - which[True] - which[None]), sorted(which[None] - which[True])

    def largest(found: Sequence[list], first: int) -> tuple[float, str]:
        """The largest gain in every second column from `first`, and where."""
        gain, name, batch = max((value_of(x), r[0], r[1]) for r in found for x in r[first::2])
        return gain, f"{name}, batch {batch}"

    within = f", and by more, but within the noise, at batch {', '.join(map(str, unclear))}" if unclear else ""
    (plain, where), (timed, timed_at), (drafted, drafted_at) = largest(rows, 3), largest(measured, 3), largest(rows, 4)
    why = (
        f"{margin_told(priced)} Up to 2,048 tokens the format changes at most {MATTERS:.0%} at batch"
        f" {', '.join(map(str, free)) or 'none'} in every system{within}. At most it makes plain decoding {plain:.0%} faster"
        f" ({where}), by measured steps {timed:.0%} ({timed_at}): there K and V of all rows together are no longer small beside"
        f" the weights, so the whole batch's cache counts, not the context of one request. With K = {k} it makes decoding at"
        f" most {drafted:.0%} faster ({drafted_at}), since drafting and arithmetic fill part of the cycle. The second and the"
        " third table show the parts on a GPU: steps of a 70B model's target, and one layer's attention as timed."
    )
    table = Table(
        f"Speed over BF16, plain decoding and K = {k} ({k + 1} new tokens in a verification) at equal acceptance:",
        ["system", "batch", "context", "FP8, plain", f"FP8, K = {k}", "INT8, plain", f"INT8, K = {k}"],
        ["", "", ",d", "+.1%", "+.1%", "+.1%", "+.1%"], rows,
        where_from(priced, f"they were timed, here at {SHORT[-1]:,} tokens", shown=True),
    )  # fmt: skip
    claim = "Under 2k tokens of context the KV format does not matter for speed."
    return Claim(
        "d", claim, verdict(outcome), why, [table, _step_table(steps, priced[0].systems[0], k), _kernel_table(kernels)]
    )


def _step_table(steps: TimingFile, system: System, k: int) -> Table:
    """Target steps at the shortest context that was timed, of plain decoding and of verification of K = k."""
    times = {(r.batch, r.new_tokens, r.kv_format): r.seconds for r in steps.records
             if r.kind == "target" and r.context == SHORT[-1]}  # fmt: skip
    rows = [
        [batch, new, *(1e3 * times[batch, new, f] for f in FORMATS),
         *(times[at] / times[batch, new, f] - 1 for f in (FP8, INT8))]
        for at in sorted(times) for batch, new, fmt in [at] if fmt == "bf16" and new in (1, k + 1)
    ]  # fmt: skip
    whose = f"one GPU's share of {steps.share_of}, without communication: " if steps.share_of else ""
    return Table(
        f"Milliseconds of a step of llama70b at {SHORT[-1]:,} tokens, plain decoding (1 new token) and verification of K = {k}"
        f" ({k + 1}), {whose}one layer as timed by `studies/step_times.py` x {system.target.depth}, plus the LM head"
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
        if set(FORMATS) <= set(us)
    ]
    machine = kernels["machine"]
    return Table(
        f"Attention over the cache alone, microseconds per layer on one {machine['gpu']} (64 query and 8 KV heads of 128;"
        " `make bench-kernels`); each time is that of the faster of specq's two splittings of the context:",
        ["batch", "context", "queries", "BF16", "FP8", "INT8", "FP8 gains", "INT8 gains"],
        ["", ",d", "", ".1f", ".1f", ".1f", "+.0%", "+.0%"], rows,
    )  # fmt: skip


def losses(priced: Sequence[Priced], k: int, engine: Mapping[str, Any], kernels: Mapping[str, Any]) -> Claim:
    """(i): the mu below which K = k is slower than plain decoding at the same format, and whether a format raises it; and what
    an engine showed (a validation.json of synthetic acceptance) beside kernels by themselves (`make bench-kernels`).

    A case is a point and a format. The claim holds in it where some mu below MARGINAL pays with BF16 and not with the format;
    break-even + 1 is a ratio of times, and its change has to count (`counts`).
    """
    rows, outcome, measured, apart, above = [], [], [], [], []
    for system, batch, context in points(priced, (2048, 32768), k):
        if not system.fits(batch, context, "bf16"):
            continue
        at = {f: system.break_even(batch, context, f, k) for f in FORMATS}
        changes = {f: (at[f] + 1) / (at["bf16"] + 1) - 1 for f in (FP8, INT8)}
        up = {f: counts(x, system) for f, x in changes.items()}
        holds = [x and at["bf16"] < MARGINAL for x in up.values()]  # None where undecided
        outcome += holds
        above += [x and at[f] > MARGINAL for f, x in up.items()]
        if system.k_timed is not None:
            measured += holds
            if max(changes.values()) > MATTERS and min(changes.values()) < 0:
                apart.append(
                    f"{at[FP8]:.2f} and {at[INT8]:.2f} against {at['bf16']:.2f} at batch {batch} and {context:,} tokens"
                )
        draws = {f: system.break_even_draws(batch, context, f, k) for f in FORMATS}
        rows.append([system.name, batch, context, *(measure(at[f], draws[f]) for f in FORMATS)])
    decided, timed = ([x for x in cases if x is not None] for cases in (outcome, measured))
    found = [value_of(x) for r in rows for x in r[3:]]
    both = (
        f" FP8 and INT8, alike in bytes, lie on either side of BF16 ({'; '.join(apart)}): so much can be noise."
        if apart
        else ""
    )
    why = (
        f"It can, in {sum(decided)} of {len(decided)} cases (a point and a format; by measured steps {sum(timed)} of"
        f" {len(timed)}), {outcome.count(None) or 'none'} more undecided: there a pair whose mu lies between the columns gains"
        f" with BF16 and loses with the format at K = {k}, without a token of acceptance lost, since the format speeds up plain"
        f" decoding more than a cycle that drafting or arithmetic fills. Counted, and undecided, are changes as in (d), here of"
        f" mu + 1, a ratio of times.{both} 3.0 is no border: speculation pays above mu = cycle time / plain step - 1, which is"
        f" {min(found):.2f} to {max(found):.2f} at these points and depends on K, on the batch and on the draft's cost; a"
        f" format raises it beyond 3.0 in {sum(map(bool, above)) or 'none'} of them. And the loss is one of a fixed K: with K"
        " chosen anew, speculation is never slower than plain decoding (K = 0)." + engine_losses(engine)
    )
    table = Table(
        f"mu at which K = {k} is as fast as plain decoding in the same format, where the batch fits in BF16:",
        ["system", "batch", "context", "BF16", "FP8", "INT8"], ["", "", ",d", ".2f", ".2f", ".2f"], rows,
        where_from(priced, "they were timed", shown=True),
    )  # fmt: skip
    return Claim(
        "i", "Below mu = 3.0 a quantized cache can turn speculation into a loss.", verdict(outcome), why,
        [table, engine_table(engine, kernels)],
    )  # fmt: skip
