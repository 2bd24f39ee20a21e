"""Counters of a running vLLM server, from the Prometheus text of its /metrics page.

    specq import-metrics before.txt after.txt

Counters are cumulative: two scrapes give what happened between them, one gives everything since the server started.
Series of several engines are summed before any ratio is taken. Sample names are matched whole: `_created` timestamps and
`..._per_pos` series are no counts of accepted tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.counters import CycleCounts
from specq.errors import SpecqError

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
NAMES = (DRAFTS, DRAFTED, ACCEPTED, PER_POSITION)
EXACT = 1 << 53  # beyond this a float no longer counts one by one
LONGEST = 1 << 28  # bytes; a metrics page has some hundred kilobytes

# (sample name, model, engine, draft position or "")
Series = tuple[str, str, str, str]


@dataclass(frozen=True)
class Counted:
    """What a server counted, by model; `since` says over which time. Keys of `engines` are vLLM's engine labels."""

    model: str
    since: str
    counts: CycleCounts
    engines: dict[str, CycleCounts]

    @property
    def k(self) -> float:
        """Drafted tokens per cycle: num_speculative_tokens where every cycle drafts as many."""
        return self.counts.drafted / self.counts.drafts

    def as_dict(self) -> dict[str, Any]:
        """For JSON; accepted and emitted are told apart by name."""
        return {"model": self.model, "since": self.since} | _block(self.counts) | {
            "engines": {name: _block(c) for name, c in self.engines.items()} if len(self.engines) > 1 else {}
        }  # fmt: skip


def _block(c: CycleCounts) -> dict[str, Any]:
    return {
        "cycles": c.drafts,
        "drafted_tokens": c.drafted,
        "accepted_tokens": c.accepted,
        "drafted_per_cycle": c.drafted / c.drafts,
        "mean_accepted_per_cycle": c.mean_accepted,
        "mean_emitted_per_cycle": c.mean_emitted,
        "acceptance_rate": c.acceptance_rate,
        "marginal_survival": c.marginal,
        "conditional_acceptance": c.conditional,
    }


def read_text(path: str | Path) -> str:
    """A metrics page from a file. Raises SpecqError when it is no text."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise SpecqError(f"cannot read {path}: it is not a regular file")
    try:
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
        if len(data) > LONGEST:
            raise SpecqError(f"{path} is larger than {LONGEST >> 20} MB, which no metrics page is")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecqError(f"{path} is no metrics page: byte {error.start} is not UTF-8 text") from error


def parse(text: str, source: str) -> dict[Series, int]:
    """Counts of the speculative-decoding counters in a metrics page.

    Raises SpecqError when the page is no Prometheus text, has none of the counters, or values that are no counts.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[Series, int] = {}
    wanted = "\n".join(line for line in text.split("\n") if line.lstrip().startswith("vllm:spec_decode_"))
    try:
        samples = [s for family in text_string_to_metric_families(wanted + "\n") for s in family.samples]
    except Exception as error:  # the parser raises ValueError, IndexError and others at broken lines
        raise SpecqError(
            f"{source} is no Prometheus text: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    for s in samples:
        if s.name not in NAMES:
            continue
        labels = s.labels
        key = (s.name, labels.get("model_name", ""), labels.get("engine", "0"), labels.get("position", ""))
        if not 0 <= s.value <= EXACT or s.value != int(s.value):
            raise SpecqError(f"{source}: {s.name} is {s.value}, which is no count")
        if key in found:
            raise SpecqError(f"{source}: {s.name} appears twice for engine {key[2]}")
        found[key] = int(s.value)
    if not any(key[0] == DRAFTS for key in found):
        raise SpecqError(
            f"{source} has no {DRAFTS}: the server does not speculate, has not yet, or this is no metrics page of vLLM"
        )
    return found


def difference(before: Mapping[Series, int], after: Mapping[Series, int]) -> dict[Series, int]:
    """What was counted between two scrapes. Raises SpecqError at a counter reset: the server restarted in between."""
    fallen = next((key for key, value in before.items() if after.get(key, -1) < value), None)
    if fallen is not None:
        now = after.get(fallen, "gone")
        raise SpecqError(
            f"counter reset: {fallen[0]} of engine {fallen[2]} was {before[fallen]} and is {now}; the server restarted between"
            " the scrapes (or their order is wrong), so take both from one run"
        )
    return {key: value - before.get(key, 0) for key, value in after.items()}


def count(series: Mapping[Series, int], source: str, since: str, model: str | None = None) -> Counted:
    """Sum the engines of one model. Raises SpecqError for no cycles, several models, or counts that contradict."""
    models = sorted({key[1] for key in series})
    if model is None and len(models) > 1:
        raise SpecqError(f"{source} counts several models ({', '.join(models)}); say which with --model")
    model = models[0] if model is None else model
    if model not in models:
        raise SpecqError(f"{source} has no counters of {model!r}; it has {', '.join(models)}")
    engines = sorted({key[2] for key in series if key[1] == model})
    by_engine = {e: {(k[0], k[3]): v for k, v in series.items() if k[1:3] == (model, e)} for e in engines}
    whole = _counts(by_engine.values(), source)
    if whole.drafts == 0:
        raise SpecqError(f"{source} counts no cycle of speculative decoding {since}")
    if whole.drafted == 0:
        raise SpecqError(f"inconsistent counts in {source}: {whole.drafts} cycles without a drafted token")
    alone = {e: _counts([v], source) for e, v in by_engine.items()}
    return Counted(model, since, whole, {e: c for e, c in alone.items() if c.drafts and c.drafted})


def _counts(engines: Iterable[Mapping[tuple[str, str], int]], source: str) -> CycleCounts:
    total: dict[tuple[str, str], int] = {}
    for engine in engines:
        for key, value in engine.items():
            total[key] = total.get(key, 0) + value
    positions = {position: value for (name, position), value in total.items() if name == PER_POSITION}
    try:
        order = sorted(positions, key=int)
        if [int(p) for p in order] != list(range(len(order))):
            raise ValueError
    except ValueError:
        raise SpecqError(f"inconsistent counts in {source}: positions {', '.join(sorted(positions)):.60}") from None
    drafts, drafted, accepted = (total.get((name, ""), 0) for name in (DRAFTS, DRAFTED, ACCEPTED))
    return CycleCounts(drafts, drafted, accepted, tuple(positions[p] for p in order))


def import_metrics(before: str | Path, after: str | Path | None = None, model: str | None = None) -> Counted:
    """Counts between two metrics pages in files, or since the server's start from a single one."""
    first = parse(read_text(before), str(before))
    if after is None:
        return count(first, str(before), "since server start", model)
    second = parse(read_text(after), str(after))
    return count(difference(first, second), str(after), f"between {Path(before).name} and {Path(after).name}", model)
