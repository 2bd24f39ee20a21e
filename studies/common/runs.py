"""The studies that a config file lists: each run once into a work directory, and read back from there.

[[study]]
name = "outliers-64"              # its directory
about = "for the reader of the page"
dtypes = ["fp8", "int8_per_tensor"]
outliers = 64                     # optional: key channels of the target scaled by this much (studies.common.stress)
long_documents = true             # optional: the prompts of [documents], the same at every context
pair = "tiny"                     # and any other option of `specq study`, underscores for dashes

[documents]
count = 6                         # held-out documents of at least `tokens` tokens; the next few calibrate static scales
tokens = 8192
"""

import json
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specq import files, pairs
from specq.command import resolve
from specq.config import same_study
from specq.errors import SpecqError, first_line
from specq.progress import Reporter
from specq.prompts import read_records
from specq.study import run_study
from studies.common.measured import Measured
from studies.common.stress import stressed_target

CALIBRATION = 4  # long documents are slow
OWN = ("name", "about", "dtypes", "outliers", "optional", "long_documents")
# `specq study` decides nothing here: a cost that needs no timing
DEFAULTS = {"target": None, "draft": None, "current_k": None, "cost": "roofline:h100"}


def read_config(path: Path) -> dict[str, Any]:
    """A study's config.toml. Raises SpecqError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SpecqError(f"cannot read {path}: {error}") from error


def run_all(
    config: Mapping[str, Any], work: Path, reporter: Reporter, without: Sequence[str] = ()
) -> tuple[dict[str, Measured], list[dict[str, str]]]:
    """(every study of `config` by name, those not made: about and why).

    Run where `work` does not hold it yet; a run that was interrupted goes on. Those of `without` are left out. Raises
    SpecqError for a name that `config` lacks.
    """
    if unknown := set(without) - {entry["name"] for entry in config["study"]}:
        raise SpecqError(f"no run called {', '.join(sorted(unknown))} in the config")
    work.mkdir(parents=True, exist_ok=True)
    found, not_made = {}, []
    for number, entry in enumerate(config["study"], 1):
        reporter.note(f"{number} of {len(config['study'])}: {entry['name']}, {entry['about']}")
        if why := "left out by --without" if entry["name"] in without else _missing(entry):
            reporter.note(f"not made: {why}")
            not_made.append({"name": entry["name"], "about": entry["about"], "why": why})
            continue
        found[entry["name"]] = Measured.load(entry["name"], entry["about"], _run(entry, config, work, reporter))
    return found, not_made


def seconds(names: Iterable[str], work: Path) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds that each study took when it was run (one that was interrupted: its last part; one stopped as
    it ended: left out)."""
    paths = {n: work / f"{n}.seconds.json" for n in names}
    return {n: files.read_json(p) for n, p in paths.items() if p.is_file()}


def _missing(entry: Mapping[str, Any]) -> str | None:
    """Why an optional study cannot be made here, in one line; None where it can."""
    if not entry.get("optional"):
        return None
    try:
        pairs.locate(pairs.find(entry["pair"], None, None))
    except SpecqError as error:
        return first_line(error)
    return None


def _run(entry: Mapping[str, Any], config: Mapping[str, Any], work: Path, reporter: Reporter) -> Path:
    out = work / entry["name"]
    options = DEFAULTS | {k: v for k, v in entry.items() if k not in OWN}
    if "outliers" in entry:
        options["target"] = str(stressed_target(entry["pair"], entry["outliers"], work / f"target-{entry['outliers']}"))
    if entry.get("long_documents"):
        options |= _documents(config["documents"], entry["pair"], work)
        if "int8_per_tensor" not in entry["dtypes"]:
            del options["calibrate"]  # FP8 at scale 1 then, as vLLM does
    settings, directories = resolve(options, list(entry["dtypes"]))
    if (out / "study.json").is_file():
        if same_study(settings, files.read_json(out / "study.json")["configuration"]):
            return out
        raise SpecqError(
            f"{out} holds another study than {entry['name']} of the config; remove it, or take another --work"
        )
    wall, cpu = time.perf_counter(), time.process_time()
    run_study(settings, directories, out, False, reporter, resume=True, report=False)
    took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    files.write_json(work / f"{entry['name']}.seconds.json", took)
    return out


def _documents(wanted: Mapping[str, int], pair: str, work: Path) -> dict[str, Any]:
    """Options of a study whose prompts are cut from the same long documents at every length, and calibrated on others."""
    from transformers import AutoTokenizer

    paths = {"prompts": work / "documents.jsonl", "calibrate": work / "calibration.jsonl"}
    if not all(p.is_file() for p in paths.values()):
        tokenizer = AutoTokenizer.from_pretrained(pairs.locate(pairs.find(pair, None, None))[0])
        records, _ = read_records(pairs.DEFAULT_PROMPTS)
        long = (r for r in records if len(tokenizer(r.content, verbose=False)["input_ids"]) >= wanted["tokens"])
        chosen = [json.dumps({"id": r.id, "group": r.group, "text": r.content}) for r in long]
        first, last = wanted["count"], wanted["count"] + CALIBRATION
        paths["prompts"].write_text("\n".join(chosen[:first]) + "\n")
        paths["calibrate"].write_text("\n".join(chosen[first:last]) + "\n")
    return {name: str(p) for name, p in paths.items()} | {"num_prompts": wanted["count"]}
