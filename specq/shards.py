"""Finished pieces of a long run, written as they finish, so that an interruption costs no more than the piece under way.

A run works in `<out>.partial/`: `run.json` says which study it is, `shards/<stage>-<first item>.parquet` holds the result
of some consecutive items (prompts or texts) of one stage. A piece appears by renaming, carries checksums and the study's
digest, and is the same whoever made it: what a piece holds depends on its items alone, so an interrupted and resumed run
gives the very files of one left alone, and pieces made on several machines join into one study.

    with workspace(out, run, reporter, resume=True) as shards:
        paths = shards.complete("cycles-fp8", prompts, BLOCK, work)     # work(group) -> Piece, only where it is missing
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError

from specq import files
from specq.errors import Interrupted, SpecqError
from specq.progress import Reporter

BLOCK = 32  # prompts that are sampled together, and the least that a machine can take of a shared study
SIZE = 8  # texts scored per piece; divides BLOCK, and no result depends on it
OURS = ("shards", "run.json", "run.json.tmp")  # what a run that was killed early leaves
REPLACED = "replaced"  # where the directory that --overwrite replaces waits to be removed
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What a directory of pieces belongs to.

    `identity` is everything the results depend on, compared between runs; `versions` of libraries may change last bits, so
    a run is continued under the same ones only. `part` (i, n) takes every n-th block of prompts, counted from 1. `kind` is
    what the run makes, a study or a rollout; the file <kind>.json says that it is whole.
    """

    identity: Mapping[str, Any]
    configuration: Mapping[str, Any]
    directories: Mapping[str, str]
    versions: Mapping[str, str]
    part: tuple[int, int] = (1, 1)
    kind: str = files.STUDY

    @property
    def digest(self) -> str:
        """sha256 of the identity."""
        return hashlib.sha256(json.dumps(files.finite(self.identity), sort_keys=True).encode()).hexdigest()


@dataclass
class Piece:
    """The result for some items: tables of one schema, each a row group of the file, and facts that fit into JSON."""

    tables: Sequence[pa.Table]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Shards:
    """The pieces of one run. `computes` is off when pieces are only joined: a missing one is an error then."""

    folder: Path
    run: Run
    computes: bool = True
    done: int = 0

    def complete(
        self,
        stage: str,
        items: Sequence[T],
        size: int,
        work: Callable[[Sequence[T]], Piece],
        skipped: Callable[[Sequence[T]], None] = lambda group: None,
    ) -> list[Path]:
        """Paths of the pieces of `stage` in the order of the items, each of `size` items; what is missing is worked out.

        Of a run that is a part of a study, only the blocks of that part; `size` divides BLOCK.
        `skipped` is told about groups that were there already, for progress bars.
        """
        paths = []
        for first in range(0, len(items), size):
            if not self.takes(first):
                continue
            group, path = items[first : first + size], self.folder / f"{stage}-{first:07d}.parquet"
            if path.is_file():
                skipped(group)
            elif self.computes:
                self._write(path, work(group))
                self.done += 1
            else:
                last = first + len(group)
                raise SpecqError(
                    f"the pieces given lack {stage} of prompts {first + 1} to {last}; give the part that has it"
                )
            paths.append(path)
        return paths

    def takes(self, item: int) -> bool:
        """Whether the block of this item belongs to this part of the study."""
        mine, parts = self.run.part
        return item // BLOCK % parts == mine - 1

    def _write(self, path: Path, piece: Piece) -> None:
        schema = piece.tables[0].schema.with_metadata(
            {"specq.run": self.run.digest, "specq.facts": json.dumps(files.finite(piece.facts))}
        )
        beside = path.with_suffix(".tmp")
        try:
            with beside.open("wb") as file:
                with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
                    for table in piece.tables:
                        writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=1 << 30)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def check(self) -> list[str]:
        """Remove leftovers and damaged pieces; returns the damaged ones' names. Raises SpecqError for a foreign piece."""
        damaged = []
        for path in sorted(self.folder.iterdir()):
            if path.suffix != ".parquet":
                path.unlink()
                continue
            try:
                found = pq.read_table(path, page_checksum_verification=True).schema.metadata[b"specq.run"].decode()
            except (OSError, pa.ArrowException, TypeError, KeyError, ValueError):
                path.unlink()
                damaged.append(path.name)
                continue
            if found != self.run.digest:
                raise SpecqError(f"{path} belongs to another {self.run.kind}; pieces of several are never mixed")
        return damaged


def facts(path: Path) -> dict[str, Any]:
    """The facts of a piece."""
    return json.loads(pq.read_schema(path).metadata[b"specq.facts"])


def read(path: Path) -> dict[str, list]:
    """The rows of a piece, as Python lists by column."""
    return pq.read_table(path).to_pydict()


class Columns(Mapping[str, np.ndarray]):
    """Columns that lie in one row group of every piece; each is read when asked for and held by nobody."""

    def __init__(self, paths: Sequence[Path], row_group: int) -> None:
        self.paths, self.row_group = list(paths), row_group
        self.names = pq.read_schema(self.paths[0]).names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(name)
        parts = [pq.ParquetFile(p).read_row_group(self.row_group, columns=[name]).column(0) for p in self.paths]
        return np.concatenate([files.from_arrow(p) for p in parts])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, first: int, last: int) -> dict[str, np.ndarray]:
        """All columns, rows `first` to `last` only: no more than the pieces that hold them is read."""
        tables, at = [], 0
        for path in self.paths:
            file = pq.ParquetFile(path)
            count = file.metadata.row_group(self.row_group).num_rows
            if at < last and first < at + count:
                table = file.read_row_group(self.row_group)
                tables.append(table.slice(max(first - at, 0), min(last - at, count) - max(first - at, 0)))
            at += count
        whole = pa.concat_tables(tables)
        return {name: files.from_arrow(whole.column(name)) for name in whole.column_names}


def partial_of(out: Path) -> Path:
    """Where a run into `out` works."""
    return out.with_name(out.name + ".partial")


class Described(BaseModel):
    """run.json, which may come from another machine: `directories` are names beside it and lead nowhere else."""

    study: str
    configuration: dict[str, Any]
    directories: dict[str, Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]]
    versions: dict[str, str]
    part: tuple[int, int]
    kind: str = files.STUDY


def read_run(folder: Path) -> Described | None:
    """run.json of a directory of pieces, None where there is none that can be read."""
    try:
        return Described.model_validate(files.read_json(folder / "run.json"))
    except (SpecqError, ValidationError):
        return None


def count(folder: Path) -> int:
    """Finished pieces in a directory."""
    return len(list((folder / "shards").glob("*.parquet")))


def refuse_mixing(
    out: Path, same: Callable[[Described], bool], overwrite: bool, resume: bool, kind: str = files.STUDY
) -> None:
    """Raises SpecqError when `<out>.partial/` holds work that this run must not touch.

    `same` says whether the run.json found there is of this very study or rollout (`kind`).
    """
    partial = partial_of(out)
    if not partial.exists():
        return
    run, pieces = read_run(partial), count(partial)
    if not partial.is_dir() or (run is None and any(p.name not in OURS for p in partial.iterdir())):
        raise SpecqError(f"{partial} is in the way and is no interrupted {kind}; move it or choose another --out")
    if not pieces or overwrite:
        return
    if run is None:
        raise SpecqError(
            f"{partial} holds {_pieces(pieces)}, but its run.json cannot be read, so nothing says of which {kind};"
            " --overwrite discards them"
        )
    if not same(run):
        raise SpecqError(
            f"{partial} holds {_pieces(pieces)} of an interrupted {run.kind} of another configuration;"
            " choose another --out, or --overwrite to discard them"
        )
    if not resume:
        raise SpecqError(
            f"{partial} holds {_pieces(pieces)} of an interrupted {kind}; --resume continues it, --overwrite starts anew"
        )


def _refuse_other_ways(partial: Path, run: Run) -> None:
    """The same study, but pieces that would not be the same."""
    old = read_run(partial)
    changed = [f"{k} {old.versions.get(k)} then, {v} now" for k, v in run.versions.items() if old.versions.get(k) != v]
    if changed:
        raise SpecqError(
            f"{partial} was begun under other versions ({', '.join(changed)}), which may differ in last bits; continue it under"
            " those, or --overwrite to start anew"
        )
    if old.part != run.part:
        raise SpecqError(f"{partial} holds part {old.part[0]} of {old.part[1]} of this study; choose another --out")


@contextmanager
def workspace(
    out: Path,
    run: Run,
    reporter: Reporter,
    *,
    overwrite: bool = False,
    resume: bool = False,
    sources: Sequence[Path] = (),
) -> Iterator[Shards]:
    """Work in `<out>.partial/` and rename it to `out` when the block ends without an exception.

    Finished pieces survive every interruption: Ctrl-C becomes Interrupted, a failed write SpecqError, both with a word
    about what is kept. Without a finished piece nothing is left behind. A second run into the same directory is refused
    while the first one works. `sources` are directories whose pieces are taken over; nothing is computed then.
    """
    files.refuse_foreign(out, run.kind)
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise SpecqError(f"{out} holds a {run.kind} already; choose another --out, or --overwrite to replace it")
    partial = partial_of(out)
    with files.sole_writer(out):
        refuse_mixing(out, lambda old: old.study == run.digest, overwrite, resume or bool(sources), run.kind)
        if count(partial) and not overwrite:
            _refuse_other_ways(partial, run)
        with _keeping(partial, out, borrowed=bool(sources) and not count(partial)):
            shards = _opened(partial, run, reporter, overwrite, sources)
            yield shards
            if out.exists() and overwrite:  # renamed, not removed: at no moment are there neither the old nor the new
                os.replace(out, partial / REPLACED)
            os.replace(partial, out)
            tidy(out, run.kind)


def tidy(out: Path, kind: str = files.STUDY) -> None:
    """Remove what was replaced, and the pieces of a run that is whole; a part of a study is its pieces and keeps them."""
    shutil.rmtree(out / REPLACED, ignore_errors=True)
    if (out / f"{kind}.json").is_file():
        shutil.rmtree(out / "shards", ignore_errors=True)
        (out / "run.json").unlink(missing_ok=True)


def _opened(partial: Path, run: Run, reporter: Reporter, overwrite: bool, sources: Sequence[Path]) -> Shards:
    if overwrite or not count(partial):
        shutil.rmtree(partial, ignore_errors=True)
    (partial / "shards").mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():  # final files of a run that was killed while it wrote them
        if path.name not in ("shards", "run.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shards = Shards(partial / "shards", run, computes=not sources)
    described = asdict(run) | {"study": run.digest, "schema_version": 1}
    files.write_json(partial / "run.json", {k: v for k, v in described.items() if k != "identity"})
    for source in sources:
        _take_over(source, shards)
    if damaged := shards.check():
        if sources:
            raise SpecqError(f"{len(damaged)} of the pieces given are damaged ({damaged[0]}); make that part again")
        reporter.note(f"{len(damaged)} damaged pieces are made again, {damaged[0]} first")
    if kept := count(partial):
        reporter.note(f"{_pieces(kept)} in {partial}")
    return shards


@contextmanager
def _keeping(partial: Path, out: Path, borrowed: bool) -> Iterator[None]:
    """Turn interruptions and failed writes into sentences that say what is kept.

    A directory without pieces is removed, and so is one of `borrowed` pieces, copies of what lies elsewhere.
    """
    try:
        yield
    except KeyboardInterrupt:
        kept = _kept(partial, borrowed) if partial.exists() or not out.exists() else f"{out} is complete"
        raise Interrupted(f"interrupted; {kept}") from None
    except OSError as error:
        raise SpecqError(f"cannot write to {partial}: {error.strerror or error}; {_kept(partial, borrowed)}") from error
    except SpecqError as error:
        if count(partial) and not borrowed:
            raise SpecqError(f"{error}\n({_kept(partial, borrowed)})") from error
        raise
    finally:
        if partial.is_dir() and (borrowed or not count(partial)):
            shutil.rmtree(partial, ignore_errors=True)


def _kept(partial: Path, borrowed: bool) -> str:
    pieces = count(partial)
    if borrowed:
        return "the parts are as they were"
    if not pieces:
        return "no piece was finished yet, so nothing is kept"
    return f"{_pieces(pieces)} {'are' if pieces > 1 else 'is'} kept in {partial}, and the same command with --resume continues"


def _pieces(count: int) -> str:
    return f"{count} finished piece{'s' if count > 1 else ''}"


def _take_over(source: Path, shards: Shards) -> None:
    for path in sorted((source / "shards").glob("*.parquet")):
        target = shards.folder / path.name
        if not target.exists():
            beside = target.with_suffix(".tmp")
            shutil.copyfile(path, beside)
            os.replace(beside, target)
