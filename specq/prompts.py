"""Records in, token ids out: chat templates, exactly one BOS, a choice that depends on the seed alone.

A `text` record is a document to cut a prompt from; every other record is used whole, or cut to its end. Chat records go
through the target tokenizer's chat template; a base model has none, and then they are refused unless `chat` is "raw":
the turns joined by blank lines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specq.errors import SpecqError
from specq.records import PromptReport, Record, read_records

__all__ = ["Prompt", "PromptReport", "Record", "encode_prompts", "read_records"]

# Text beyond this many characters per wanted token is cut before it is tokenised: tokenizing 20 MB takes 15 s and GBs.
CHARACTERS_PER_TOKEN = 64


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


def _chat_text(messages: list[dict[str, str]], tokenizer: Any, chat: str) -> str:  # noqa: ANN401
    if chat == "raw":
        return "\n\n".join(m["content"] for m in messages)
    if not getattr(tokenizer, "chat_template", None):
        raise SpecqError(
            "the tokenizer has no chat template (a base model?): give records with `prompt` or `text`, or --chat raw to join"
            " the turns as plain text"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the model's makers and raise what they like
        raise SpecqError(f"the chat template refuses it: {str(error).strip() or type(error).__name__}") from error


def _encode(record: Record, tokenizer: Any, chat: str, wanted: int) -> tuple[list[int], bool]:  # noqa: ANN401
    """(ids, whether text was cut off before tokenising). Text gets exactly one leading BOS where the tokenizer has one."""
    if record.kind == "prompt_token_ids":
        return list(record.content), False
    text = _chat_text(record.content, tokenizer, chat) if record.kind == "messages" else record.content
    limit = CHARACTERS_PER_TOKEN * wanted
    cut = len(text) > limit
    if cut:
        text = text[:limit] if record.kind == "text" else text[-limit:]
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return _one_bos(ids, tokenizer.bos_token_id), cut


def _one_bos(ids: list[int], bos: int | None) -> list[int]:
    """The same ids with exactly one leading BOS, where there is such a token."""
    if bos is None:
        return ids
    start = next((i for i, t in enumerate(ids) if t != bos), len(ids))
    return [bos, *ids[start:]]


def _cut(ids: list[int], wanted: int, bos: int | None) -> list[int]:
    """The last `wanted` ids, a leading BOS being one of them; a BOS in the text that the cut bares does not stay."""
    if ids[0] != bos:
        return ids[-wanted:]
    return _one_bos(ids[len(ids) - wanted + 1 :], bos)


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
    chat: str = "template",
    progress: Callable[[float], None] = lambda done: None,
) -> list[Prompt]:
    """Choose `count` records by `seed` and tokenise them to exactly one leading BOS (where the tokenizer has one).

    A `text` record is a document to cut a prompt from: it must have at least `prompt_tokens` tokens and is cut there.
    Other prompts are used whole, or cut to their last `prompt_tokens` tokens. With `given`, records need a response.
    The choice depends on the seed and the usable records alone; what was skipped is listed in `report`. A repeated id
    gets its line number behind it. `progress` is called with records looked at.
    """
    chosen: list[Prompt] = []
    taken: set[str] = set()
    order = np.random.default_rng(seed).permutation(len(records))
    for looked, i in enumerate(order):
        if len(chosen) == count:
            report.not_drawn += len(order) - looked
            break
        progress(1)
        record = records[i]
        try:
            ids, cut = _encode(record, tokenizer, chat, prompt_tokens)
            response, response_cut = _response(record, tokenizer, max_response) if given else (None, False)
        except (SpecqError, ValueError, TypeError, OverflowError) as error:
            report.skip(record.line, error)
            continue
        if record.kind == "text" and len(ids) < prompt_tokens:
            report.too_short += 1
            continue
        bad = next((t for t in (*ids, *(response or ())) if not 0 <= t < vocabulary), None)
        if bad is not None:
            report.skip(record.line, f"token id {bad} is outside the vocabulary of {vocabulary}")
            continue
        if not ids:
            report.skip(record.line, "no token is left of it")
            continue
        long = len(ids) > prompt_tokens or cut
        if len(ids) > prompt_tokens:
            ids = ids[:prompt_tokens] if record.kind == "text" else _cut(ids, prompt_tokens, tokenizer.bos_token_id)
        name = record.id
        while name in taken:
            name = f"{name} (line {record.line})"
        taken.add(name)
        report.responses_truncated += response_cut
        chosen.append(Prompt(name, name, record.group, tuple(ids), response, long and record.kind != "text"))
    if not chosen:
        reasons = [f"{report.too_short} are shorter than {prompt_tokens} tokens"] if report.too_short else []
        if report.skipped:
            reasons.append(f"skipped:\n{report.table()}")
        raise SpecqError(f"no usable prompt in {report.source}: {'; '.join(reasons)}")
    return chosen


def _response(record: Record, tokenizer: Any, limit: int | None) -> tuple[tuple[int, ...], bool]:  # noqa: ANN401
    """(the response's first `limit` tokens, whether there were more)."""
    if record.response is None:
        raise SpecqError("no response or response_token_ids, which --text given needs")
    ids = record.response
    if isinstance(ids, str):
        text = ids if limit is None else ids[: CHARACTERS_PER_TOKEN * limit]
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise SpecqError("the response has fewer than 2 tokens, so no position to score")
    return tuple(ids[:limit]), limit is not None and len(ids) > limit
