"""Prompt files: what is read, what is skipped and why, exactly one BOS, deterministic choice."""

import gzip
import json
import lzma

import pytest
from conftest import word_tokenizer
from transformers import AutoTokenizer

from specq.errors import SpecqError
from specq.prompts import encode_prompts, read_records


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok")
    word_tokenizer(["<s>", "</s>", *"abcdefgh", "<unk>"], path)
    return AutoTokenizer.from_pretrained(path)


def encode(path, tokenizer, **kw):
    records, report = read_records(path)
    options = dict(count=10, prompt_tokens=6, vocabulary=11, seed=0) | kw
    return encode_prompts(records, report, tokenizer, **options), report


def test_text_lines_end_at_newline_only(tmp_path):
    """BOM, CRLF, a missing last newline and U+2028 inside a record change nothing; blank lines are no prompts."""
    for suffix, body in (
        (".txt", "a b\r\n\r\nc\u2028d"),
        (".jsonl", '{"prompt": "a b"}\r\n\r\n{"prompt": "c\u2028d"}'),
    ):
        path = tmp_path / ("p" + suffix)
        path.write_bytes(b"\xef\xbb\xbf" + body.encode())
        records, _ = read_records(path)
        assert [r.content for r in records] == ["a b", "c\u2028d"]


def test_every_shape_is_recognised_or_skipped_with_line_and_reason(tmp_path, tokenizer):
    """prompt, text, prompt_token_ids are read; damaged lines are listed with their numbers; others stay usable."""
    lines = [
        '{"prompt": "a b c"}',
        "{broken",
        "[1]",
        '{"other": 1}',
        '{"prompt": 5}',
        '{"prompt_token_ids": [0, 3, 4]}',
        '{"text": "a b c d e f g h", "group": "x", "id": "t"}',
        '{"prompt_token_ids": [3, 99]}',
        '"just text"',
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    prompts, report = encode(path, tokenizer)
    got = {p.id: p.tokens for p in prompts}
    assert got["line1"] == (0, 2, 3, 4) and got["line6"] == (0, 3, 4)
    assert got["t"] == (0, 2, 3, 4, 5, 6) and [p.group for p in prompts if p.id == "t"] == ["x"]
    assert sorted(n for n, _ in report.skipped) == [2, 3, 4, 5, 8]
    assert "99" in dict(report.skipped)[8]


def test_one_bos_and_long_prompts_keep_their_end(tmp_path, tokenizer):
    """A prompt gets one BOS, also when it brings one; a long prompt keeps BOS and its end, a document its beginning."""
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\n".join(json.dumps(r) for r in ({"prompt": "<s> a"}, {"prompt": "a b c d e f g h"}, {"text": "a b"}))
    )
    prompts, report = encode(path, tokenizer)
    got = {p.id: p.tokens for p in prompts}
    assert got["line1"] == (0, 2) and got["line2"] == (0, 5, 6, 7, 8, 9)
    assert [p.id for p in prompts if p.truncated] == ["line2"]
    assert "line3" not in got and report.too_short == 1


def test_compressed_files_and_arrays(tmp_path):
    """.xz, .gz and JSON arrays hold the same records."""
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.jsonl.xz", "a.jsonl.gz", "a.json"):
        assert [r.content for r in read_records(tmp_path / name)[0]] == ["a", "b"]


def test_given_responses_need_two_tokens(tmp_path, tokenizer):
    """--text given takes response text or ids; a record without one, or with a single token, is skipped with the reason."""
    rows = [{"prompt": "a", "response": "b c d"}, {"prompt": "a", "response_token_ids": [3, 4]}, {"prompt": "a"},
            {"prompt": "a", "response": "b"}]  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts, report = encode(path, tokenizer, given=True)
    assert sorted(p.response for p in prompts) == [(3, 4), (3, 4, 5)]
    assert sorted(n for n, _ in report.skipped) == [3, 4]


def test_the_choice_is_the_seeds(tmp_path, tokenizer):
    """Equal seeds choose equal prompts in equal order; another seed chooses others."""
    path = tmp_path / "p.txt"
    path.write_text("\n".join("abcdefgh"))
    first = [p.id for p in encode(path, tokenizer, count=4, seed=1)[0]]
    assert first == [p.id for p in encode(path, tokenizer, count=4, seed=1)[0]]
    assert first != [p.id for p in encode(path, tokenizer, count=4, seed=2)[0]]


@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("missing.txt", None, "cannot read prompt file"),
        ("p.csv", b"a", "unknown ending"),
        ("p.txt", b"ok\ncaf\xe9\n", "line 2, byte 6: not UTF-8"),
        ("p.jsonl", b"", "no usable prompt"),
        ("p.jsonl", b"{", "first problem: line 1, not JSON"),
        ("p.json", b"{}", "array"),
        ("p.txt.xz", b"no xz", "cannot read prompt file"),
        ("p.jsonl", b'{"x": 1}', "prompt_token_ids, prompt, messages, turns, text"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, name, body, why):
    """One sentence that names the file and the reason."""
    path = tmp_path / name
    if body is not None:
        path.write_bytes(body)
    with pytest.raises(SpecqError, match=why):
        read_records(path)


def test_messages_without_a_chat_template_are_refused(tmp_path, tokenizer):
    """A base model's tokenizer has no chat template: chat records are skipped with that reason, none usable is an error."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(SpecqError, match="no chat template"):
        encode(path, tokenizer)


def test_chat_templates_are_applied_with_one_bos(tmp_path, tokenizer):
    """Messages and turns go through the template; a template that writes BOS itself does not get a second one."""
    tokenizer.chat_template = "{{ bos_token }} {% for m in messages %}{{ m['content'] }} {% endfor %}d"
    try:
        path = tmp_path / "p.jsonl"
        path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"turns": ["b", "c"]}')
        prompts, _ = encode(path, tokenizer)
        assert {p.id: p.tokens for p in prompts} == {"line1": (0, 2, 5), "line2": (0, 3, 5)}
    finally:
        tokenizer.chat_template = None


def test_strange_records_are_skipped_not_fatal(tmp_path, tokenizer):
    """Half surrogates, infinite ids, deep nesting and repeated ids: a reason, or a name of its own; never a traceback."""
    deep = "[" * 100_000
    lines = ['{"prompt": "a", "id": "x"}', '{"prompt": "b", "id": "x"}', '{"prompt": "\\ud800"}',
             '{"prompt_token_ids": [1, 1e999]}', deep]  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    prompts, report = encode(path, tokenizer)
    assert {p.document for p in prompts} in ({"x", "x (line 2)"}, {"x", "x (line 1)"})
    assert sorted(n for n, _ in report.skipped) == [3, 4, 5]
    damaged = tmp_path / "p.txt.gz"
    damaged.write_bytes(b"\x1f\x8b\x08\x00" + b"\x00" * 6 + b"not deflate")
    with pytest.raises(SpecqError, match="cannot read prompt file"):
        read_records(damaged)
