"""What `specq study` does around the study: defaults of the pair, the output directory, the answer in the terminal."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from specq import files, from_server, pairs
from specq.config import StudyConfig, file_digest, make_config, same_study, validated
from specq.device import on_device
from specq.errors import SpecqError, printable
from specq.models.checkpoint import open_checkpoint
from specq.models.directory import read_json_object
from specq.models.fingerprint import fingerprint
from specq.models.quantization import auto_kv_format
from specq.progress import Reporter
from specq.report.schema import Recommendation
from specq.terminal import Terminal
from specq.vllm_options import parse_version


def resolve(options: dict[str, Any], dtypes: list[str]) -> tuple[StudyConfig, dict[str, str]]:
    """(configuration, sub-directory per format name) from command-line options; None means not given."""
    if options.get("vllm_command") is not None:
        options, dtypes = from_server.study_options(from_server.text_of(options["vllm_command"]), options, dtypes)
    dtypes = dtypes or ["fp8"]
    pair = pairs.find(options["pair"], options["target"], options["draft"])
    names = format_names(pair, dtypes)
    given = {k: v for k, v in options.items() if v is not None}
    given = pair.defaults | given | {"dtypes": tuple(names), "pair": pair.name}
    given |= fingerprints(pair, bool(options.get("random_weights")))
    if "k_max" in given and options["current_k"] is None:
        given["current_k"] = min(StudyConfig().current_k, given["k_max"])  # the default follows a smaller k_max
    config = make_config(**given)
    parse_version(config.vllm_version)
    return config, {name: names[name] for name in config.dtypes}


def format_names(pair: pairs.Pair, dtypes: list[str]) -> dict[str, str]:
    """The formats asked for, in order: their names, and what they were called."""
    from specq.kv import get_format

    names: dict[str, str] = {}
    for called, meant in zip(dtypes, resolve_auto(pair, dtypes), strict=True):
        names.setdefault(get_format(meant).name, called.strip().lower())
    return names


def resolve_auto(pair: pairs.Pair, dtypes: list[str]) -> list[str]:
    """The formats with `auto` replaced by what the target's checkpoint makes of it, as a server would."""
    if "auto" not in {d.strip().lower() for d in dtypes}:
        return dtypes
    path = Path(pair.target.source if pair.target.local else pairs.locate(pair)[0]) / "config.json"
    meant = auto_kv_format(read_json_object(path)) if path.is_file() else "bf16"
    return [meant if d.strip().lower() == "auto" else d for d in dtypes]


def fingerprints(pair: pairs.Pair, random_weights: bool) -> dict[str, str]:
    """`target_sha256` and `draft_sha256` of the models that lie here, by content; random weights need config.json alone."""
    found = {}
    for role, side in (("target", pair.target), ("draft", pair.draft)):
        if side.local and side.is_model:
            config = str(Path(side.source) / "config.json")
            found[f"{role}_sha256"] = (
                file_digest(config) if random_weights else fingerprint(open_checkpoint(side.source))
            )
    return found


def refuse_both(overwrite: bool, resume: bool) -> None:
    """Raises SpecqError for two wishes that contradict each other."""
    if overwrite and resume:
        raise SpecqError("--resume continues what is there and --overwrite discards it; give one of them")


def study_command(
    options: dict[str, Any],
    dtypes: list[str],
    out: Path | None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    part: str | None = None,
    quiet: bool = False,
) -> None:
    """Run a study, or show the finished one when its directory already holds this very configuration."""
    refuse_both(overwrite, resume)
    share = _part(part)
    config, directories = resolve(options, dtypes)
    reporter = Reporter(quiet)
    for note in from_server.notes(config):
        reporter.note(note)
    name = config.pair or pairs.find(None, config.target, config.draft).name
    name = "-".join([name, *directories.values(), *([f"part{share[0]}of{share[1]}"] if share[1] > 1 else [])])
    out = Path(os.path.normpath(out or Path("runs") / name))
    if not out.name:
        raise SpecqError(f"--out {out} is no directory that a study could be renamed to; name a new one")
    files.refuse_foreign(out)  # now, not after the models are loaded
    config = on_device(config, options["device"], out, overwrite=overwrite)
    if not overwrite and _finished(out, config, share):
        return
    from specq.shards import refuse_mixing

    refuse_mixing(out, lambda old: same_study(config, old.configuration), overwrite, resume)
    _run(config, directories, out, overwrite, reporter, resume=resume, part=share)


def _run(
    config: StudyConfig,
    directories: dict[str, str],
    out: Path,
    overwrite: bool,
    reporter: Reporter,
    **how: Any,  # noqa: ANN401
) -> None:
    from specq.study import run_study

    if run_study(config, directories, out, overwrite, reporter, **how) is None:
        _tell_part(out)
    else:
        show(out, directories)


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    try:
        mine, parts = (int(x) for x in text.split("/"))
    except ValueError:
        mine = parts = 0
    if not 1 <= mine <= parts:
        raise SpecqError(
            f"--part takes two numbers like 2/8, the share of this machine and the number of shares, not {text!r}"
        )
    return mine, parts


def _finished(out: Path, config: StudyConfig, share: tuple[int, int]) -> bool:
    """Show what `out` holds if that is this study; SpecqError if it is another one; False if it is nothing yet."""
    whole = (out / "study.json").is_file()
    if not whole and not (out / "run.json").is_file():
        return False
    finished = files.read_json(out / ("study.json" if whole else "run.json"))
    same = isinstance(finished, dict) and same_study(config, finished.get("configuration"))
    if not same or (not whole and finished.get("part") != list(share)):
        raise SpecqError(
            f"{out} holds a study of another configuration; choose another --out, or --overwrite to replace it"
        )
    if (out / "run.json").is_file():  # killed between renaming and tidying up, or a part, which stays as it is
        from specq.shards import tidy

        tidy(out)
    if not whole:
        _tell_part(out)
        return True
    directories = finished["directories"]
    if not all((out / d / "report.html").is_file() for d in directories.values()):
        from specq.study import draw

        draw(out)
    show(out, directories)
    return True


def _tell_part(out: Path) -> None:
    mine, parts = files.read_json(out / "run.json")["part"]
    print(
        printable(
            f"part {mine} of {parts} is complete: {out}\nwith all parts on one machine: specq merge OUT {out} ..."
        )
    )


def merge_command(
    out: Path, parts: Sequence[Path], replacing: dict[str, str | None], overwrite: bool, quiet: bool
) -> None:
    """Join the parts of a study into `out` and finish it; `replacing` gives paths that differ on this machine."""
    from specq.shards import read_run

    out = Path(os.path.normpath(out))
    runs = [read_run(p) for p in parts]
    for path, run in zip(parts, runs, strict=True):
        if run is None:
            raise SpecqError(
                f"{path} holds no part of a study: it has no run.json that can be read; give the --out of specq study --part"
            )
        if run.study != runs[0].study:
            raise SpecqError(f"{path} belongs to another study than {parts[0]}: their configurations or weights differ")
    versions = sorted({", ".join(f"{k} {v}" for k, v in r.versions.items()) for r in runs})
    reporter = Reporter(quiet)
    if len(versions) > 1:
        reporter.note(f"the parts were made under different versions, so last bits may differ: {'; '.join(versions)}")
    theirs = validated(runs[0].configuration)
    stored = theirs.model_dump() | {k: v for k, v in replacing.items() if v is not None}
    pair = pairs.find(stored["pair"], stored["target"], stored["draft"])
    stored |= {"target_sha256": None, "draft_sha256": None} | fingerprints(pair, theirs.random_weights)
    config = make_config(**stored)
    if not same_study(config, runs[0].configuration):
        raise SpecqError("the models or prompts given here are not those the parts were made with")
    if runs[0].directories.keys() != set(config.dtypes):
        raise SpecqError(f"{parts[0] / 'run.json'} is damaged: its directories are not those of its formats")
    _run(config, runs[0].directories, out, overwrite, reporter, sources=list(parts))


def show(out: Path, directories: dict[str, str]) -> None:
    """Print the answer for every format and the paths of its files."""
    console = Terminal()
    for directory in directories.values():
        sub = out / directory
        rec = Recommendation.model_validate(files.read_json(sub / "recommendation.json"))
        console.rule(escape(f"{rec.pair}: {rec.target_kv_dtype} against BF16"), align="left")
        console.print(answer_table(rec))
        if rec.vllm and rec.vllm.changed_command:
            lines = (
                f"server now:\n  {rec.vllm.current_command}\nwith {rec.target_kv_dtype}:\n  {rec.vllm.changed_command}"
            )
            console.print(printable(lines), soft_wrap=True, markup=False)
        console.print(
            f"report: {sub / 'report.html'}\nJSON:   {sub / 'recommendation.json'}", soft_wrap=True, markup=False
        )
    console.print(
        f"all figures: {out / 'study.json'}, {out / 'positions.parquet'}, {out / 'texts.parquet'}",
        soft_wrap=True,
        markup=False,
    )


def _number(x: float | None, digits: int = 4) -> str:
    return "n/a" if x is None else f"{x:+.{digits}f}"


def _interval(ci: Sequence[float | None], digits: int = 4) -> str:
    return f"[{_number(ci[0], digits)}, {_number(ci[1], digits)}]"


def _speed_rows(rec: Recommendation) -> list[tuple[str, str]]:
    """What the format does to speed at one K, split into its parts, and what keeping BF16's best K would cost."""
    parts, kept = rec.break_even, rec.speedup.kept_bf16_k
    lost = [None if x is None else 100 * x for x in kept.ci95]
    return [
        (
            f"speed at K={parts.k}",
            f"tokens per cycle x{parts.emitted_ratio:.4f}, time per cycle x{parts.cycle_time_ratio:.4f}: together"
            f" x{parts.speed_ratio:.4f} of BF16's speed (break-even: equal ratios)",
        ),
        (
            "without retuning",
            f"{100 * kept.loss:.1f} % {_interval(lost, 1)} of speed lost by keeping BF16's best K = {kept.k}",
        ),
    ]


def answer_table(rec: Recommendation) -> Table:
    """The answer for one format, a row for each thing to know."""
    k, shift = str(rec.mu_shift.k), rec.mu_shift
    resolved = "beyond the noise floor" if shift.significant else "not resolved: within the noise"
    rows = [
        (
            f"accepted per cycle, K={k}",
            f"{rec.baseline_mu_accepted[k]:.3f} with BF16, {rec.mu_accepted[k]:.3f} with {rec.target_kv_dtype}",
        ),
        ("shift of mu", f"{_number(shift.value)} {_interval(shift.ci95)}, {resolved}"),
        ("null arm", f"{_number(shift.null_value, 6)} {_interval(shift.null_ci95, 6)}"),
    ]
    if rec.mu_shift_own is not None:
        rows.append(("shift on own text", f"{_number(rec.mu_shift_own.value)} {_interval(rec.mu_shift_own.ci95)}"))
    gain = rec.speedup
    percent = [None if x is None else 100 * x for x in gain.ci95]
    k_row = (
        f"{rec.recommended_num_speculative_tokens} recommended, {rec.current_num_speculative_tokens} now; speedup"
        f" {gain.dtype_at_recommended:.2f}x against {gain.dtype_at_current:.2f}x ({100 * gain.retuning_gain:+.1f} %"
        f" {_interval(percent, 1)}, cost {rec.cost.source})"
    )
    if any(v.code == "random_weights" for v in rec.verdicts):
        k_row = f"none recommended, {rec.current_num_speculative_tokens} now"
    rows.append(("num_speculative_tokens", k_row))
    if rec.target_kv_dtype != "bf16":
        rows += _speed_rows(rec)
    rows.append(("decision", rec.decision))
    rows += [("verdict", f"{v.code}: {v.decision}") for v in rec.verdicts]
    rows += [("warning", w) for w in rec.warnings]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table
