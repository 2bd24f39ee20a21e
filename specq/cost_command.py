"""What `specq cost` does: efficiency factors from measured step times, and the roofline beside the measurement."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from specq import files
from specq.capacity_command import pair_shapes
from specq.cost.calibration import Calibration, fit
from specq.cost.gpus import Gpu, parse_gpus
from specq.cost.table import Timing, TimingFile, read_file
from specq.errors import SpecqError
from specq.terminal import Terminal

TOLD = {
    "bandwidth": "share of the memory bandwidth",
    "matrix": "share of the matrix rate, products",
    "attention": "share of the matrix rate, attention",
    "link": "share of the link's rate",
    "layer_seconds": "per layer and step",
    "step_seconds": "per step",
    "reduce_seconds": "per all-reduce",
}


def cost_command(
    timings: Path,
    *,
    gpus: str,
    share: Path | None,
    pair: str | None,
    target: str | None,
    draft: str | None,
    weight_bytes: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Fit the factors of `gpus` to timings of a pair, print them beside the residuals; write a NAME.toml with `out`."""
    if out is not None and (out.suffix != ".toml" or out.exists()):
        raise SpecqError(f"--out {out}: " + ("exists already" if out.exists() else "name a new file NAME.toml"))
    if out is not None and not out.parent.is_dir():
        raise SpecqError(f"--out {out}: there is no directory {out.parent}")
    count, gpu = parse_gpus(gpus)
    main, second = pair_shapes(pair, target, draft, weight_bytes)
    file = read_file(str(timings))
    shapes = {"target": main} | ({"draft": second} if second else {})
    names = f"{timings.name} and {share.name}" if share else timings.name
    found = fit(file.records, shapes, gpu, count, names, file.share_of, _share(share, file, count))
    found.check(timings)
    if out is not None:
        files.write_text(out, as_toml(replace(gpu, efficiency=found.efficiency)))
    if as_json:
        rows = [found.row(i) for i in range(len(file.records))]
        body = {"gpu": gpu.name, "gpus": count, "efficiency": asdict(found.efficiency), "fixed_seconds": file.fixed}
        print(json.dumps(body | found.as_dict() | {"rows": rows}, indent=2, allow_nan=False))
        return
    console = Terminal()
    show(console, found)
    console.print(record_table(found))
    if out is not None:
        console.print(f"written: {out}, for --cost roofline:{out}", soft_wrap=True, markup=False)


def _share(path: Path | None, whole: TimingFile, gpus: int) -> Sequence[Timing]:
    """The timings of one GPU's share in a file beside that of whole steps. Raises SpecqError where they are no such two."""
    if path is None:
        return ()
    file = read_file(str(path))
    if whole.share_of or file.share_of != gpus:
        raise SpecqError(
            f"--share takes times of one GPU's share of {gpus} ({path} holds"
            f" {f'a share of {file.share_of}' if file.share_of else 'whole steps'}) beside times of whole steps over {gpus}"
        )
    return file.records


def show(console: Terminal, found: Calibration) -> None:
    """The factors, how far the roofline is from the timings by kind and format, and what to be wary of."""
    console.print(factor_table(found))
    console.print(group_table(found))
    if found.share_of:
        console.print(
            f"times of one GPU's share of {found.share_of}, compared without communication: a step adds it by link and"
            " reduce_seconds",
            markup=False,
        )
    if found.undetermined:
        names = ", ".join(found.undetermined)
        console.print(
            f"these timings hardly tell {names} from the other factors: by themselves the values mean little",
            markup=False,
        )
    if found.impossible:
        names = ", ".join(found.impossible)
        console.print(
            f"{names} above 1: faster than the data sheet allows, so of another GPU or model, or served from a cache",
            markup=False,
        )


def factor_table(found: Calibration) -> Table:
    """Every fitted factor beside what was assumed."""
    title = f"efficiency factors from {len(found.timings) + len(found.beside)} timings of {found.file}"
    table = _table(title, ["factor", "", "assumed", "found", "by the timings"])
    for name, share in found.share.items():
        before, after = (_factor(name, getattr(e, name)) for e in (found.assumed, found.efficiency))
        table.add_row(name, TOLD[name], before, after, f"{100 * share:.0f} %")
    return table


def _factor(name: str, value: float) -> str:
    return f"{1e6 * value:.1f} us" if name.endswith("_seconds") else f"{value:.3f}"


def group_table(found: Calibration) -> Table:
    """The calibrated roofline against the measurement, by kind and format."""
    table = _table(
        "calibrated roofline over measurement", ["kind", "KV format", "timings", "median", "rms error", "worst case"]
    )
    for g in found.groups():
        w = g["worst"]
        case = (
            f"{w['roofline_over_measured']:.2f} at batch {w['batch']}, context {w['context']:,}, {w['new_tokens']} new"
        )
        median, rms = f"{g['roofline_over_measured']:.3f}", f"{100 * g['relative_error_rms']:.1f} %"
        table.add_row(g["kind"], g["kv_format"], str(g["records"]), median, rms, case)
    return table


def record_table(found: Calibration) -> Table:
    """Every timing beside the roofline."""
    headings = ["kind", "KV format", "batch", "context", "new", "measured", "roofline", "ratio"]
    table = _table("every timing in ms; new: new tokens", headings)
    for i, t in enumerate(found.timings):
        times = (f"{1e3 * t.seconds:.3f}", f"{1e3 * found.seconds[i]:.3f}", f"{found.seconds[i] / t.seconds:.3f}")
        table.add_row(t.kind, t.kv_format, str(t.batch), f"{t.context:,}", str(t.new_tokens), *times)
    return table


def _table(title: str, headings: list[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        left = heading in ("factor", "", "kind", "KV format", "worst case")
        prose = heading in ("", "worst case")  # folds where the terminal is narrow, so that no name or number is cut
        table.add_column(heading, justify="left" if left else "right", no_wrap=not prose)
    return table


def as_toml(gpu: Gpu) -> str:
    """A file for `roofline:NAME.toml` with the accelerator's figures and its factors."""
    figures = {k: v for k, v in asdict(gpu).items() if k not in ("name", "efficiency") and v is not None}
    parts = (figures, asdict(gpu.efficiency))
    return "\n[efficiency]\n".join("".join(f"{k} = {json.dumps(v)}\n" for k, v in part.items()) for part in parts)
