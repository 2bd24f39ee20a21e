"""Prompt files: what is read, what is skipped and why, exactly one BOS, deterministic choice."""

import gzip
import json
import lzma
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
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


def test_i01_i02_text_lines_end_at_newline_only(tmp_path):
    """I-01, I-02: BOM, CRLF, a missing last newline and U+2028 inside a record change nothing; blank lines are no prompts."""
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
    path.write_text('{"prompt": "a a a <s> b c d e"}\n{"prompt_token_ids": [9, 8, 7, 6, 5, 4, 3]}')
    bared = {p.id: p.tokens for p in encode(path, tokenizer)[0]}
    assert bared == {"line1": (0, 3, 4, 5, 6), "line2": (8, 7, 6, 5, 4, 3)}
    assert got["line1"] == (0, 2) and got["line2"] == (0, 5, 6, 7, 8, 9)
    assert [p.id for p in prompts if p.truncated] == ["line2"]
    assert "line3" not in got and report.too_short == 1


def test_compressed_files_and_arrays(tmp_path):
    """.xz, .gz, .zst, JSON arrays, .json of lines and parquet hold the same records, whatever the byte-order mark."""
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    text = "\ufeff" + "\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl.zst").write_bytes(pa.Codec("zstd").compress(text.encode(), asbytes=True))
    (tmp_path / "b.json").write_text(text)
    (tmp_path / "c.json").write_text("\ufeff" + json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.jsonl.xz", "a.jsonl.gz", "a.jsonl.zst", "a.json", "b.json", "c.json", "a.parquet"):
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
        ("p.jsonl", b"{", "line 1: not JSON"),
        ("p.json", b"{", "must hold a JSON array of records, or one record per line"),
        ("p.json", b"{}", "needs one of prompt_token_ids, prompt, messages"),
        ("p.json", b'[{"prompt": "a"},\n{"prompt": ', "no complete JSON array: line 2"),
        ("p.json", b'[{"prompt": "a"}\n\n{"prompt": "b"}]', "line 1, a comma or the closing bracket is missing"),
        ("p.json", b'[{"prompt": "a"}] x', "text after the closing bracket"),
        ("p.json", b"[" * 100_000, "nested too deeply"),
        ("p.jsonl", b"[\n", "call the file .json"),
        ("p.txt", "a b".encode("utf-16"), "UTF-16 text; convert it: iconv"),
        ("p.txt", "a b".encode("utf-32"), "UTF-32 text; convert it: iconv -f UTF-32"),
        (
            "p.json",
            b'[{"prompt": "a", "id": ' + b"9" * 5000 + b"}]",
            "line 1, a number of 5,000 digits is no JSON value",
        ),
        ("p.jsonl", b'{"prompt": "a", "id": ' + b"9" * 5000 + b"}", "line 1: not JSON: a number of 5,000 digits"),
        ("p.txt", "a b".encode("utf-16-le"), "line 1, byte 1: not UTF-8 text .a NUL byte"),
        ("p.jsonl.zst", b"no zst", "cannot read prompt file"),
        ("p.parquet", b"PAR1 no parquet PAR1", "cannot read prompt file"),
        ("p.parquet.gz", b"", "unknown ending"),
        ("p.txt.xz", b"no xz", "cannot read prompt file"),
        ("p.jsonl", b'{"x": 1}', "prompt_token_ids, prompt, messages, conversations, conversation, turns, body, text"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, name, body, why):
    """One sentence that names the file and the reason."""
    path = tmp_path / name
    if body is not None:
        path.write_bytes(body)
    with pytest.raises(SpecqError, match=why):
        read_records(path)


def test_i09_messages_without_a_chat_template_are_refused(tmp_path, tokenizer):
    """I-09: a base model has no chat template: chat records are skipped with that reason; none usable is an error."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(SpecqError, match="no chat template"):
        encode(path, tokenizer)
    prompts, _ = encode(path, tokenizer, chat="raw")
    assert prompts[0].tokens == (0, 2)


def test_i10_chat_templates_are_applied_with_one_bos(tmp_path, tokenizer):
    """I-10: messages and turns go through the template; a template that writes BOS itself does not get a second one."""
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


def test_i02_every_line_separator_stays_in_its_record(tmp_path, tokenizer):
    """I-02: U+2028, U+2029, U+0085, vertical tab and form feed inside a string are text in every format."""
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf\u001cg\rh"
    line = json.dumps({"prompt": odd}, ensure_ascii=False)
    bodies = {"p.jsonl": line, "p.json": f"[{line},\r\n {line}]\r\n", "p.txt": odd, "q.txt": odd + "\r\n"}
    for name, body in bodies.items():
        (tmp_path / name).write_bytes(body.encode())
        assert {r.content for r in read_records(tmp_path / name)[0]} == {odd}, name


def test_i04_wrong_encodings_name_line_and_byte_and_others_are_used_on_request(tmp_path):
    """I-04: a Latin-1 line stops the file with line and byte; `skip` uses the other lines and lists it."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "one"}\r\n{"prompt": "caf\xe9"}\n{"prompt": "two"}')
    with pytest.raises(SpecqError, match=r"line 2, byte 34: not UTF-8 text .*--undecodable skip"):
        read_records(path)
    records, report = read_records(path, undecodable="skip")
    assert [r.content for r in records] == ["one", "two"] and report.skipped[0][0] == 2


def test_i04_the_locale_does_not_matter(tmp_path):
    """I-04: with LC_ALL=C and PYTHONUTF8=0, Chinese and emoji prompts are read as the same text."""
    path = tmp_path / "p.txt"
    path.write_bytes("中文 😀 prompts\n".encode())
    code = "import sys; from specq.records import read_records; print(ascii(read_records(sys.argv[1])[0][0].content))"
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert out.stdout.strip() == ascii("中文 😀 prompts"), out.stderr


SHAREGPT = [
    {"conversations": []},
    {"id": "no key"},
    "just [no object",
    {"conversations": [{"from": "robot", "value": "a"}]},
    {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]},
    {"conversations": ["a", "b"]},
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": "c"},
        ]
    },
    {
        "conversations": [
            {"from": "system", "value": "s"},
            {"role": "user", "content": "a"},
            {"from": "gpt", "value": "b c"},
        ]
    },
    {"conversations": [{"from": "human", "value": "d"}, {"role": "assistant", "content": "e f"}], "id": "good"},
]


@pytest.mark.parametrize("array", [False, True])
def test_i05_damaged_sharegpt_is_skipped_line_by_line(tmp_path, array):
    """I-05: of ten lines, each fault once and two good ones, three are usable: one that ends with the user is a prompt as
    well. Every other has its line number and reason."""
    lines = [json.dumps(x) for x in SHAREGPT]
    lines[2] = "[1, 2]"
    path = tmp_path / ("p.json" if array else "p.jsonl")
    path.write_text("[\n" + ",\n".join(lines) + "\n]" if array else "\n".join(lines))
    records, report = read_records(path)
    assert [r.line - array for r in records] == [8, 9, 10]
    assert [r.response for r in records] == [None, "b c", "e f"]
    assert [m["role"] for m in records[0].content] == ["user", "assistant", "user"]
    assert [m["role"] for m in records[1].content] == ["system", "user"]
    reasons = {n - array: why for n, why in report.skipped}
    assert reasons == {
        1: "conversations is empty",
        2: "has none of the keys prompt_token_ids, prompt, messages, conversations, conversation, turns, body, text",
        3: "not an object",
        4: "turn 1 has the unknown role 'robot'",
        5: "does not begin with a user's turn",
        6: "turn 2 is empty",
        7: "turn 1 is not an object",
    }
    assert "line" in report.table() and len(report.table(rows=2).splitlines()) == 3


def test_i05_nothing_usable_is_an_error_with_the_table(tmp_path):
    """I-05: zero usable records: an error that lists lines and reasons."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(x) for x in SHAREGPT[:2]))
    with pytest.raises(SpecqError, match="line 1: conversations is empty\n  line 2: has none"):
        read_records(path)


def test_i06_the_shapes_in_use(tmp_path):
    """I-06: prompt, messages, turns (Spec-Bench), text, OpenAI batch requests, prompts as messages or ids, content parts; a
    file of several shapes says so."""
    user = {"role": "user", "content": "a b"}
    rows = [
        {"prompt": "a b"},
        {"messages": [user]},
        {"question_id": 81, "category": "writing", "turns": ["a b", "then c"]},
        {"text": "a b"},
        {
            "custom_id": "r1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [user]},
        },
        {"custom_id": "r2", "body": {"prompt": "a b"}},
        {"prompt": [user]},
        {"prompt": [3, 4]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"prompt": ["a", "b"]},
        {"turns": [["a"]]},
        {"prompt": "  "},
        {"body": {"input": "embeddings"}},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    records, report = read_records(path)
    kinds = ["prompt", "messages", "messages", "text", "messages", "prompt", "messages", "prompt_token_ids", "messages"]
    assert [r.kind for r in records] == kinds
    assert all(r.content == [user] for r in records if r.kind == "messages")
    assert (records[2].id, records[2].group) == ("81", "writing") and [r.id for r in records[4:6]] == ["r1", "r2"]
    assert report.shapes == {"prompt": 3, "messages": 2, "turns": 1, "text": 1, "body": 2}
    assert sorted(n for n, _ in report.skipped) == [10, 11, 12, 13, 14] and "image_url" in dict(report.skipped)[10]


def test_a_file_on_which_the_reader_crashes_is_refused(tmp_path, monkeypatch):
    """Damage can make Arrow's C++ code abort its process (found by fuzzing): not ours, which reads a file only after another
    process has come to its end."""
    pq.write_table(pa.Table.from_pylist([{"prompt": "whole"}]), tmp_path / "p.parquet")
    assert len(read_records(tmp_path / "p.parquet")[0]) == 1
    monkeypatch.setattr("specq.records.READ_THROUGH", "import os; os.abort()")
    with pytest.raises(SpecqError, match="damaged, so that Arrow's reader crashes on it"):
        read_records(tmp_path / "p.parquet")


def test_i06_parquet_rows_hold_every_shape(tmp_path):
    """Parquet: nested turns and id lists come back as records; rows without a usable value are skipped by number."""
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}], "group": "g"},
            {"prompt_token_ids": [1, 2]}, {"prompt": None}]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema([
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))), ("group", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int64())), ("prompt", pa.string())])), tmp_path / "p.parquet")  # fmt: skip
    records, report = read_records(tmp_path / "p.parquet")
    assert [(r.kind, r.response, r.group) for r in records] == [
        ("messages", "b c", "g"),
        ("prompt_token_ids", None, None),
    ]
    assert [n for n, _ in report.skipped] == [3]


def test_i09_a_template_that_refuses_is_a_reason_and_a_separate_file_is_found(tmp_path):
    """I-09: chat_template.jinja beside the tokenizer is used; system roles it rejects skip the record with its words."""
    word_tokenizer(["<s>", "</s>", *"abcdefgh", "<unk>"], tmp_path / "tok")
    (tmp_path / "tok" / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ bos_token }} {{ messages[0]['content'] }} h"
    )
    found = AutoTokenizer.from_pretrained(tmp_path / "tok")
    rows = [{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            {"messages": [{"role": "user", "content": "c"}]}]  # fmt: skip
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts, report = encode(path, found)
    assert [p.tokens for p in prompts] == [(0, 4, 9)]
    assert report.skipped == [(1, "the chat template refuses it: System role not supported")]


@pytest.mark.parametrize("template", ["{{ bos_token }} {{ bos_token }} a", "{{ bos_token }} a", "a"])
def test_i10_exactly_one_bos_whatever_the_template_writes(tmp_path, tokenizer, template):
    """I-10: no, one or two BOS in the template end up as one; a tokenizer without BOS gets none and does not crash."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"prompt": "<s> <s> b"}')
    tokenizer.chat_template = template
    try:
        assert {p.tokens for p in encode(path, tokenizer)[0]} == {(0, 2), (0, 3)}
        bos, tokenizer.bos_token = tokenizer.bos_token, None
        tokenizer.chat_template = "a"
        assert {p.tokens for p in encode(path, tokenizer)[0]} == {(2,), (0, 0, 3)}
        tokenizer.bos_token = bos
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_q28_multi_turn_conversations_are_prompts(tmp_path, tokenizer, key):
    """Q-28: a conversation of several turns is one prompt: all turns in order up to the last question, through the template,
    with one BOS at its start though every turn opens with one; the last answer is the response; a limit keeps its end."""
    say, who = ("content", "role") if key == "messages" else ("value", "from")
    turns = [{who: r, say: w} for r, w in zip(["user", "assistant"] * 3, "abcdef", strict=True)]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({key: turns}) + "\n" + json.dumps({key: turns[:3]}))
    tokenizer.chat_template = "{{ bos_token }} {% for m in messages %}{{ m['content'] }} {% endfor %}h"
    whole, asked = (0, 2, 3, 4, 5, 6, 9), (0, 2, 3, 4, 9)
    try:
        prompts, _ = encode(path, tokenizer, prompt_tokens=12)
        assert {p.tokens for p in prompts} == {whole, asked}
        prompts, _ = encode(path, tokenizer, prompt_tokens=4)
        assert {p.tokens for p in prompts} == {(0, *whole[-3:]), (0, *asked[-3:])} and all(p.truncated for p in prompts)
        raw, _ = encode(path, tokenizer, prompt_tokens=12, chat="raw")
        assert {p.tokens for p in raw} == {whole[:-1], asked[:-1]}
    finally:
        tokenizer.chat_template = None
    assert [r.response for r in read_records(path)[0]] == ["f", None]


def test_a_line_of_20_mb_is_a_prompt(tmp_path, tokenizer):
    """A 20 MB line is read and cut to its end before it is tokenised; longer texts than the limit say they are truncated."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "a " * 10_000_000 + "b c"}))
    prompts, _ = encode(path, tokenizer)
    assert prompts[0].tokens == (0, 2, 2, 2, 3, 4) and prompts[0].truncated


def test_a_longer_line_than_memory_wants_is_skipped_not_held(tmp_path, monkeypatch):
    """Lines beyond the limit are passed over without being kept; a file beyond its limit is refused (a gzip bomb)."""
    from specq import records as module

    monkeypatch.setattr(module, "LONGEST_LINE", 100)
    path = tmp_path / "p.txt"
    path.write_text("x" * 250 + "\nshort\n" + "y" * 101 + "\n")
    records, report = read_records(path)
    assert [(r.line, r.content) for r in records] == [(2, "short")] and [n for n, _ in report.skipped] == [1, 3]
    monkeypatch.setattr(module, "LONGEST_FILE", 300)
    with pytest.raises(SpecqError, match="holds more than"):
        read_records(path)


def test_reasons_cannot_steer_a_terminal(tmp_path):
    """Control characters of a file appear as escapes in the table of skipped records."""
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "\x1b[31mevil", "content": "a"}]}) + '\n"ok"')
    assert "\x1b" not in read_records(path)[1].table()


def test_counts_of_what_was_not_drawn_and_cut(tmp_path, tokenizer):
    """Counts: records beyond the number asked for, and given responses that were cut."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a", "response": "b c d e"}) for _ in range(7)))
    prompts, report = encode(path, tokenizer, count=3, given=True, max_response=2)
    assert len(prompts) == 3 and report.not_drawn == 4 and report.responses_truncated == 3
    assert len({p.id for p in prompts}) == 3
