"""Reading and writing a study's files: strict JSON, parquet, and directories that appear whole or not at all."""

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specq.errors import SpecqError

if TYPE_CHECKING:
    import pyarrow as pa

    from specq.prompts import Text


def finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The same JSON value with NaN and infinities replaced by None, and numpy scalars by Python's."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401
    """Strict JSON (no NaN, no Infinity), written beside and renamed."""
    text = json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)


def read_json(path: Path) -> Any:  # noqa: ANN401
    """A JSON file; SpecqError when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecqError(f"{path} is damaged: {error}") from error


def write_parquet(path: Path, columns: Mapping[str, Sequence], metadata: Mapping[str, str] | None = None) -> None:
    """A parquet file from columns; `metadata` goes into the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(dict(columns))
    if metadata:
        table = table.replace_schema_metadata(dict(metadata))
    pq.write_table(table, path, compression="zstd")


def refuse_foreign(out: Path, summary: str = "study.json") -> None:
    """Raises SpecqError when `out` holds something else than what `summary` belongs to, which nothing here may replace."""
    if out.exists() and not (out / summary).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise SpecqError(f"{out} exists and is no {Path(summary).stem}; choose another --out")


@contextmanager
def whole_directory(out: Path, overwrite: bool, summary: str = "study.json") -> Iterator[Path]:
    """Work in `<out>.partial/` and rename it to `out` when the block ends without an exception.

    On a failure the partial directory is removed and `out` stays as it was. A second study into the same directory is
    refused while the first one runs; what a killed one left is cleared. `overwrite` replaces its own kind only, known by the
    file `summary`: any other directory that holds something is refused.
    """
    refuse_foreign(out, summary)
    partial = out.with_name(out.name + ".partial")
    with _sole_writer(out):
        yield from _work_in(partial, out, overwrite)


@contextmanager
def _sole_writer(out: Path) -> Iterator[None]:
    path = out.with_name(out.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise SpecqError(f"cannot write to {out.parent}: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpecqError(f"another study is being written to {out}; wait for it or choose another --out") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _work_in(partial: Path, out: Path, overwrite: bool) -> Iterator[Path]:
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise SpecqError(f"cannot write to {partial}: {error.strerror or error}") from error
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists() and overwrite:
        shutil.rmtree(out)
    os.replace(partial, out)


def write_texts(path: Path, texts: "Sequence[Text]") -> None:
    """texts.parquet: one row per prompt and arm that sampled a text for it."""
    write_parquet(
        path,
        {
            "prompt": [t.prompt.id for t in texts],
            "document": [t.prompt.document for t in texts],
            "group": [t.prompt.group for t in texts],
            "arm": [t.sampled_by for t in texts],
            "ended_by_eos": [t.ended for t in texts],
            "prompt_token_ids": [list(t.prompt.tokens) for t in texts],
            "response_token_ids": [list(t.response) for t in texts],
        },
    )


def write_positions(path: Path, everything: Sequence[tuple]) -> None:
    """positions.parquet: one row per arm, prompt and position (1 = the second new token, the chain's first).

    `everything` holds (texts, columns per arm, analysis, kind of text) for each set of texts.
    """
    parts: dict[str, list] = {}
    for texts, columns, done, kind in everything:
        lengths = done.lengths
        shared = {
            "text": np.full(int(lengths.sum()), kind),
            "prompt": np.repeat([t.prompt.id for t in texts], lengths),
            "group": np.repeat([t.prompt.group or "" for t in texts], lengths),
            "position": np.concatenate([np.arange(1, n + 1) for n in lengths]),
            "context_len": np.concatenate(
                [len(t.prompt.tokens) + np.arange(1, n + 1) for t, n in zip(texts, lengths, strict=True)]
            ),
            "token": done.tokens,
        }
        for arm, cols in columns.items():
            rows = {"arm": np.full(int(lengths.sum()), arm)} | shared | dict(cols) | {"b": done.arms[arm].b}
            for name, values in rows.items():
                parts.setdefault(name, []).append(np.asarray(values))
    write_parquet(path, {name: _rows(np.concatenate(chunks)) for name, chunks in parts.items()})


def _rows(values: np.ndarray) -> "np.ndarray | pa.Array":
    """A parquet column; [rows, n] becomes lists of fixed length n."""
    import pyarrow as pa

    return values if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """A parquet file's columns (all by default) in the order of its rows; lists of fixed length n become [rows, n].

    Raises SpecqError when it is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=None if columns is None else list(columns))
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except pa.ArrowInvalid as error:
        raise SpecqError(f"{path} is damaged: {error}") from error
    out = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_fixed_size_list(column.type):
            flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
            out[name] = flat.reshape(-1, column.type.list_size)
        else:
            out[name] = column.to_numpy(zero_copy_only=False)
    return out
