"""What `specq import-metrics` does: files (or a live server) in, acceptance with its uncertainty out."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from specq import files
from specq.engines.metrics.difference import Reading, difference
from specq.engines.metrics.readings import other_reading, read_text
from specq.engines.metrics.scrape import scrape, seconds
from specq.engines.metrics.summary import choose_k, shift, summarise
from specq.engines.metrics.text import parse
from specq.errors import SpecqError
from specq.progress import Reporter
from specq.terminal import Terminal


def read(paths: Sequence[Path], model: str | None = None) -> Reading:
    """One Reading from files of one kind: scrapes in order of time; or benchmark results, logs, or histograms to be pooled.

    Raises SpecqError for files of mixed kinds, and for scrapes of several models of which none is chosen.
    """
    texts = [(path, read_text(path)) for path in paths]
    others = [other_reading(text, path.name) for path, text in texts]
    if model is not None and any(o is not None for o in others):
        raise SpecqError("--model chooses among the models of Prometheus text; these files have one reading each")
    if len({o and o.unit for o in others}) > 1:  # their scatter would be of unlike things
        raise SpecqError("give files of one kind: Prometheus text, benchmark results, logs, or histograms of requests")
    if all(o is not None for o in others):
        return Reading(
            ", ".join(o.source for o in others),
            [c for o in others for c in o.clusters],
            list(dict.fromkeys(n for o in others for n in o.notes)),
            all(o.exact for o in others),
            others[0].unit,
        )
    readings = difference([(path.name, parse(text, path.name)) for path, text in texts])
    return readings[chosen(readings, model)]


def chosen(models: Iterable[str], wanted: str | None) -> str:
    """Which of the models that scrapes hold to read. Raises SpecqError where none is chosen of several, or one not there."""
    models = list(dict.fromkeys(models))
    if wanted is None and len(models) > 1:
        raise SpecqError(f"these scrapes are of several models; choose one with --model: {', '.join(models)}")
    if wanted is not None and wanted not in models:
        raise SpecqError(f"no counters of model {wanted!r}; there are {', '.join(map(repr, models))}")
    return wanted if wanted is not None else models[0]


def import_metrics_command(
    paths: Sequence[Path],
    against: Sequence[Path],
    url: str | None,
    every: str,
    span: str,
    model: str | None,
    draft_cost: float | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print (and with `out` write) what counters say; see `specq import-metrics --help`."""
    if (url is None) == (not paths):
        raise SpecqError("give files (BEFORE AFTER), or --url of a live server")
    if draft_cost is not None and not 0 < draft_cost < float("inf"):
        raise SpecqError(
            f"--draft-cost {draft_cost} must be positive: seconds of a draft step per second of a target step"
        )
    other = summarise(read(against, model)) if against else None  # before minutes of scraping
    if url is None:
        found = summarise(read(paths, model))
    else:
        folder = out or Path(time.strftime("scrapes-%Y%m%d-%H%M%S"))
        found = _scraped(url, seconds(every, "--every"), seconds(span, "--for"), folder, model, Reporter(quiet))
    if other is not None:
        found["against"], found["mu_shift_from_against"] = other, shift(other, found)
    if draft_cost is not None and found.get("marginal_survival"):
        found["choice"] = choose_k([s["value"] for s in found["marginal_survival"]], draft_cost)
    if out is not None:
        files.make_directory(out)
        files.write_json(out / "metrics.json", found)
    if as_json:
        import json

        print(json.dumps(files.finite(found), indent=2, allow_nan=False))
    else:
        Terminal().print(table(found))


def _scraped(
    url: str, every: float, span: float, folder: Path, model: str | None, reporter: Reporter
) -> dict[str, Any]:
    """What a live server's counters say; the model is known to be there from the first scrape on."""
    paths, missed = scrape(
        url, every, span, folder, reporter, check=lambda found: chosen((e.model for e in found), model)
    )
    kept = f"{len(paths)} scrapes are kept in {folder}"
    try:
        found = summarise(read(paths, model))
    except SpecqError as error:
        raise SpecqError(f"{error}; {kept}") from error
    found["notes"].append(kept)
    if missed:
        found["notes"].append(
            f"{missed} scrapes found no counters; what a server did between its last scrape and a restart is lost"
        )
    return found


def _value(block: dict[str, Any], digits: int = 4) -> str:
    lo, hi = block["ci95"]
    interval = "no interval" if lo is None else f"[{lo:.{digits}f}, {hi:.{digits}f}]"
    return f"{block['value']:.{digits}f} {interval}"


def table(found: dict[str, Any]) -> Table:
    """The answer, a row for each thing to know."""
    rows = [
        ("cycles", f"{found['drafts']:,} drafts, {found['drafted']:,} tokens drafted, {found['accepted']:,} accepted")
    ]
    if found["drafts"]:
        rows += [
            ("accepted per cycle (mu)", _value(found["mu_accepted"])),
            ("emitted per cycle", f"{_value(found['mean_emitted'])}, vLLM's mean acceptance length"),
            ("accepted per drafted token", f"{found['acceptance_rate']:.4f}"),
        ]
        if found["marginal_survival"]:
            rows.append(("marginal S_k", ", ".join(_value(s, 3) for s in found["marginal_survival"])))
            given = ["n/a" if c is None else f"{c:.3f}" for c in found["conditional_survival"]]
            rows.append(("conditional S_k / S_(k-1)", ", ".join(given)))
        if (end := found["mu_accepted"]["ci95"][1]) is not None:
            k = found["num_speculative_tokens_measured"]
            each = " of one engine each" if found["unit"] == "scrape interval" else ""
            cut = f", cut at K = {k}, the most there can be" if end == k else ""
            rows.append(("intervals from", f"the scatter of {found['clusters']} {found['unit']}s{each}{cut}"))
        narrow = found["mu_if_cycles_were_independent"]
        if narrow:
            wider, between = found["overdispersion"], f"variance between {found['unit']}s is"
            told = ", too narrow" if wider is None else f": {between} {wider:.1f} times that"
            rows.append(("were cycles independent", f"mu {narrow['ci95'][0]:.4f} to {narrow['ci95'][1]:.4f}{told}"))
    if found.get("mu_shift_from_against"):
        s = found["mu_shift_from_against"]
        told = {True: "resolved", False: "not resolved", None: "cannot be judged"}[s["significant"]]
        rows.append(("shift of mu from --against", f"{_value(s)}, {told}"))
    if measured := found.get("num_speculative_tokens_measured"):
        choice = found.get("choice")
        best = f"{choice['num_speculative_tokens']} at a draft cost of {choice['draft_cost']:g}; " if choice else ""
        rows.append(("num_speculative_tokens", f"{best}{measured} is the largest measured, beyond it nothing is known"))
    rows += [("note", n) for n in found["notes"]]
    out = Table(show_header=False, box=None, pad_edge=False)
    out.add_column(style="bold", no_wrap=True)
    out.add_column()
    for name, value in rows:
        out.add_row(escape(name), escape(value))
    return out
