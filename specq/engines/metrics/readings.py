"""Files that hold acceptance in other forms than Prometheus text, and which form a file has.

vllm bench serve   JSON with spec_decode_num_drafts, ..._accepted_tokens, ... (vLLM's benchmarks/serve.py), or a list of such
log                lines "SpecDecoding metrics: Mean acceptance length: ..." (rounded: counts are reconstructed)
histograms         objects with `acceptance_histogram`, one per request (vLLM 0.32's metrics.speculative_decoding), as a
                   JSON value or one per line; entry j counts the cycles that accepted j drafts
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specq.counters import CycleCounts
from specq.engines.metrics.difference import Reading
from specq.engines.metrics.text import LARGEST
from specq.errors import SpecqError

LOG_MARK = "SpecDecoding metrics:"
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_LOG = re.compile(
    rf"{LOG_MARK} Mean acceptance length: {_NUMBER}, .*?Accepted: (\d{{1,18}}) tokens, Drafted: (\d{{1,18}}) tokens, "
    rf"Per-position acceptance rate: ((?:{_NUMBER}(?:, )?)+)"
)


def read_text(path: Path) -> str:
    """A file as text. Raises SpecqError when it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecqError(f"{path} is not UTF-8 text (byte {error.start})") from None


def other_reading(text: str, source: str) -> Reading | None:
    """The Reading of a benchmark result, a log or histograms; None where the text is none of these."""
    if LOG_MARK in text:
        return _from_log(text, source)
    if text.lstrip()[:1] not in ("{", "["):
        return None
    values = list(_json_values(text, source))
    bench = [b for v in values for b in _objects(v, "spec_decode_num_drafts")]
    if bench:
        return Reading(source, [_from_bench(v, source) for v in bench], unit="benchmark run")
    found = [_from_histogram(h, source) for v in values for h in _objects(v, "acceptance_histogram")]
    if not found:
        raise SpecqError(f"{source} is JSON without spec_decode_num_drafts or acceptance_histogram")
    return Reading(source, [c for c in found if c.drafts], unit="request")


def _json_values(text: str, source: str) -> Iterator[Any]:
    try:
        try:
            yield json.loads(text)
            return
        except ValueError:
            lines = [line for line in text.split("\n") if line.strip()]
        for n, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SpecqError(f"{source} is neither JSON nor JSON lines: record {n}: {error}") from None
    except RecursionError:
        raise SpecqError(f"{source} is JSON nested too deeply to be a result") from None


def _objects(value: Any, key: str) -> Iterator[dict]:  # noqa: ANN401 - any JSON value
    """The objects that have `key`, however deep they lie, in order."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict) and key in item:
            yield item
        elif isinstance(item, (dict, list)):
            stack += reversed(list(item.values()) if isinstance(item, dict) else item)


def _whole(x: Any, what: str, source: str) -> int:  # noqa: ANN401
    if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 <= x <= LARGEST or x != round(x):
        raise SpecqError(f"{source}: {what} is {x!r}, which is no count")
    return int(x)


def _checked(source: str, *counts: Any) -> CycleCounts:  # noqa: ANN401
    try:
        return CycleCounts(*counts)
    except SpecqError as error:
        raise SpecqError(f"{source}: {error}") from None


def _from_histogram(item: dict, source: str) -> CycleCounts:
    raw = item["acceptance_histogram"]
    if not isinstance(raw, list) or len(raw) < 2:
        raise SpecqError(f"{source}: acceptance_histogram must be a list of cycles by accepted drafts, 0..K")
    cycles = [_whole(n, "an entry of acceptance_histogram", source) for n in raw]
    per_position = tuple(sum(cycles[k:]) for k in range(1, len(cycles)))
    drafted = item.get("num_draft_tokens")
    drafted = sum(cycles) * (len(cycles) - 1) if drafted is None else _whole(drafted, "num_draft_tokens", source)
    return _checked(source, sum(cycles), drafted, sum(per_position), per_position)


def _from_bench(value: dict, source: str) -> CycleCounts:
    names = ("num_drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (
        _whole(value.get(f"spec_decode_{n}"), f"spec_decode_{n}", source) for n in names
    )  # fmt: skip
    rates = value.get("spec_decode_per_position_acceptance_rates") or []
    if not isinstance(rates, list) or any(isinstance(r, bool) or not isinstance(r, (int, float)) for r in rates):
        raise SpecqError(f"{source}: spec_decode_per_position_acceptance_rates is no list of numbers")
    if any(not 0 <= r <= 1 for r in rates):
        raise SpecqError(f"{source}: a per-position acceptance rate lies outside 0..1")
    return _checked(source, drafts, drafted, accepted, tuple(round(r * drafts) for r in rates) or None)


def _from_log(text: str, source: str) -> Reading:
    lines = [line for line in text.split("\n") if LOG_MARK in line]
    found = [m for m in map(_LOG.search, lines) if m]
    if not found:
        raise SpecqError(f"{source}: no complete '{LOG_MARK}' line as vLLM 0.24 to 0.32 writes them")
    clusters = []
    for m in found:
        rates = [float(r) for r in re.findall(_NUMBER, m[4])]
        clusters.append(_reconstruct(float(m[1]), int(m[2]), int(m[3]), rates, source))
    notes = ["the log rounds its rates to three digits: drafts and per-position counts are reconstructed from them"]
    if cut := len(lines) - len(found):
        notes.append(f"{source}: {cut} of {len(lines)} '{LOG_MARK}' lines are cut or of another form and are left out")
    return Reading(source, [c for c in clusters if c.drafts], notes, exact=False, unit="log line")


def _reconstruct(mean: float, accepted: int, drafted: int, rates: list[float], source: str) -> CycleCounts:
    """Counts of one log line: whole cycles of K drafts where that agrees with the mean, else drafts from the rates."""
    drafts, rest = divmod(drafted, len(rates))
    if rest or not drafts or abs(1 + accepted / drafts - mean) > 0.0051:
        drafts = round(accepted / sum(rates)) if sum(rates) else -(-drafted // len(rates))
    counts = [min(round(r * drafts), drafts) for r in rates]
    missing, moved = accepted - sum(counts), True
    while missing and moved:  # what rounding to three digits lost goes back, spread evenly
        moved = False
        for at in range(len(counts)):
            room = (drafts if at == 0 else counts[at - 1]) - counts[at]
            spare = counts[at] - (counts[at + 1] if at + 1 < len(counts) else 0)
            step = min(max(1, abs(missing) // len(counts)), abs(missing), room if missing > 0 else spare)
            if step > 0:
                counts[at] += step if missing > 0 else -step
                missing += -step if missing > 0 else step
                moved = True
    off = any(abs(n - r * drafts) > 0.0005 * drafts + 1 for n, r in zip(counts, rates, strict=True))
    if off or (drafts and abs(1 + accepted / drafts - mean) > 0.0051 + 0.0005 * len(rates)):
        raise SpecqError(f"{source}: inconsistent log line: {rates}, mean {mean} and {accepted} accepted do not agree")
    return _checked(source, drafts, drafted, accepted, tuple(counts))
