"""What `specq validate` does around the sweep: options, output directory, the answer in the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from specq import pairs
from specq.config import validated
from specq.cost import CostModel
from specq.engines.vllm.plan import Cell, grid, parse_cell, served
from specq.engines.vllm.record import recommended_k
from specq.engines.vllm.runner import ENGINE, FAILURES, log_of
from specq.engines.vllm.validate import (
    Limits,
    Validation,
    built_for_cpu,
    cells_folder,
    installed_version,
    own_pair,
    synthetic_workload,
    workload,
)
from specq.errors import SpecqError
from specq.finished import Finished, load, reconfigured
from specq.progress import Reporter
from specq.terminal import Terminal
from specq.vllm_options import parse_version, why_not_probed

FURTHER_KS = (2, 4, 8)  # run beside the K in use and the recommended ones, as far as the study measured them
GPU_SHARE, CPU_SHARE = 0.9, 0.3  # of the memory; on a CPU vLLM starts only where so much is free


def cells_of(found: Finished, dtypes: Sequence[str], ks: Sequence[int] | None, extra: Sequence[str]) -> list[Cell]:
    """The grid: BF16 and the study's formats that vLLM has (or those given), plain decoding, the K in use, the recommended
    ones and 2, 4, 8 (or those given), and the extra cells. Raises SpecqError for what vLLM or the study does not have."""
    config = found.config
    if dtypes:
        formats = [served(d) for d in dtypes]
    else:
        from specq.kv import get_format

        formats = [f for n in dict.fromkeys(["bf16", *config.dtypes]) if (f := get_format(n)).vllm]
    if ks is None:
        recommended = {recommended_k(found, f.name) for f in formats} - {None}
        ks = sorted({config.current_k, *recommended, *(k for k in FURTHER_KS if k <= config.k_max)})
    if ks and min(ks) < 0:
        raise SpecqError("--k takes numbers of drafted tokens, 0 for plain decoding")
    return grid(formats, ks, found.drafting, [parse_cell(c, found.drafting) for c in extra])


def _cost(found: Finished, cost: str | None) -> CostModel | None:
    config = reconfigured(found.config, {"cost": cost}) if cost else found.config
    try:
        return found.cost(config)
    except SpecqError:
        if cost:
            raise
        return None  # the study's own cost file is gone: nothing is predicted


def _refuse_senseless(positive: Mapping[str, float | None], memory_share: float, stop_after: float | None) -> None:
    """Raises SpecqError naming the option whose number makes no sense; None is not given."""
    for name, value in positive.items():
        if value is not None and not value > 0:
            raise SpecqError(f"--{name} must be positive, not {value}")
    if not 0 < memory_share <= 1:
        raise SpecqError(f"--memory-share is a share of the device's memory, beyond 0 and up to 1, not {memory_share}")
    if stop_after is not None and not stop_after >= 0:
        raise SpecqError(f"--stop-after takes seconds, not {stop_after}")


def validate_command(
    study_dir: Path,
    *,
    dtypes: Sequence[str],
    ks: Sequence[int] | None,
    extra: Sequence[str],
    batch: int | None,
    num_prompts: int | None,
    passes: int,
    synthetic: bool,
    pair: str | None,
    context: int | None,
    cost: str | None,
    probe: bool,
    eager: bool,
    tensor_parallel: int,
    memory_share: float | None,
    limits: Limits,
    device: str | None,
    out: Path | None,
    quiet: bool,
    command: Sequence[str] = ENGINE,
    version: str | None = None,
) -> dict:
    """Run or continue a sweep and print its answer; returns validation.json's content. See `specq validate --help`."""
    found = load(study_dir)
    version = version or installed_version()
    parse_version(version, "the installed vLLM")
    if memory_share is None:
        memory_share = CPU_SHARE if built_for_cpu() else GPU_SHARE
    if device:
        found.config = validated(found.config.model_dump() | {"device": device})
    _refuse_senseless(
        {"passes": passes, "tensor-parallel": tensor_parallel, "at-once": limits.at_once, "batch": batch,
         "num-prompts": num_prompts, "context": context, "time-limit": limits.cell}, memory_share, limits.stop_after
    )  # fmt: skip
    if synthetic and probe:
        raise SpecqError(
            "--probe records the study's own texts; --synthetic has neither texts nor probabilities to record"
        )
    out = out or study_dir / ("synthetic" if synthetic else "validation")
    cells = cells_of(found, dtypes, ks, extra)
    if probe and (why := why_not_probed(version)):
        raise SpecqError(f"--probe {why}")
    if probe and tensor_parallel > 1:
        raise SpecqError("--probe records in one process: use it with --tensor-parallel 1")
    if found.lookup and (synthetic or probe):
        raise SpecqError(
            "--synthetic and --probe need a draft that proposes in every cycle; n-gram lookup does where it finds something"
        )
    common = dict(
        batch=batch or found.config.batch[0], passes=passes, seed=found.config.seed, eager=eager,
        tensor_parallel=tensor_parallel, memory_share=memory_share,
    )  # fmt: skip
    if synthetic:
        shape = pairs.find(pair, None, None) if pair else own_pair(found)
        context = context or found.config.context[0]
        work = synthetic_workload(
            found, cells, shape, out, version, num_prompts or 2 * common["batch"], context, **common
        )
    elif pair or context:
        raise SpecqError("--pair and --context belong to --synthetic; otherwise pair and prompts are the study's")
    else:
        work = workload(found, version, num_prompts, probe=str((out / "probe").resolve()) if probe else None, **common)
    made = Validation(found, cells, work, out, _cost(found, cost), Reporter(quiet), limits, command).run()
    show(made, out)
    return made


def refuse_fruitless(made: dict) -> None:
    """Raises SpecqError when cells of a sweep ended and none of them worked, so that a script sees it; what it wrote stays."""
    seen = [c["status"] for c in made["cells"]]
    if "ok" not in seen and (bad := sum(s in FAILURES for s in seen)):
        raise SpecqError(f"no cell worked: {bad} of {len(seen)} failed or took too long; validation.json says why")


def show(made: dict, out: Path) -> None:
    """Print the cells, the K truly best of every format, and where the file is."""
    console = Terminal()
    console.print(_cell_table(made["cells"]), crop=False)  # what a narrow terminal has no room for, it wraps itself
    for cell in made["cells"]:
        if cell["status"] in FAILURES:
            log = log_of(cells_folder(out), cell["name"])
            console.print(f"{cell['name']}: {cell['error']}; log: {log}", markup=False, soft_wrap=True)
    for name, f in made["formats"].items():
        console.print(f"{name}: {regret_sentence(f)}", markup=False)
    for warning in made["warnings"]:
        console.print(f"warning: {warning}", markup=False)
    if not made["complete"]:
        console.print("not complete: the same command again runs what is missing", markup=False)
    console.print(f"JSON: {out / 'validation.json'}", soft_wrap=True, markup=False)


def _cell_table(cells: Sequence[dict]) -> Table:
    """A row per cell: what was measured beside what was told, or its status."""
    rows = [[escape(c["name"]), *(_figures(c) if c["status"] == "ok" else [c["status"]])] for c in cells]
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(("cell", "emitted", "replay", "difference", "tokens/s", "speedup", "steady", "predicted")):
        # names and intervals may take several lines, a number or a status stays in one piece
        room = {"cell": 12, "difference": len("difference")}.get(name) or max(
            len(x) for x in (name, *(r[i] for r in rows if i < len(r)))
        )
        table.add_column(name, justify="right" if i else "left", min_width=room, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _figures(cell: dict) -> list[str]:
    agreed, counters = cell.get("agreement"), cell["counters"]
    measured, told, gap = "1", "", ""
    if agreed:
        emitted = agreed["emitted"]
        measured, told = (f"{emitted[x]['value']:.4f}" for x in ("measured", "predicted"))
        gap = _interval(emitted["difference"])
    elif counters:
        measured = f"{counters['mean_emitted']:.4f}"
    gained, said = cell.get("speedup_measured") or {}, cell.get("speedup_predicted") or {}
    times = [gained.get("throughput"), gained.get("steady"), said.get("value")]
    speed = f"{cell['speed']['tokens_per_second']:,.0f}"
    return [measured, told, gap, speed, *("" if x is None else f"{x:.3f}x" for x in times)]


def regret_sentence(f: Mapping[str, Any]) -> str:
    """What a format's block says of the K that was best and of those that were recommended."""
    only = len(f["tokens_per_second"]) == 1  # the best of one says nothing

    def lost(x: float | None) -> str:
        return "not measured" if x is None or only else f"{100 * x:.1f} %"

    said = f"only K = {f['measured_best_k']} was measured" if only else f"best measured K = {f['measured_best_k']}"
    if f["recommended_k"] is None:
        said += "; the study does not have this format"
    else:
        said += f", recommended {f['recommended_k']}, regret {lost(f['regret'])}"
    if f["spread_of_repeats"] is not None:
        said += f" (repeats scatter by {100 * f['spread_of_repeats']:.1f} %)"
    if new := f.get("retuned"):
        said += f"; with this engine's step times recommended {new['recommended_k']}, regret {lost(new['regret'])}"
    return said


def _interval(block: dict) -> str:
    lo, hi = block["ci95"]
    if lo is None or hi is None:
        return f"{block['value']:+.4f}"
    return f"{block['value']:+.4f} [{lo:+.4f}, {hi:+.4f}]"
