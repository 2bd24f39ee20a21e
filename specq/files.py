"""Reading and writing a study's files: strict JSON, parquet, and directories that appear whole or not at all."""

import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specq.errors import SpecqError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

    from specq.prompts import Text

STUDY = "study"  # what a directory is unless said otherwise; its summary is study.json


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
    if isinstance(value, str):  # half of a surrogate pair (a file name, say) is no text
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401
    """Strict JSON (no NaN, no Infinity), written beside and renamed."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:  # noqa: ANN401
    """A JSON file; SpecqError naming it when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecqError(f"{path} is damaged: {first_line(error)}") from error


def write_parquet(path: Path, columns: Mapping[str, Sequence], metadata: Mapping[str, str] | None = None) -> None:
    """A parquet file from columns; `metadata` goes into the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(dict(columns))
    if metadata:
        table = table.replace_schema_metadata(dict(metadata))
    pq.write_table(table, path, compression="zstd")


def write_text(path: Path, text: str) -> None:
    """A UTF-8 text file, written beside and renamed."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def to_arrow(values: np.ndarray) -> "np.ndarray | pa.Array":
    """A parquet column; [rows, n] becomes lists of fixed length n."""
    import pyarrow as pa

    return values if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1])


def from_arrow(column: "pa.ChunkedArray") -> np.ndarray:
    """The inverse of `to_arrow`."""
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy()
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(-1, column.type.list_size)


def make_directory(path: Path) -> None:
    """Make a directory that output goes to, and its parents. Raises SpecqError where none can be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror or error
        raise SpecqError(f"cannot write to the directory {path}: {why}") from error


def refuse_foreign(out: Path, kind: str = STUDY) -> None:
    """Raises SpecqError when `out` holds something else than a `kind`, known by <kind>.json: nothing here may replace it."""
    ours = (f"{kind}.json", *(["run.json"] if kind == STUDY else []))  # a part of a study is its pieces
    if not out.exists() or any((out / name).is_file() for name in ours):
        return
    if not out.is_dir() or any(out.iterdir()):
        raise SpecqError(f"{out} exists and is no {kind}; choose another --out")


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Hold the lock of `out`; SpecqError when another process does. It ends with the process, however that ends."""
    path = out.with_name(out.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise SpecqError(f"cannot write to {out.parent}: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the file may have been removed, or made anew, between opening and locking it
            same = path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except OSError:
            same = False
        if not same:
            raise SpecqError(f"another run is being written to {out}; wait for it or choose another --out")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """For short work: a directory `<out>.partial/` that is renamed to `out` when the block ends well, and removed if not."""
    refuse_foreign(out)
    partial = out.with_name(out.name + ".partial")
    with sole_writer(out):
        if (partial / "run.json").is_file():
            raise SpecqError(f"{partial} holds an interrupted run; finish it with --resume or choose another --out")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            yield partial
            os.replace(partial, out)
        except OSError as error:
            raise SpecqError(f"cannot write to {partial}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


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


def write_positions(path: Path, rows: Iterable[Mapping[str, np.ndarray]]) -> None:
    """positions.parquet: one row per arm, prompt and position (1 = the second new token, the chain's first).

    `rows` are columns of consecutive rows, written as they come: a row group each, and no more than one in memory.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    try:
        for columns in rows:
            table = pa.table({name: to_arrow(values) for name, values in columns.items()})
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table, row_group_size=1 << 30)
    finally:
        if writer is not None:
            writer.close()


def position_rows(
    texts: "Sequence[Text]", columns: Mapping[str, np.ndarray], b: np.ndarray, arm: str, kind: str
) -> dict[str, np.ndarray]:
    """Rows of positions.parquet for some texts under one arm; `b` and `columns` hold their positions."""
    lengths = np.array([t.positions for t in texts])
    total = int(lengths.sum())
    return {
        "arm": np.full(total, arm),
        "text": np.full(total, kind),
        "prompt": np.repeat([t.prompt.id for t in texts], lengths),
        "group": np.repeat([t.prompt.group or "" for t in texts], lengths),
        "position": np.concatenate([np.arange(1, n + 1) for n in lengths]),
        "context_len": np.concatenate(
            [len(t.prompt.tokens) + np.arange(1, n + 1) for t, n in zip(texts, lengths, strict=True)]
        ),
        "token": np.concatenate([np.array(t.response[1:], dtype=np.int64) for t in texts]),
        **columns,
        "b": b,
    }


class PositionFile(Mapping[str, np.ndarray]):
    """positions.parquet as columns in the order of its rows, each read when it is asked for; equal strings are one object.

    A study of a million tokens has gigabytes of them, and what reads them wants one or two at a time.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self.names = pq.read_schema(path).names

    def __getitem__(self, name: str) -> np.ndarray:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if name not in self.names:
            raise KeyError(name)
        column = pq.read_table(self.path, columns=[name], read_dictionary=[name]).column(0)
        if not pa.types.is_dictionary(column.type):
            return from_arrow(column)
        chunks = [np.array(c.dictionary.to_pylist(), dtype=object)[c.indices.to_numpy()] for c in column.chunks]
        return np.concatenate(chunks) if chunks else np.array([], dtype=object)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ArmRows(Mapping[str, np.ndarray]):
    """Columns of positions.parquet in some of its row groups, each read when it is asked for and held by nobody.

    Raises SpecqError when the file turns out damaged.
    """

    def __init__(self, path: Path, groups: Sequence[int], names: Sequence[str]) -> None:
        self.path, self.groups, self.names = path, list(groups), list(names)

    def __getitem__(self, name: str) -> np.ndarray:
        import pyarrow.parquet as pq

        if name not in self.names:
            raise KeyError(name)
        with _readable(self.path), pq.ParquetFile(self.path) as file:
            return from_arrow(file.read_row_groups(self.groups, columns=[name]).column(0))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def arm_row_groups(path: Path, columns: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    """Row groups of positions.parquet by (text, arm), in the order of the file; `write_positions` mixes none.

    Raises SpecqError when the file is missing, damaged, without one of `columns`, or written otherwise.
    """
    import pyarrow.parquet as pq

    found: dict[tuple[str, str], list[int]] = {}
    with _readable(path):
        lacking = {"text", "arm", *columns} - set(pq.read_schema(path).names)
    if lacking:
        raise SpecqError(
            f"{path} has no column {min(lacking)}, which this version of specq writes: run the study again"
        )
    with _readable(path), pq.ParquetFile(path, read_dictionary=["text", "arm"]) as file:
        for i in range(file.num_row_groups):
            table = file.read_row_group(i, columns=["text", "arm"])
            text, arm = (table.column(n).unique().to_pylist() for n in ("text", "arm"))
            if len(text) != 1 or len(arm) != 1:
                raise SpecqError(
                    f"{path} mixes arms in a row group, as no specq of this version does: run the study again"
                )
            found.setdefault((text[0], arm[0]), []).append(i)
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowInvalid as error:
        raise SpecqError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise SpecqError(f"cannot read {path}: {error.strerror or error}") from error


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """A parquet file's columns (all by default) in the order of its rows; lists of fixed length n become [rows, n].

    Raises SpecqError when it is missing or damaged.
    """
    import pyarrow.parquet as pq

    with _readable(path):
        table = pq.read_table(path, columns=None if columns is None else list(columns))
    return {name: from_arrow(table.column(name)) for name in table.column_names}
