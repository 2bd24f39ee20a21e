"""Prompt files in, token ids out.

Records are JSON objects, one per line (.jsonl, also .xz or .gz), a JSON array (.json), or plain text with one prompt per
line (.txt). A record has one of `prompt_token_ids`, `prompt`, `messages`, `turns`, `text`, and may have `id`, `group`,
`response` or `response_token_ids`. Lines end at "\\n" only: U+2028 and its kin belong to the text.
"""

import gzip
import json
import lzma
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specq.errors import SpecqError

PROMPT_KEYS = ("prompt_token_ids", "prompt", "messages", "turns", "text")


@dataclass(frozen=True)
class Record:
    """One usable record of a prompt file, still text; `line` counts from 1."""

    id: str
    line: int
    content: Any
    kind: str
    group: str | None = None
    response: Any = None


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt. `document` is the unit of resampling; `response` holds given tokens for `--text given`.

    `truncated` says that the record's prompt was longer; a prompt cut from a document (`text`) is not called truncated.
    """

    id: str
    document: str
    group: str | None
    tokens: tuple[int, ...]
    response: tuple[int, ...] | None = None
    truncated: bool = False


@dataclass(frozen=True)
class Text:
    """A prompt with its response: token ids, the arm that sampled it (or "given"), whether it ended by EOS."""

    prompt: Prompt
    response: tuple[int, ...]
    sampled_by: str
    ended: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt.tokens + self.response

    @property
    def positions(self) -> int:
        """Positions in the chain: all response tokens but the first, which comes from prefill."""
        return len(self.response) - 1


@dataclass
class PromptReport:
    """What became of the file: counts, and (line, reason) of what was skipped."""

    source: str
    records: int = 0
    too_short: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)


def _read_text(path: Path) -> str:
    openers = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            data = file.read()
    except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise SpecqError(f"cannot read prompt file {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SpecqError(f"{path}: line {line}, byte {error.start}: not UTF-8 text ({error.reason})") from error


def read_records(path: str | Path) -> tuple[list[Record], PromptReport]:
    """All usable records of a prompt file, and a report of the rest. Raises SpecqError when none is usable."""
    path = Path(path)
    text, report = _read_text(path), PromptReport(str(path))
    kind = next((s for s in reversed(path.suffixes) if s not in (".xz", ".gz")), "")
    if kind not in (".txt", ".jsonl", ".json"):
        raise SpecqError(
            f"prompt file {path} has an unknown ending; accepted are .txt, .jsonl and .json (also .xz, .gz)"
        )
    records: list[Record] = []
    if kind == ".txt":
        for n, line in enumerate(text.split("\n"), 1):
            if line.strip():
                records.append(Record(f"line{n}", n, line.rstrip("\r"), "prompt"))
    else:
        for n, entry in _entries(text, path, report) if kind == ".jsonl" else _array(text, path):
            record = _record(n, entry, report)
            if record is not None:
                records.append(record)
    report.records = len(records)
    if not records:
        why = f"; first problem: line {report.skipped[0][0]}, {report.skipped[0][1]}" if report.skipped else ""
        raise SpecqError(f"no usable prompt in {path}{why}; a record needs one of {', '.join(PROMPT_KEYS)}")
    return records, report


def _entries(text: str, path: Path, report: PromptReport) -> list[tuple[int, Any]]:
    out = []
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            out.append((n, json.loads(line)))
        except (ValueError, RecursionError) as error:
            report.skipped.append((n, f"not JSON ({error})"))
    return out


def _array(text: str, path: Path) -> list[tuple[int, Any]]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecqError(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise SpecqError(f"{path} must hold a JSON array of records")
    return list(enumerate(entries, 1))


def _record(n: int, entry: Any, report: PromptReport) -> Record | None:  # noqa: ANN401
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        report.skipped.append((n, "not an object"))
        return None
    key = next((k for k in PROMPT_KEYS if entry.get(k)), None)
    if key is None:
        report.skipped.append((n, f"none of {', '.join(PROMPT_KEYS)}"))
        return None
    content, group = entry[key], entry.get("group")
    expected = str if key in ("prompt", "text") else list
    if not isinstance(content, expected):
        report.skipped.append((n, f"{key} is not a {'string' if expected is str else 'list'}"))
        return None
    try:
        json.dumps(entry, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        report.skipped.append((n, "has half of a surrogate pair, which is no text"))
        return None
    response = entry.get("response_token_ids", entry.get("response"))
    return Record(str(entry.get("id", f"line{n}")), n, content, key, None if group is None else str(group), response)


def _encode(record: Record, tokenizer: Any) -> list[int]:  # noqa: ANN401
    if record.kind == "prompt_token_ids":
        return [int(i) for i in record.content]
    if record.kind in ("messages", "turns"):
        messages = record.content
        if record.kind == "turns":
            messages = [{"role": "user", "content": str(record.content[0])}]
        if not getattr(tokenizer, "chat_template", None):
            raise SpecqError("the tokenizer has no chat template; give records with `prompt` or `text`")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = record.content
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def encode_prompts(
    records: list[Record],
    report: PromptReport,
    tokenizer: Any,  # noqa: ANN401
    *,
    count: int,
    prompt_tokens: int,
    vocabulary: int,
    seed: int,
    given: bool = False,
    max_response: int | None = None,
) -> list[Prompt]:
    """Choose `count` records by `seed` and tokenise them to exactly one leading BOS (where the tokenizer has one).

    A `text` record is a document to cut a prompt from: it must have at least `prompt_tokens` tokens and is cut there.
    Other prompts are used whole, or cut to their last `prompt_tokens` tokens. With `given`, records need a response.
    Chosen deterministically; what was skipped is listed in `report`. A repeated id gets its line number behind it.
    """
    chosen: list[Prompt] = []
    taken: set[str] = set()
    for i in np.random.default_rng(seed).permutation(len(records)):
        if len(chosen) == count:
            break
        record = records[i]
        try:
            ids = _encode(record, tokenizer)
            response = _response(record, tokenizer, max_response) if given else None
        except (SpecqError, ValueError, TypeError, OverflowError) as error:
            report.skipped.append((record.line, str(error)))
            continue
        if record.kind == "text" and len(ids) < prompt_tokens:
            report.too_short += 1
            continue
        bad = next((t for t in (*ids, *(response or ())) if not 0 <= t < vocabulary), None)
        if bad is not None:
            report.skipped.append((record.line, f"token id {bad} is outside the vocabulary of {vocabulary}"))
            continue
        long = len(ids) > prompt_tokens
        if long:
            ids = ids[:prompt_tokens] if record.kind == "text" else [ids[0], *ids[len(ids) - prompt_tokens + 1 :]]
        truncated = long and record.kind != "text"
        name = record.id if record.id not in taken else f"{record.id} (line {record.line})"
        taken.add(name)
        chosen.append(Prompt(name, name, record.group, tuple(ids), response, truncated))
    if not chosen:
        detail = f"{report.too_short} shorter than {prompt_tokens} tokens" if report.too_short else ""
        if report.skipped:
            line, why = report.skipped[0]
            detail = "; ".join(filter(None, (detail, f"line {line}: {why}")))
        raise SpecqError(f"no usable prompt in {report.source}: {detail}")
    return chosen


def _response(record: Record, tokenizer: Any, limit: int | None) -> tuple[int, ...]:  # noqa: ANN401
    if record.response is None:
        raise SpecqError("no response or response_token_ids, which --text given needs")
    ids = record.response
    if isinstance(ids, str):
        ids = tokenizer(ids, add_special_tokens=False)["input_ids"]
    ids = tuple(int(i) for i in ids)[:limit]
    if len(ids) < 2:
        raise SpecqError("the response has fewer than 2 tokens, so no position to score")
    return ids
