"""What `specq study` does around the study: defaults of the pair, the output directory, the answer in the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specq import files, pairs
from specq.config import StudyConfig, make_config
from specq.errors import SpecqError
from specq.progress import Reporter
from specq.report.schema import Recommendation
from specq.vllm_options import parse_version


def resolve(options: dict[str, Any], dtypes: list[str]) -> tuple[StudyConfig, dict[str, str]]:
    """(configuration, sub-directory per format name) from command-line options; None means not given."""
    from specq.kv import get_format

    pair = pairs.find(options["pair"], options["target"], options["draft"])
    names = {get_format(d).name: d.strip().lower() for d in reversed(dtypes)}
    given = {k: v for k, v in options.items() if v is not None}
    given = pair.defaults | given | {"dtypes": tuple(get_format(d).name for d in dtypes), "pair": pair.name}
    if options["target"] and options["draft"]:
        given["pair"] = None
    config = make_config(**given)
    _check_cost(config.cost)
    parse_version(config.vllm_version)
    return config, {name: names[name] for name in config.dtypes}


def _check_cost(cost: str) -> None:
    from specq.cost import roofline

    if cost.startswith("roofline:"):
        roofline.get_gpu(cost.removeprefix("roofline:"))
    elif cost != "measured" and not Path(cost).is_file():
        raise SpecqError(f"--cost {cost!r} is neither measured, nor roofline:GPU, nor a file of timings")


def study_command(options: dict[str, Any], dtypes: list[str], out: Path | None, overwrite: bool, quiet: bool) -> None:
    """Run a study, or show the finished one when its directory already holds this very configuration."""
    config, directories = resolve(options, dtypes)
    name = config.pair or pairs.find(None, config.target, config.draft).name
    out = out or Path("runs") / "-".join([name, *directories.values()])
    if (out / "study.json").is_file() and not overwrite:
        finished = files.read_json(out / "study.json")
        if finished.get("configuration") != config.model_dump(mode="json"):
            raise SpecqError(
                f"{out} holds a study of another configuration; choose another --out, or --overwrite to replace it"
            )
        show(out, finished["directories"])
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not overwrite:
        raise SpecqError(f"{out} exists and is no finished study; choose another --out, or --overwrite to replace it")
    from specq.study import run_study

    run_study(config, directories, out, overwrite, Reporter(quiet))
    show(out, directories)


def show(out: Path, directories: dict[str, str]) -> None:
    """Print the answer for every format and the paths of its files."""
    console = Console(highlight=False)
    for directory in directories.values():
        sub = out / directory
        rec = Recommendation.model_validate(files.read_json(sub / "recommendation.json"))
        _show_one(console, rec, sub)
    console.print(
        f"all figures: {out / 'study.json'}, {out / 'positions.parquet'}, {out / 'texts.parquet'}", soft_wrap=True
    )


def _number(x: float | None, digits: int = 4, sign: bool = True) -> str:
    return "n/a" if x is None else f"{x:+.{digits}f}" if sign else f"{x:.{digits}f}"


def _show_one(console: Console, rec: Recommendation, sub: Path) -> None:
    k, shift = str(rec.mu_shift.k), rec.mu_shift
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    resolved = "beyond the noise floor" if shift.significant else "not resolved: within the noise"
    if shift.k:
        table.add_row(
            f"accepted per cycle, K={k}",
            f"{rec.baseline_mu_accepted[k]:.3f} with BF16, {rec.mu_accepted[k]:.3f} with {rec.target_kv_dtype}",
        )
    interval = f"[{_number(shift.ci95[0])}, {_number(shift.ci95[1])}]"
    table.add_row("shift of mu", f"{_number(shift.value)} {interval}, {resolved}")
    table.add_row(
        "null arm",
        f"{_number(shift.null_value, 6)} [{_number(shift.null_ci95[0], 6)}, {_number(shift.null_ci95[1], 6)}]",
    )
    if rec.mu_shift_own is not None:
        own = rec.mu_shift_own
        table.add_row("shift on own text", f"{_number(own.value)} [{_number(own.ci95[0])}, {_number(own.ci95[1])}]")
    best = rec.recommended_num_speculative_tokens
    gain = rec.speedup
    table.add_row(
        "num_speculative_tokens",
        f"{best} recommended, {rec.current_num_speculative_tokens} now;"
        f" speedup {gain.dtype_at_recommended:.2f}x against {gain.dtype_at_current:.2f}x"
        f" ({100 * gain.retuning_gain:+.1f} % [{100 * gain.ci95[0]:+.1f}, {100 * gain.ci95[1]:+.1f}], cost {rec.cost.source})",
    )
    table.add_row("decision", rec.decision)
    for warning in rec.warnings:
        table.add_row("warning", warning)
    console.rule(f"{rec.pair}: {rec.target_kv_dtype} against BF16", align="left")
    console.print(table)
    console.print(f"report: {sub / 'report.html'}\nJSON:   {sub / 'recommendation.json'}", soft_wrap=True)
