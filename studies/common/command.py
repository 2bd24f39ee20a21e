"""The command line of a study that lists its runs in a config file: run, judge, keep as JSON, write the page."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specq.errors import SpecqError, printable
from specq.progress import Reporter
from studies.common import runs
from studies.common.measured import Measured
from studies.common.results import provenance, write_json


def main(
    doc: str,
    here: Path,
    results: Path,
    judge: Callable[[dict, dict[str, Measured]], dict],
    page: Callable[[Path], None],
) -> None:
    """Run the study in `here` (config.toml) into `results` (NAME.json and what `page` writes beside it).

    `judge` turns the configuration and what was measured into the JSON; `page` draws from that file alone. Bad input is one
    sentence and exit code 2.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("runs") / here.name, help="where its runs are; kept and reused"
    )
    parser.add_argument("--out", type=Path, default=results, help="where the results go")
    parser.add_argument(
        "--without", action="append", default=[], help="leave a run of the config out; listed as not made"
    )
    parser.add_argument("--page", action="store_true", help="write the page alone, from the results that are kept")
    parser.add_argument("--quiet", action="store_true", help="no progress, for logs")
    args = parser.parse_args()
    try:
        kept = args.out / f"{here.name}.json"
        if args.page:
            if not kept.is_file():
                raise SpecqError(f"no results to write a page from: {kept} is not there")
        else:
            write_json(kept, _measured(here, args.work, args.without, judge, Reporter(args.quiet)))
        page(args.out)
    except SpecqError as error:
        print(f"studies.{here.name}: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"page: {args.out / 'README.md'}\nJSON: {kept}")


def _measured(
    here: Path,
    work: Path,
    without: list[str],
    judge: Callable[[dict, dict[str, Measured]], dict],
    reporter: Reporter,
) -> dict[str, Any]:
    config = runs.read_config(here / "config.toml")
    found, not_made = runs.run_all(config, work, reporter, without)
    wall, cpu = time.perf_counter(), time.process_time()
    content = judge(config, found)
    seconds = runs.seconds(found, work)
    seconds["judging"] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    total = {kind: sum(s[kind] for s in seconds.values()) for kind in ("wall", "cpu")}
    environment = next(iter(found.values())).study["environment"]
    made = provenance(environment, {"total": total} | seconds)
    return {"study": here.name, "environment": made, "not_made": not_made} | content


def read_results(folder: Path, name: str) -> dict[str, Any]:
    """The results of a study that are kept in `folder`."""
    return json.loads((folder / f"{name}.json").read_text())
