"""Step times looked up in a table: what `measured` fills in and what `--cost FILE` reads."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from specq import files
from specq.config import DRAWS
from specq.cost.base import Kind, Operating
from specq.errors import SpecqError

LAUNCH_BOUND = 0.9  # share of a step after which its last kernel is launched: beyond it, the GPU waits for launches


class Timing(BaseModel):
    """One timing: seconds of one step, and the seconds of every repeat where it was timed more than once.

    With repeats, the table takes their median, and decisions know the noise of the timing.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    batch: int = Field(ge=1)
    context: int = Field(ge=0)
    new_tokens: int = Field(ge=1)
    kv_format: str
    seconds: float = Field(gt=0, allow_inf_nan=False)
    repeats: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = Field(None, min_length=2)


class TimingFile(BaseModel):
    """A timings file: records and the fixed seconds per speculative cycle.

    share_of: N where the seconds are those of one GPU's share of a step over N tensor-parallel GPUs, timed by itself: without
    the all-reduces and the gather of the logits. A roofline over N GPUs can be calibrated on them; no step takes that long.
    """

    model_config = ConfigDict(extra="forbid")

    records: list[Timing] = Field(min_length=1)
    fixed: float = Field(0.0, ge=0, allow_inf_nan=False)
    share_of: int | None = Field(None, ge=2)


def monotone(seconds: np.ndarray) -> np.ndarray:
    """The middle between the largest so far and the smallest to come, along axis 0: more new tokens never cost less.

    Rising columns stay as they are; noise that makes one fall is split evenly.
    """
    so_far = np.maximum.accumulate(seconds, axis=0)
    to_come = np.minimum.accumulate(seconds[::-1], axis=0)[::-1]
    return (so_far + to_come) / 2


class TableCost:
    """Linear between a table's new tokens, batches and contexts; flat beyond its new tokens.

    Batches and contexts beyond the table are refused. When every record of a kind and format names one batch and context
    only, those serve all batches and contexts, and `caveats` says so.
    """

    def __init__(self, records: Sequence[Timing], source: str, details: dict, fixed: float = 0.0) -> None:
        self.source, self.details, self.fixed = source, details, fixed
        curves: dict[tuple, list[Timing]] = defaultdict(list)
        for r in records:
            curves[(r.kind, r.kv_format, r.batch, r.context)].append(r)
        self._noisy = any(r.repeats for r in records)
        self._curves: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        rng = np.random.default_rng(0)
        for key in sorted(curves):
            points = sorted(curves[key], key=lambda r: r.new_tokens)
            rows = [self._row_of(r, rng) for r in points]
            values = monotone(np.stack(rows)) if any(r.repeats for r in points) else np.stack(rows)
            self._curves[key] = np.array([r.new_tokens for r in points]), values

    def _row_of(self, record: Timing, rng: np.random.Generator) -> np.ndarray:
        """The seconds, followed by DRAWS medians of resampled repeats where anything in the table has repeats."""
        if not record.repeats:
            return np.full(1 + DRAWS * self._noisy, record.seconds)
        repeats = np.array(record.repeats)
        picks = repeats[rng.integers(0, len(repeats), (DRAWS, len(repeats)))]
        return np.concatenate([[np.median(repeats)], np.median(picks, axis=1)])

    def grid(self, kind: Kind, kv_format: str) -> list[tuple[int, int]]:
        """The (batch, context) points that the table has for one kind and format."""
        return [key[2:] for key in self._curves if key[:2] == (kind, kv_format)]

    def _row(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        points = self.grid(kind, kv_format)
        if len(points) == 1:
            batch, context = points[0]
        total: np.ndarray | float = 0.0
        corners = [
            (b, c, wb * wc)
            for b, wb in _bracket(batch, {b for b, _ in points})
            for c, wc in _bracket(context, {c for _, c in points})
        ]
        if not corners or any((b, c) not in points for b, c, _ in corners):
            have = ", ".join(f"batch {b} context {c}" for b, c in sorted(points)) or "nothing"
            raise SpecqError(
                f"{self.source}: no {kind} timing for {kv_format} at batch {batch}, context {context}; it has {have}"
            )
        for b, c, weight in corners:
            total = total + weight * self._at(self._curves[(kind, kv_format, b, c)], new_tokens)
        return total

    @staticmethod
    def _at(curve: tuple[np.ndarray, np.ndarray], new_tokens: int) -> np.ndarray:
        x, rows = curve
        position = np.interp(new_tokens, x, np.arange(len(x)))
        low = int(position)
        high = min(low + 1, len(x) - 1)
        return rows[low] + (position - low) * (rows[high] - rows[low])

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds from the table. Raises SpecqError naming what the table lacks."""
        return float(self._row(kind, batch, context, new_tokens, kv_format)[0])

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """Seconds per resampling of the measurements, [DRAWS]; the point value alone, [1], for an exact table."""
        row = self._row(kind, batch, context, new_tokens, kv_format)
        return row[1:] if len(row) > 1 else row

    def caveats(self, points: Sequence[Operating], k_max: int) -> list[str]:
        """Points that step times of one other point serve, K whose verification is longer than any that was timed, and a GPU
        that waited for launches."""
        used = [(kind, name, (at.batch, at.context)) for at in points
                for kind, name in (("draft", at.draft_format), ("target", at.target_format))]  # fmt: skip
        out = self._launches()
        for timed in sorted({self.grid(kind, name)[0] for kind, name, _ in used if len(self.grid(kind, name)) == 1}):
            served = {at for kind, name, at in used if self.grid(kind, name) == [timed]} - {timed}
            if served:
                out.append(
                    f"step times of {self.source} are of {_point(timed)} alone, and stand here for"
                    f" {_listed(map(_point, sorted(served)), '; ')} as well: time it there, or take a roofline calibrated on it"
                )
        short: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in dict.fromkeys(at.target_format for at in points):
            curves = [
                tuple(int(n) - 1 for n in x) for key, (x, _) in self._curves.items() if key[:2] == ("target", name)
            ]
            if curves:
                short[min(curves, key=max)].append(name)
        for ks, names in short.items():
            if k_max > (last := ks[-1]):
                between = "between them it is interpolated, " if len(ks) <= last else ""
                out.append(
                    f"{self.source} has the time of verification with {_listed(names)} for K = {_listed(map(str, ks))} only:"
                    f" {between}beyond K = {last} that of K = {last} is taken, which flatters K = {last + 1}"
                    + (f" to {k_max}" if k_max > last + 1 else "")
                )
        return out

    def _launches(self) -> list[str]:
        share = self.details.get("launching_share")
        if share is None or share < LAUNCH_BOUND:
            return []
        return [
            f"the GPU waited for launches while steps were timed ({100 * share:.0f} % of a step went by before its last kernel"
            " was launched): an engine with CUDA graphs is faster and its best K may be another; decide by its own step times"
            " (`specq validate`, then --cost validation.json) or by a roofline"
        ]


def _point(at: tuple[int, int]) -> str:
    return f"batch {at[0]}, context {at[1]}"


def _listed(names: Iterable[str], between: str = ", ") -> str:
    *most, last = names
    return f"{between.join(most)} and {last}" if most else last


def _bracket(x: int, have: set[int]) -> list[tuple[int, float]]:
    """The neighbours of x among `have` with their weights for linear interpolation; nothing beyond their range."""
    if x in have:
        return [(x, 1.0)]
    below, above = [h for h in have if h < x], [h for h in have if h > x]
    if not below or not above:
        return []
    low, high = max(below), min(above)
    share = (x - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def read_file(path: str) -> TimingFile:
    """A timings file: `{"records": [...], "fixed": s}`, a bare list of records, or a validation.json, whose `timings` block
    is one. Formats get their own names in place of aliases."""
    from specq.kv import get_format

    raw = files.read_json(Path(path))
    if isinstance(raw, dict) and "timings" in raw:
        raw = raw["timings"]
        if raw is None:
            raise SpecqError(f"{path} holds no cycle times: it has too few steady steps, or no K = 0 beside another")
    try:
        table = TypeAdapter(TimingFile).validate_python({"records": raw} if isinstance(raw, list) else raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SpecqError(f"timings file {path}: {where}: {first['msg']}") from None
    records = [r.model_copy(update={"kv_format": get_format(r.kv_format).name}) for r in table.records]
    return table.model_copy(update={"records": records})


def read_timings(path: str) -> TableCost:
    """The cost model of a timings file. Raises SpecqError for times of one GPU's share, which are no step times."""
    file = read_file(path)
    if n := file.share_of:
        raise SpecqError(
            f"{path} holds times of one GPU's share of {n} without their all-reduces, which are no step times: use"
            f" roofline:{n}xGPU@{path}"
        )
    return TableCost(file.records, f"file:{Path(path).name}", {"file": path, "records": len(file.records)}, file.fixed)
