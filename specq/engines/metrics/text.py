"""Prometheus text of a vLLM or llama.cpp server -> its speculative-decoding counters, one entry per engine.

Names are matched whole: `..._num_accepted_tokens` is not the start of `..._num_accepted_tokens_per_pos`, and `_created`
timestamps are no counts. Names and labels as in vLLM's v1/spec_decode/metrics.py (0.24 and 0.32). llama.cpp's server (since its
pull request 26389, August 2026) counts the same under these names after a prefix of its own, without labels but the position.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from specq.errors import SpecqError

PREFIX = "vllm:spec_decode_num_"
LLAMA_PREFIX = "llamacpp:spec_decode_num_"
LLAMA_ROUNDS = 1e6  # llama.cpp streams its counters as C++ doubles of six digits, those by position as whole numbers
LARGEST = 1e15  # beyond it a float is no exact count any more, and no server has counted so far
PER_POSITION = "accepted_tokens_per_pos"
COUNTERS = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
# Other servers export what no before/after difference can be made of.
NO_COUNTERS = {
    "sglang:": "SGLang counts verifications (sglang:spec_verify_calls_total) and exports the acceptance length as a gauge, but"
    " counts neither drafted nor accepted tokens, and nothing by position",
    "llamacpp:": f"llama.cpp's server exports {LLAMA_PREFIX}drafts since August 2026; this one is older",
}


METRIC = re.compile(r"^[A-Za-z_:][\w:]*(\{.*\})?[ \t]+[-+]?(\d|Inf|NaN)", re.MULTILINE)


class NotThere(SpecqError):
    """No counters, and a later answer will not differ: no metrics at all, or those of a server that does not count."""


@dataclass(frozen=True)
class Engine:
    """Which counters: the served model, the engine's index (one per data-parallel rank), and any other labels."""

    model: str
    engine: str
    others: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """For messages and tables."""
        extra = "".join(f", {k} {v}" for k, v in self.others)
        return f"model {self.model or 'unnamed'}, engine {self.engine or '0'}{extra}"


@dataclass
class Counters:
    """Cumulative counts of one engine; `per_position` maps a draft position (from 0) to drafts accepted there.

    `born` is the counters' creation time where the server tells it (`_created`): it changes when the server restarts.
    """

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    per_position: dict[int, int] = field(default_factory=dict)
    born: float | None = None


def _count(value: float, what: str, source: str) -> int:
    if not 0 <= value <= LARGEST or value != round(value):
        raise SpecqError(f"{source}: {what} is {value}, which is no count")
    if what.startswith(LLAMA_PREFIX) and PER_POSITION not in what and value >= LLAMA_ROUNDS:
        raise SpecqError(
            f"{source}: {what} is {value:g}, and llama.cpp writes counters of a million and more with six digits only, too few"
            " for a difference: start the server anew and take both scrapes before it has counted so far"
        )
    return int(value)


def _position(labels: Mapping[str, str], source: str) -> int:
    text = labels.get("position", "")
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise SpecqError(f"{source}: {PER_POSITION} has a position label {text!r}, which is no position")
    return int(text)


def _engine(labels: Mapping[str, str]) -> Engine:
    others = tuple(sorted((k, v) for k, v in labels.items() if k not in ("model_name", "engine", "position")))
    return Engine(labels.get("model_name", ""), labels.get("engine", ""), others)


def parse(text: str, source: str) -> dict[Engine, Counters]:
    """Counters per engine. `source` names the text in messages.

    Raises SpecqError where the text is no Prometheus text, holds no such counters (NotThere where it is not merely empty or
    cut), or names one series twice.
    """
    found: dict[Engine, Counters] = {}
    seen: set[tuple] = set()
    other = None
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except Exception as error:  # the parser raises ValueError, IndexError and KeyError alike on what is no metrics text
        kind = SpecqError if METRIC.search(text) else NotThere
        raise kind(f"{source} is no Prometheus text: {(str(error) or type(error).__name__)[:80]}") from None
    for sample in samples:
        other = other or next((why for start, why in NO_COUNTERS.items() if sample.name.startswith(start)), None)
        prefix = next((p for p in (PREFIX, LLAMA_PREFIX) if sample.name.startswith(p)), None)
        if prefix is None:
            continue
        name = sample.name.removeprefix(prefix)
        if name == "drafts_created":
            found.setdefault(_engine(sample.labels), Counters()).born = sample.value
            continue
        name = name.removesuffix("_total")
        if name not in COUNTERS and name != PER_POSITION:
            continue
        series = (name, tuple(sorted(sample.labels.items())))
        if series in seen:
            raise SpecqError(f"{source} names {sample.name} twice for {_engine(sample.labels).name}")
        seen.add(series)
        counters = found.setdefault(_engine(sample.labels), Counters())
        value = _count(sample.value, sample.name, source)
        if name == PER_POSITION:
            counters.per_position[_position(sample.labels, source)] = value
        else:
            setattr(counters, COUNTERS[name], value)
    found = {e: c for e, c in found.items() if c.drafts is not None}
    if not found:
        # a vLLM that speculates has them from its start on (SpecDecodingProm), so their absence will not change
        raise (NotThere if samples else SpecqError)(
            f"{source} holds no {PREFIX}drafts counter"
            + (f": {other}" if other else "; a vLLM server exports it on /metrics when it speculates")
        )
    for engine, counters in found.items():
        if counters.drafted is None or counters.accepted is None:
            raise SpecqError(f"{source} lacks the counter of draft_tokens or accepted_tokens for {engine.name}")
        if sorted(counters.per_position) != list(range(len(counters.per_position))):
            raise SpecqError(f"{source} has per-position counters with gaps for {engine.name}")
    return found
