"""The page of `studies/step_times.py`: what timings.json and machine.json say, as README.md, tables and a plot."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from specq import files, pairs
from specq.cost import Operating, cycle_times, speedup
from specq.cost.calibration import Calibration, fit
from specq.cost.gpus import get_gpu
from specq.cost.roofline import Roofline
from specq.cost.table import TableCost, Timing, TimingFile, read_file
from specq.shape import ModelShape
from studies.common.curves import best_k, emitted
from studies.common.results import wrapped
from studies.common.steps import Steps, drift, key, whole_steps
from studies.step_times import BATCHES, CONTEXTS, FORMATS, MEMORY, NEW, TIMED, fitting, groups, missing
from studies.step_times_beside import communication_section, study_section, vllm_section

ALPHAS, K_MAX = (0.6, 0.7, 0.8, 0.9), NEW[-1] - 1


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
    gpu = get_gpu(machine["gpu"].removeprefix("NVIDIA ").split()[0])
    beside = read_file(str(folder / "share.json")).records if (folder / "share.json").exists() else ()
    names = "timings.json and share.json" if beside else "timings.json"
    calibration = fit(records, shapes, gpu, over, names, file.share_of, beside)
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
        *more(folder, steps, pair),
        "## Best K and speedup over plain decoding in the same format, if each draft is accepted with probability alpha",
        "",
        f"K is the smallest within 1 % of the best, up to {K_MAX}, the largest that was timed (where {K_MAX} stands, more may"
        f" be better); behind it the best speedup. Times between {', '.join(map(str, NEW))} new tokens are interpolated, and"
        " times that fall with more new tokens evened out (noise); the draft's cache is BF16. Repeats scatter by"
        f" {100 * scatter(records):.1f} % (median of the relative standard deviations), but points that were not timed together"
        f" by more: {drift_told(drift(records))}",
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


def scatter(records: Sequence[Timing]) -> float:
    """Median relative standard deviation of the repeats; 0 where none were kept."""
    kept = [np.std(r.repeats, ddof=1) / np.mean(r.repeats) for r in records if r.repeats]
    return float(np.median(kept)) if kept else 0.0


def drift_told(found: float) -> str:
    """In words."""
    if not found:
        return "none is seen here."
    first, second = CONTEXTS[:2]
    return f"a plain step of one row at {second:,} tokens comes out up to {100 * found:.1f} % below that at {first:,}."


def more(folder: Path, steps: Steps, pair: str) -> list[str]:
    """The sections of share.json, vllm.json and random.json, where these are there."""
    lines = []
    if (folder / "share.json").exists():
        share, machine = read_file(str(folder / "share.json")), files.read_json(folder / "share-machine.json")
        lines += [*communication_section(steps, share, machine), ""]
    if (folder / "vllm.json").exists():
        lines += [*vllm_section(files.read_json(folder / "vllm.json"), steps.cost, pair), ""]
    if (folder / "random.json").exists():
        lines += [*study_section(files.read_json(folder / "random.json"), steps), ""]
    return lines


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
    unknown = ""
    if calibration.undetermined:
        unknown = f" The times hardly tell from the other factors: {', '.join(calibration.undetermined)}."
    beside = ""
    if len(calibration.beside):
        rms = np.sqrt(np.mean(np.square(calibration.beside - 1)))
        beside = (
            f" One GPU's share of these steps, by itself (share.json), was fitted together with them, so that communication is"
            f" told from the rest; there the error is {100 * rms:.1f} % (root mean square of {len(calibration.beside)})."
        )
    ratios = [format_ratio_error(after, at) for at in after if at[1] != "bf16" and of_bf16(at) in after]
    rows = [("target", f"{n} new" if n == 1 else f"{n} new (K = {n - 1})", n) for n in NEW]
    rows += [("draft", f"draft, {n} new", n) for n in TIMED["draft"][1]]
    return [
        f"## The roofline beside all {len(after)} points",
        "",
        f"Calibrated on these very points: bandwidth x {e.bandwidth:.2f}, matrix rate x {e.matrix:.2f} in products and x"
        f" {e.attention:.2f} in attention, {1e6 * e.layer_seconds:.1f} microseconds a layer (norms, rotary embedding and the"
        f" gaps between kernels are in it), {1e6 * e.step_seconds:.0f} a step, {1e6 * e.reduce_seconds:.1f} an all-reduce, link"
        f" x {e.link:.2f} (calibrated.json).{beside}{unknown} Every point with both errors: [roofline.csv](roofline.csv).",
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
