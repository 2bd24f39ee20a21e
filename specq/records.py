"""Prompt files in, records out: every usable record, and a table of what was skipped with line numbers and reasons.

    .txt                 one prompt per line
    .jsonl, .ndjson      one JSON object (or string) per line
    .json                a JSON array of such records, or one record per line
    .parquet             one record per row

each also as .gz, .xz or .zst (parquet compresses itself). A record is recognised by its keys:

    prompt_token_ids              token ids, used as they are
    prompt                        text; also a list of messages or of token ids
    messages                      chat turns {role, content}
    conversations, conversation   ShareGPT's {from, value}
    turns                         MT-Bench and Spec-Bench: the first turn is the prompt
    body                          a request of an OpenAI batch file: its messages or its prompt
    text                          a document to cut a prompt from

and may have `id`, `group` (Spec-Bench: `category`) and `response` or `response_token_ids`. A conversation that ends with the
assistant gives its last answer as the response. Text is UTF-8, with or without byte-order mark; lines end at "\\n" alone, so
U+2028 and its kin belong to the text.
"""

import gzip
import io
import json
import lzma
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from specq.errors import SpecqError, printable

KEYS = ("prompt_token_ids", "prompt", "messages", "conversations", "conversation", "turns", "body", "text")
RESPONSES = ("response", "response_token_ids")
FORMATS = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSED = (".gz", ".xz", ".zst")
LONGEST_LINE = 1 << 28  # bytes; a longer line is no prompt
LONGEST_NUMBER = 1000  # digits; Python refuses to read 4300
LONGEST_FILE = 1 << 33  # bytes after decompression: a small file can expand without end
ROLES = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "developer": "system", "tool": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One usable record, still text. `line` counts from 1: the line of a text file, the row of a parquet file.

    `kind` is prompt_token_ids (content: list of ids), prompt or text (str), or messages (list of {role, content}).
    """

    id: str
    line: int
    content: Any
    kind: str
    group: str | None = None
    response: str | list[int] | None = None


@dataclass
class PromptReport:
    """What became of the file: counts, and (line, reason) of what was skipped."""

    source: str
    records: int = 0
    too_short: int = 0
    not_drawn: int = 0
    responses_truncated: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    skipped: list[tuple[int, str]] = field(default_factory=list)

    def skip(self, line: int, reason: object) -> None:
        """Note that the record at `line` is not used, and why."""
        text = printable(str(reason))
        self.skipped.append((line, text if len(text) <= 200 else text[:197] + "..."))

    def table(self, rows: int = 10) -> str:
        """The skipped records as lines of text: the first `rows` of them, then how many more."""
        lines = [f"  line {line}: {why}" for line, why in sorted(self.skipped)[:rows]]
        more = len(self.skipped) - rows
        return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


class _Unusable(Exception):
    """A record that cannot be used; the message is the reason."""


def read_records(path: str | Path, undecodable: str = "refuse") -> tuple[list[Record], PromptReport]:
    """All usable records of a prompt file, and a report of the rest.

    `undecodable` says what happens to lines that are not UTF-8: "refuse" the file, naming line and byte, or "skip" them.
    Raises SpecqError when the file cannot be read or holds no usable record.
    """
    path = Path(path)
    kind = next((s for s in reversed(path.suffixes) if s not in COMPRESSED), "")
    if kind not in FORMATS or (kind == ".parquet" and path.suffix != kind):
        raise SpecqError(
            f"prompt file {path} has an unknown ending; accepted are {', '.join(FORMATS)}, and the text formats with"
            f" {', '.join(COMPRESSED)} behind"
        )
    report = PromptReport(str(path))
    records: list[Record] = []
    for line, entry in _rows(path) if kind == ".parquet" else _entries(path, kind, undecodable, report):
        try:
            shape, record = _record(line, entry)
        except _Unusable as why:
            report.skip(line, why)
            continue
        report.shapes[shape] += 1
        records.append(record)
    report.records = len(records)
    if not records:
        what = f"; skipped:\n{report.table()}" if report.skipped else ": it is empty"
        raise SpecqError(f"no usable prompt in {path}, where a record needs one of {', '.join(KEYS)}{what}")
    return records, report


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; what goes wrong while they are read becomes a SpecqError."""
    openers: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}
    if path.exists() and not path.is_file():
        raise SpecqError(f"cannot read prompt file {path}: it is not a regular file")
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            yield file
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise SpecqError(f"cannot read prompt file {path}: {getattr(error, 'strerror', None) or error}") from error


def _open_zst(path: Path, mode: str) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path), mode), "zstd"))


def _lines(path: Path, undecodable: str, report: PromptReport) -> Iterator[tuple[int, str]]:
    """(number, text) of every line that is text; line ends and a byte-order mark are taken off."""
    offset = 0
    with _opened(path) as file:
        n = 0
        while raw := file.readline(LONGEST_LINE + 1):
            n += 1
            start, offset = offset, offset + len(raw)
            if len(raw) > LONGEST_LINE:
                report.skip(n, f"longer than {LONGEST_LINE >> 20} MB")
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(LONGEST_LINE)
                    offset += len(raw)
            if offset > LONGEST_FILE:
                raise SpecqError(f"{path} holds more than {LONGEST_FILE >> 30} GB of text; give a part of it")
            if len(raw) > LONGEST_LINE or offset - start > LONGEST_LINE:
                continue
            if n == 1:
                if raw[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
                    raise SpecqError(f"{path} is UTF-32 text; convert it: iconv -f UTF-32 -t UTF-8 {path.name}")
                if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise SpecqError(f"{path} is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8 {path.name}")
                raw = raw.removeprefix(b"\xef\xbb\xbf")
                start = offset - len(raw)
            try:
                if (nul := raw.find(0)) >= 0:
                    raise UnicodeDecodeError("utf-8", raw, nul, nul + 1, "a NUL byte, as in UTF-16 or binary files")
                yield n, raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError as error:
                where = f"byte {start + error.start}: not UTF-8 text ({error.reason})"
                if undecodable == "refuse":
                    raise SpecqError(
                        f"{path}: line {n}, {where}; convert the file to UTF-8, or use its other lines with --undecodable skip"
                    ) from error
                report.skip(n, where)


def _entries(path: Path, kind: str, undecodable: str, report: PromptReport) -> Iterator[tuple[int, Any]]:
    lines = _lines(path, undecodable, report)
    for n, line in lines:
        if not line.strip():
            continue
        if kind == ".txt":
            yield n, line
            continue
        if kind == ".json" and line.lstrip().startswith("["):
            yield from _array(path, n, [line, *(rest for _, rest in lines)])
            return
        try:
            yield n, _parse(line)
        except ValueError as error:
            if kind == ".json":
                raise SpecqError(
                    f"{path} must hold a JSON array of records, or one record per line; line {n} is not JSON: {error}"
                ) from error
            hint = " (an array over several lines? then call the file .json)" if line.strip() == "[" else ""
            report.skip(n, f"not JSON: {error}{hint}")
        kind = ".jsonl"


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _whole(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits):,} digits is no JSON value to use")
    return int(digits)


_DECODER = json.JSONDecoder(parse_constant=_constant, parse_int=_whole)


def _parse(text: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text, parse_constant=_constant, parse_int=_whole)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _array(path: Path, first: int, lines: list[str]) -> Iterator[tuple[int, Any]]:
    """(line where it begins, element) of a JSON array that begins on line `first`."""
    text = "\n".join(lines)
    at, line, counted = text.index("[") + 1, first, 0

    def refuse(problem: str) -> SpecqError:
        return SpecqError(f"{path} is no complete JSON array: line {line}, {problem}")

    def skip_space(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    at = skip_space(at)
    expect_more = False
    while at >= len(text) or text[at] != "]" or expect_more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            entry, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise refuse("nested too deeply") from None
        except ValueError as error:
            raise refuse(getattr(error, "msg", str(error))) from None
        yield line, entry
        at = skip_space(at)
        if at < len(text) and text[at] == ",":
            at, expect_more = skip_space(at + 1), True
        elif at < len(text) and text[at] == "]":
            break
        else:
            raise refuse("a comma or the closing bracket is missing")
    if text[at + 1 :].strip():
        raise refuse("text after the closing bracket")


# Reads a file as `_rows` does, in a process of its own
READ_THROUGH = """
import sys
import pyarrow.parquet as pq
with pq.ParquetFile(sys.argv[1]) as file:
    columns = [c for c in file.schema_arrow.names if c in sys.argv[2:]]
    for batch in file.iter_batches(batch_size=256, columns=columns):
        batch.to_pylist()
"""


def _check_survivable(path: Path, columns: Iterable[str]) -> None:
    """Raises SpecqError where a damaged file ends the process that reads it, as it can in Arrow's C++ code."""
    command = [sys.executable, "-I", "-c", READ_THROUGH, str(path), *columns]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode < 0:
        raise SpecqError(f"cannot read prompt file {path}: damaged, so that Arrow's reader crashes on it")


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise SpecqError(f"cannot read prompt file {path}: no such file")
    known = {*KEYS, *RESPONSES, "id", "custom_id", "question_id", "group", "category"}
    _check_survivable(path, known)
    n = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [c for c in file.schema_arrow.names if c in known]
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    n += 1
                    yield n, {k: v for k, v in row.items() if v is not None}
    except (OSError, pa.ArrowException, ValueError, NotImplementedError) as error:
        raise SpecqError(f"cannot read prompt file {path}: {str(error).splitlines()[0]}") from error


def _record(line: int, entry: Any) -> tuple[str, Record]:  # noqa: ANN401
    """(shape, record) of a parsed entry. Raises _Unusable with the reason."""
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise _Unusable("not an object")
    key = next((k for k in KEYS if entry.get(k) is not None), None)
    if key is None:
        raise _Unusable(f"has none of the keys {', '.join(KEYS)}")
    content, name = entry[key], entry.get("id", entry.get("custom_id", entry.get("question_id")))
    group = entry.get("group", entry.get("category") if key == "turns" else None)
    if key == "body":
        if not isinstance(content, dict) or not (inner := [k for k in ("messages", "prompt") if content.get(k)]):
            raise _Unusable("body is no request with messages or prompt")
        content = content[inner[0]]
    if not isinstance(content, (str, list)):
        raise _Unusable(f"{key} is neither text nor a list")
    kind, content = _content(key, content)
    response = next((entry[k] for k in reversed(RESPONSES) if entry.get(k) is not None), None)
    if kind == "messages":
        content, answer = _conversation(content)
        response = answer if response is None else response
    if response is not None and not isinstance(response, str) and not _are_ids(response):
        raise _Unusable("response is neither text nor a list of token ids")
    name, group = (str(x) if isinstance(x, (str, int)) else None for x in (name, group))
    record = Record(name or f"line{line}", line, content, kind, group, response)
    try:
        json.dumps([record.id, content, group, response], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _Unusable("has half of a surrogate pair, which is no text") from None
    return key, record


def _are_ids(values: Any) -> bool:  # noqa: ANN401
    return isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def _content(key: str, content: str | list) -> tuple[str, Any]:
    """(kind, content) of what stood under `key`. Raises _Unusable with the reason."""
    if not content or (isinstance(content, str) and not content.strip()):
        raise _Unusable(f"{key} is empty")
    if key == "prompt_token_ids":
        if not _are_ids(content):
            raise _Unusable("prompt_token_ids is not a list of whole numbers")
        return key, content
    if isinstance(content, str):
        if key not in ("prompt", "text", "body"):
            raise _Unusable(f"{key} is not a list")
        return ("text" if key == "text" else "prompt"), content
    if key == "text":
        raise _Unusable("text is not a string")
    if key == "turns":
        return "messages", [{"role": "user", "content": content[0]}] if isinstance(content[0], str) else content
    if key in ("prompt", "body"):
        if _are_ids(content):
            return "prompt_token_ids", content
        if not isinstance(content[0], dict):
            raise _Unusable(f"{key} is a list of neither messages nor token ids")
    return "messages", content


def _conversation(turns: list) -> tuple[list[dict[str, str]], str | None]:
    """(turns up to the last one that is not the assistant's, the assistant's answer to it if there is one)."""
    messages = []
    for n, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise _Unusable(f"turn {n} is not an object")
        role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise _Unusable(f"turn {n} has {'no role' if role is None else f'the unknown role {role!r:.40}'}")
        if isinstance(text, list):
            text = _parts(n, text)
        if not isinstance(text, str) or not text.strip():
            raise _Unusable(f"turn {n} is empty")
        messages.append({"role": ROLES[role.lower()], "content": text})
    roles = [m["role"] for m in messages]
    if next((r for r in roles if r != "system"), None) != "user":
        raise _Unusable("does not begin with a user's turn")
    if roles[-1] != "assistant":
        return messages, None
    return messages[:-1], messages[-1]["content"]


def _parts(n: int, parts: list) -> str:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _Unusable(f"turn {n} has a part of type {kind!r:.40}; only text is supported")
    return "".join(part["text"] for part in parts)
