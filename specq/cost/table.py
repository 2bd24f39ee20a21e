"""Step times looked up in a table: what `measured` fills in and what `--cost FILE` reads."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from specq.cost.base import Kind
from specq.errors import SpecqError


class Timing(BaseModel):
    """One timing: seconds of one step."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    batch: int = Field(ge=1)
    context: int = Field(ge=0)
    new_tokens: int = Field(ge=1)
    kv_format: str
    seconds: float = Field(gt=0, allow_inf_nan=False)


class TimingFile(BaseModel):
    """A timings file: records and the fixed seconds per speculative cycle."""

    model_config = ConfigDict(extra="forbid")

    records: list[Timing] = Field(min_length=1)
    fixed: float = Field(0.0, ge=0, allow_inf_nan=False)


class TableCost:
    """Linear between the new_tokens of a table and flat beyond them; batch and context must be in the table.

    When every record of a kind names one batch and context only, those serve all batches and contexts. `draws` holds,
    record for record, the seconds under resampled measurements, [records, R]; without it the table is taken as exact.
    """

    def __init__(
        self,
        records: Sequence[Timing],
        source: str,
        details: dict,
        fixed: float = 0.0,
        draws: np.ndarray | None = None,
    ) -> None:
        self.source, self.details, self.fixed = source, details, fixed
        seconds = np.array([[r.seconds] for r in records])
        values = seconds if draws is None else np.concatenate([seconds, draws], axis=1)
        curves: dict[tuple, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for r, row in zip(records, values, strict=True):
            curves[(r.kind, r.kv_format, r.batch, r.context)].append((r.new_tokens, row))
        self._curves = {}
        for key, points in curves.items():
            points.sort(key=lambda p: p[0])
            self._curves[key] = np.array([n for n, _ in points]), np.stack([row for _, row in points])

    def _row(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        points = {k[2:] for k in self._curves if k[:2] == (kind, kv_format)}
        at = next(iter(points)) if len(points) == 1 else (batch, context)
        if at not in points:
            have = ", ".join(f"batch {b} context {c}" for b, c in sorted(points)) or "nothing"
            raise SpecqError(
                f"{self.source}: no {kind} timing for {kv_format} at batch {batch}, context {context}; it has {have}"
            )
        x, rows = self._curves[(kind, kv_format, *at)]
        position = np.interp(new_tokens, x, np.arange(len(x)))
        low = int(position)
        high = min(low + 1, len(x) - 1)
        return rows[low] + (position - low) * (rows[high] - rows[low])

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds from the table. Raises SpecqError naming what the table lacks."""
        return float(self._row(kind, batch, context, new_tokens, kv_format)[0])

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """Seconds per resampling of the measurements, [R]; the point value alone, [1], for an exact table."""
        row = self._row(kind, batch, context, new_tokens, kv_format)
        return row[1:] if len(row) > 1 else row


def read_timings(path: str) -> TableCost:
    """The cost model of a timings file: `{"records": [...], "fixed": s}` or a bare list of records."""
    from specq.kv import get_format

    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecqError(f"cannot read timings file {path}: {error.strerror}") from error
    except ValueError as error:
        raise SpecqError(f"timings file {path} is not JSON: {error}") from error
    try:
        table = TypeAdapter(TimingFile).validate_python({"records": raw} if isinstance(raw, list) else raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SpecqError(f"timings file {path}: {where}: {first['msg']}") from None
    records = [r.model_copy(update={"kv_format": get_format(r.kv_format).name}) for r in table.records]
    return TableCost(records, f"file:{Path(path).name}", {"file": path, "records": len(records)}, table.fixed)
