"""From scrapes in order of time to what happened between them.

Counters that were created anew mean that the server restarted: what it shows afterwards was counted since then, and what it
counted between the last scrape and the restart is lost. Where a server tells no creation time (`_created`), a counter that fell
or has another number of positions means the same. Where it does and the time is the old one, no restart explains a fall: the
files are out of order. Nothing is ever negative.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specq.counters import CycleCounts
from specq.engines.metrics.text import Counters, Engine
from specq.errors import SpecqError


@dataclass
class Reading:
    """Cycles of one model: `clusters` are counts of separate stretches (an engine between two scrapes, a request).

    `exact` is False where counts were reconstructed from rounded rates.
    """

    source: str
    clusters: list[CycleCounts]
    notes: list[str] = field(default_factory=list)
    exact: bool = True
    unit: str = "scrape interval"

    @property
    def total(self) -> CycleCounts:
        """All clusters summed: totals before ratios."""
        return CycleCounts.sum(self.clusters)


def _counts(c: Counters, where: str) -> CycleCounts:
    per_position = tuple(c.per_position[i] for i in range(len(c.per_position))) or None
    try:
        return CycleCounts(c.drafts, c.drafted, c.accepted, per_position)
    except SpecqError as error:
        raise SpecqError(f"{where}: {error}") from None


def _restarted(before: Counters, after: Counters) -> bool:
    """Whether a server counted anew between two scrapes. Raises SpecqError where the second cannot be of a later time."""
    # K is fixed while a server runs; llama.cpp has no positions before its first request is done
    other_k = bool(before.drafts) and len(before.per_position) != len(after.per_position)
    pairs = [(before.drafts, after.drafts), (before.drafted, after.drafted), (before.accepted, after.accepted)]
    pairs += [(n, after.per_position.get(i, 0)) for i, n in before.per_position.items()]
    fell = other_k or any(b > a for b, a in pairs)
    if before.born is None or after.born is None:
        return fell
    if after.born < before.born:
        raise SpecqError("was created earlier: the files are out of order, or of several servers")
    if after.born == before.born and other_k:
        raise SpecqError(
            "has another number of positions, though it was created at the same time: one of the two is damaged"
        )
    if after.born == before.born and fell:
        raise SpecqError(
            "shows less, though it was created at the same time and did not restart: the files are out of order"
        )
    return after.born > before.born


def _minus(after: Counters, before: Counters) -> Counters:
    per_position = {i: n - before.per_position.get(i, 0) for i, n in after.per_position.items()}
    return Counters(
        after.drafts - before.drafts, after.drafted - before.drafted, after.accepted - before.accepted, per_position
    )


def difference(scrapes: Sequence[tuple[str, Mapping[Engine, Counters]]]) -> dict[str, Reading]:
    """One Reading per served model from scrapes (name, counters) in order of time.

    A single scrape counts since the server's start, and the note says so. Raises SpecqError for inconsistent counters.
    """
    names = [name for name, _ in scrapes]
    models = dict.fromkeys(e.model for _, scrape in scrapes for e in scrape)
    readings = {m: Reading(" to ".join(dict.fromkeys((names[0], names[-1]))), []) for m in models}
    if len(scrapes) == 1:
        for engine, counters in scrapes[0][1].items():
            counts = _counts(counters, f"{names[0]}, {engine.name}")
            readings[engine.model].clusters += [counts] if counts.drafts else []  # an idle engine shows no scatter
            readings[engine.model].unit = "engine"
            readings[engine.model].notes = ["one scrape only: the counts are those since the server's start"]
        return readings
    for engine, counters in scrapes[0][1].items():
        _counts(counters, f"{names[0]}, {engine.name}")  # what a file says by itself is judged in its own numbers
    last = {engine: (names[0], counters) for engine, counters in scrapes[0][1].items()}
    for name, scrape in scrapes[1:]:
        for engine, now in scrape.items():
            reading, (earlier, before) = readings[engine.model], last.get(engine, (None, None))
            where, change = f"{name}, {engine.name}", now
            try:
                anew = before is not None and _restarted(before, now)
            except SpecqError as error:
                raise SpecqError(f"{where} {error} (the one before is {earlier})") from None
            if before is None:
                reading.notes.append(f"{name}: {engine.name} is new and counted from its start")
            elif anew:
                order = "" if now.born is not None else ", or the files are out of order, which they do not tell"
                reading.notes.append(
                    f"{name}: counter reset of {engine.name} (the server restarted{order}); counted from the restart on, and"
                    " what it did between the scrape before and the restart is lost"
                )
            else:
                _counts(now, where)
                where, change = f"from {earlier} to {where}", _minus(now, before)
            last[engine] = name, now
            counts = _counts(change, where)
            if counts.drafts:
                reading.clusters.append(counts)
    for engine in scrapes[0][1]:
        if all(engine not in scrape for _, scrape in scrapes[1:]):
            readings[engine.model].notes.append(f"{engine.name} is gone after {names[0]}; nothing is known of it")
    return readings
