"""What a study keeps and shows: tables of values and estimates as JSON, and the same as Markdown."""

import datetime
import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specq.files import finite
from specq.stats import Estimate

Cell = str | float | int | Estimate | None
CONFIRMED, RESOLVED, REFUTED, DEPENDS = "confirmed", "confirmed where resolved", "not confirmed here", "depends"


@dataclass
class Table:
    """Rows under columns; `formats` holds a format specification per column ("" for text). An Estimate shows its interval.

    `caption` stands above the rows, `note` below them.
    """

    caption: str
    columns: Sequence[str]
    formats: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self) | {"rows": [[_stored(cell) for cell in row] for row in self.rows]}


def _stored(cell: Cell) -> Any:  # noqa: ANN401 - JSON
    return cell.as_dict() if isinstance(cell, Estimate) else cell


def shown(cell: Any, spec: str) -> str:  # noqa: ANN401 - JSON
    """A stored cell for people: value, and interval where there is one."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    if not isinstance(cell, Mapping):
        return format(cell, spec)
    if cell["value"] is None:
        return "n/a"
    ends = ["?" if x is None else format(x, spec) for x in cell["ci95"]]
    return f"{format(cell['value'], spec)} [{ends[0]}, {ends[1]}]"


def wrapped(line: str) -> str:
    """A paragraph or an item of a list at 120 columns; tables, headings and pictures as they are."""
    if line.startswith(("|", "#", "!")):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def markdown(table: Mapping[str, Any]) -> str:
    """A stored table as Markdown, its caption above and its note below."""
    lines = [f"{table['caption']}\n"] if table["caption"] else []
    lines += ["| " + " | ".join(table["columns"]) + " |", "|" + " --- |" * len(table["columns"])]
    for row in table["rows"]:
        lines.append("| " + " | ".join(shown(c, f) for c, f in zip(row, table["formats"], strict=True)) + " |")
    lines += ["", table["note"]] if table.get("note") else []
    return "\n".join(lines) + "\n"


@dataclass
class Claim:
    """A claim as it is commonly made, beside what was measured: the verdict, why, on what it depends, and the evidence."""

    key: str
    claim: str
    verdict: str
    because: str
    tables: list[Table]

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self) | {"tables": [t.as_dict() for t in self.tables]}


def verdict(outcomes: Sequence[bool | None]) -> str:
    """Confirmed where the claim held in every case, not confirmed where in none, else it depends on the case.

    None is a case that is undecided: it is left out, but "confirmed" says then that it is so where cases are resolved.
    """
    decided = [x for x in outcomes if x is not None]
    if not any(decided):
        return REFUTED
    return DEPENDS if not all(decided) else CONFIRMED if len(decided) == len(outcomes) else RESOLVED


def provenance(environment: Mapping[str, Any], seconds: Mapping[str, Any]) -> dict:
    """Machine and versions (of a study's environment), with the command, the date and the seconds of this result."""
    module = Path(sys.argv[0]).parent.name
    own = {
        "command": shlex.join(["python", "-m", f"studies.{module}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": dict(seconds),
    }
    return {k: v for k, v in environment.items() if k not in own} | own


def machine_line(environment: Mapping[str, Any]) -> str:
    """One line about where a result comes from; date and seconds stay in the JSON."""
    e = environment
    return (
        f"{e['device']}, {e['cpus']} cores, no GPU; specq {e['specq']}, torch {e['torch']}, transformers"
        f" {e['transformers']}. Date, command and seconds are in the JSON beside this page."
    )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Strict JSON: no NaN or infinity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite(content), indent=1, allow_nan=False) + "\n")
