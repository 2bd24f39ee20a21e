"""Whatever users feed it: an answer or one sentence. A few hundred inputs of each kind in the suite, and with `make fuzz`
(SPECQ_FUZZ = the number of inputs in all) at least 20,000, under a limit on memory and with the count printed.

Every property says: SpecqError with a printable reason, or a result that keeps its promises; never another exception.
"""

import copy
import gzip
import json
import lzma
import os
import resource
import shutil
from collections import Counter
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import save_model, word_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer

from specq import records
from specq.config import StudyConfig, make_config
from specq.engines.metrics import command as metrics
from specq.engines.metrics.summary import summarise
from specq.engines.metrics.text import COUNTERS, PER_POSITION, PREFIX
from specq.errors import SpecqError
from specq.kv.checkpoint_scales import ignored_scales
from specq.models.checkpoint import Checkpoint, open_checkpoint
from specq.models.examine import examine
from specq.models.loading import load
from specq.models.weight_files import BITS, read_header
from specq.prompts import encode_prompts, read_records

TOTAL = int(os.environ.get("SPECQ_FUZZ", "0"))
SHARES = {"prompt files": 0.38, "chat and ids": 0.1, "parquet": 0.06, "options": 0.1, "config.json": 0.1, "loading": 0.01,
          "headers": 0.15, "metrics": 0.15}  # fmt: skip
MEMORY = 3 << 30  # bytes of address space that the inputs may add
COUNTS: Counter[str] = Counter()
REFUSED: Counter[str] = Counter()


def inputs(kind, few):
    """Settings: this kind's share of the inputs asked for, or `few`; two seconds each at most."""
    count = -(-int(TOTAL * SHARES[kind] * 100) // 100) if TOTAL else few
    checks = [
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ]
    return settings(max_examples=max(count, 1), deadline=2000, suppress_health_check=checks, derandomize=not TOTAL,
                    database=None)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def bounded():
    """A limit on memory while the inputs run, and the count at the end."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    if TOTAL:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        each = ", ".join(f"{n:,} {kind} ({REFUSED[kind]:,} refused)" for kind, n in COUNTS.items())
        print(f"\n{sum(COUNTS.values()):,} inputs: {each}; peak memory {peak:.2f} GB")


@contextmanager
def refused_in_a_sentence(kind):
    COUNTS[kind] += 1
    try:
        yield
    except SpecqError as error:
        REFUSED[kind] += 1
        assert str(error).strip() and "Traceback" not in str(error)


# ----------------------------------------------------------------------------------------------------- prompt files

words = st.text(max_size=12) | st.sampled_from(["a b c", "\ud800", "\u2028", "\x00", "\r", "w" * 300, " ", "<s>"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from([*records.ROLES, "robot", ""]) | values
turn = st.fixed_dictionaries(
    {}, optional={"role": roles, "from": roles, "content": words | values, "value": words | values}
)
contents = st.one_of(
    words,
    st.lists(turn, max_size=4),
    st.lists(st.integers(-3, 20), max_size=5),
    st.fixed_dictionaries({}, optional={"messages": st.lists(turn, max_size=3), "prompt": words}),
    values,
)
record = st.dictionaries(
    st.sampled_from([*records.KEYS, *records.RESPONSES, "id", "group", "category", "custom_id"]), contents, max_size=4
)
letters = st.lists(st.sampled_from(["a", "b", "c", "d", "<s>", "</s>", "zzz", "\u2028"]), min_size=1, max_size=9).map(
    " ".join
)
good_turn = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(list(records.ROLES)), letters)
usable = st.one_of(
    st.builds(lambda k, t, r: {k: t, "response": r, "id": t[0]}, st.sampled_from(["prompt", "text"]), letters, letters),
    st.builds(
        lambda k, turns: {k: turns}, st.sampled_from(["messages", "conversations"]), st.lists(good_turn, max_size=4)
    ),
    st.builds(lambda t, g: {"turns": t, "category": g}, st.lists(letters, max_size=2), words),
    st.builds(
        lambda ids, r: {"prompt_token_ids": ids, "response_token_ids": r},
        *2 * [st.lists(st.integers(0, 11), max_size=9)],
    ),
)
lines = st.lists(
    st.builds(lambda r, ascii_only: json.dumps(r, ensure_ascii=ascii_only), usable | record | values, st.booleans())
    | st.text(max_size=30),
    max_size=6,
)


def as_bytes(parts):
    return "\n".join(parts).encode("utf-8", "surrogatepass")


def damaged(data, cuts):
    """Some bytes replaced or cut out."""
    body = bytearray(data)
    for at, byte in cuts:
        if body:
            at %= len(body)
            if byte is None:
                del body[at : at + 3]
            else:
                body[at] = byte
    return bytes(body)


cuts = st.lists(st.tuples(st.integers(0, 1 << 16), st.none() | st.integers(0, 255)), max_size=3)
bodies = st.builds(
    damaged, lines.map(as_bytes) | lines.map(lambda x: b"[" + b",\n".join(as_bytes([p]) for p in x) + b"]"), cuts
)
bodies = bodies | st.binary(max_size=60) | bodies.map(lambda b: b"\xef\xbb\xbf" + b.replace(b"\n", b"\r\n"))
PACKED = {"": lambda b: b, ".gz": gzip.compress, ".xz": lambda b: lzma.compress(b, preset=0),
          ".zst": lambda b: pa.Codec("zstd").compress(b, asbytes=True)}  # fmt: skip


def read(path, undecodable="refuse"):
    found, report = read_records(path, undecodable)
    assert found and report.records == len(found) == sum(report.shapes.values())
    assert all(line >= 1 and reason and reason.isprintable() for line, reason in report.skipped)
    assert report.table() is not None
    return found, report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tok")
    word_tokenizer(["<s>", "</s>", *"abcdefgh", "<unk>"], path)
    found = AutoTokenizer.from_pretrained(path)
    found.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ bos_token }}"
        "{% for m in messages %} {{ m['content'] }}{% endfor %}"
    )
    return found


@given(body=bodies, kind=st.sampled_from(records.FORMATS[:4]), packing=st.sampled_from(list(PACKED)), after=cuts,
       undecodable=st.sampled_from(["refuse", "skip"]))  # fmt: skip
@inputs("prompt files", 300)
def test_prompt_files(folder, body, kind, packing, after, undecodable):
    """Records of every shape and damage, in every text format and compression, damaged again once packed."""
    path = folder / f"p{kind}{packing}"
    path.write_bytes(damaged(PACKED[packing](body), after if packing else []))
    with refused_in_a_sentence("prompt files"):
        read(path, undecodable)


@given(
    rows=st.lists(usable | usable | record, min_size=1, max_size=5),
    chat=st.sampled_from(["template", "raw"]),
    given_text=st.booleans(),
    seed=st.integers(0, 3),
)
@inputs("chat and ids", 150)
def test_records_become_token_ids(folder, tokenizer, rows, chat, given_text, seed):
    """What is read is tokenised within the vocabulary and the length asked for, with one BOS, or skipped with a reason."""
    path = folder / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with refused_in_a_sentence("chat and ids"):
        found, report = read(path)
        options = dict(count=3, prompt_tokens=6, vocabulary=11, seed=seed, given=given_text, max_response=4, chat=chat)
        prompts = encode_prompts(found, report, tokenizer, **options)
        again = encode_prompts(found, copy.deepcopy(report), tokenizer, **options)
        assert prompts == again and len({p.id for p in prompts}) == len(prompts) <= 3
        kinds = {r.id: r.kind for r in found}
        for p in prompts:
            assert 1 <= len(p.tokens) <= 6 and all(0 <= t < 11 for t in (*p.tokens, *(p.response or ())))
            if kinds.get(p.id, "prompt_token_ids") != "prompt_token_ids":
                assert p.tokens[0] == 0 and p.tokens[1:2] != (0,)
            assert not given_text or 2 <= len(p.response) <= 4


@given(rows=st.lists(st.fixed_dictionaries({}, optional={"prompt": st.text(max_size=5), "prompt_token_ids": st.lists(
    st.integers(-1, 9), max_size=3), "group": st.text(max_size=2)}), max_size=4), after=cuts)  # fmt: skip
@inputs("parquet", 60)
def test_parquet_files(folder, rows, after):
    """Parquet files, whole and damaged."""
    path = folder / "p.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    path.write_bytes(damaged(path.read_bytes(), after))
    with refused_in_a_sentence("parquet"):
        read(path)


# ----------------------------------------------------------------------------------------------------- configurations

names = st.sampled_from([n for n in StudyConfig.model_fields if not n.endswith("sha256")])
settings_given = (
    values | st.integers(-2, 70) | st.sampled_from(["same", "both", "fp8", "measured", "roofline:h100", "cpu", (1, 8)])
)


@given(options=st.dictionaries(names, settings_given, max_size=3))
@inputs("options", 200)
def test_options(options):
    """Options of every type: a configuration, or the option's name and what is wrong with it."""
    with refused_in_a_sentence("options"):
        config = make_config(**options)
        assert config.current_k <= config.k_max and StudyConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model directory, its config.json as parsed, and a copy to break."""
    path = save_model(tmp_path_factory.mktemp("m") / "m", tie_word_embeddings=False)
    spoiled = shutil.copytree(path, path.parent / "spoiled")
    return spoiled, json.loads((path / "config.json").read_text())


numbers = st.sampled_from([0, -1, 1, 2, 3, 7, 1 << 20, 1 << 40, 0.5, None, "8", True])
strange = st.dictionaries(
    st.sampled_from(["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size",
                     "intermediate_size", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "dtype",
                     "torch_dtype", "quantization_config", "layer_types", "text_config", "model_type", "architectures",
                     "tie_word_embeddings", "sliding_window", "auto_map", "kv_lora_rank", "hidden_act", "rms_norm_eps",
                     "eos_token_id", "bos_token_id", "pad_token_id", "transformers_weights", "is_encoder_decoder"]),
    numbers | values
    | st.sampled_from(["llama", "qwen3", "t5", "mamba", "gpt2", "fp8", {"quant_method": "gptq"}, {"rope_type": "yarn"}]),
    min_size=1, max_size=3,
)  # fmt: skip


def spoil(model, changes):
    path, config = model
    (path / "config.json").write_text(json.dumps(config | changes))
    return str(path)


@given(changes=strange)
@inputs("config.json", 100)
def test_model_configurations(model, changes):
    """config.json with keys of wrong types and sizes: geometry that holds together, or the reason it cannot be used."""
    with refused_in_a_sentence("config.json"):
        g = examine(spoil(model, changes)).geometry
        assert min(g.layers, g.heads, g.kv_heads, g.head_dim, g.hidden, g.vocab, g.max_positions) > 0
        assert g.heads % g.kv_heads == 0


@given(changes=strange)
@inputs("loading", 25)
def test_loading_with_strange_configurations(model, changes):
    """The same through loading: sizes that contradict the weights allocate nothing large and end in a sentence."""
    with refused_in_a_sentence("loading"):
        load(spoil(model, changes))


# ------------------------------------------------------------------------------------------------ safetensors headers

sizes = st.integers(-1, 5) | st.sampled_from([1 << 31, 1 << 63, 1.5, None, "4", True])
entry = st.fixed_dictionaries(
    {}, optional={"dtype": st.sampled_from([*BITS, "Q4", 3]), "shape": st.lists(sizes, max_size=3) | values,
                  "data_offsets": st.lists(sizes, min_size=2, max_size=2) | values, "more": scalars})  # fmt: skip
good = st.lists(
    st.tuples(st.sampled_from(["F32", "BF16", "I8", "F64", "BOOL"]), st.lists(st.integers(0, 3), max_size=3)),
    max_size=4,
)


def well_formed(shapes):
    """A header of consecutive tensors and as many bytes as it wants."""
    at, out = 0, {}
    for i, (dtype, shape) in enumerate(shapes):
        size = BITS[dtype] // 8
        for n in shape:
            size *= n
        out[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return out, b"\1" * at


@given(header=good.map(well_formed) | st.tuples(st.dictionaries(words, entry | values, max_size=3), st.binary(max_size=16)),
       after=cuts, pad=st.integers(0, 9), length=st.none() | st.integers(0, 1 << 64))  # fmt: skip
@inputs("headers", 300)
def test_safetensors_headers(folder, header, after, pad, length):
    """Headers and files, whole and damaged: what read_header accepts, the safetensors library opens with the same shapes,
    and what the library opens read_header accepts."""
    path = folder / "x.safetensors"
    text = json.dumps(header[0]).encode() + b" " * pad
    size = len(text) if length is None else length % (1 << 64)
    path.write_bytes(damaged(size.to_bytes(8, "little") + text + header[1], after))
    try:
        with safe_open(path, framework="np") as file:
            library = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, OverflowError):
        library = None
    ours = None
    with refused_in_a_sentence("headers"):
        ours = {n: t.shape for n, t in read_header(path).items()}
        ignored_scales(Checkpoint(folder, {}, (path,), read_header(path)))  # names of any kind
    assert ours == library


@given(
    table=st.dictionaries(
        words,
        st.sampled_from(["x.safetensors", "../x.safetensors", "y.bin", "model-00001-of-00002.safetensors"]) | values,
    )
)
@inputs("headers", 50)
def test_indices(folder, table):
    """An index of any content leads to files beside it or to a sentence."""
    path = folder / "indexed"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "x.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with refused_in_a_sentence("headers"):
        assert {f.parent for f in open_checkpoint(path).files} == {path}


# -------------------------------------------------------------------------------------------------------- metrics text

counts = st.integers(0, 300) | st.sampled_from(["NaN", "+Inf", "-1", "1e9", "6.5e+06", "0.5", "", "x"])
ENGINES = ('engine="0",model_name="m"', 'engine="1",model_name="m"')
NAMES = [f"{PREFIX}{name}_total" for name in (*COUNTERS, PER_POSITION)]
labels = st.sampled_from(
    [
        *(f"{{{e}}}" for e in ENGINES),
        *(f'{{{ENGINES[0]},position="{p}"}}' for p in "01x"),
        "",
        "{",
        '{position="0"}',
        '{a="\\"}',
    ]
)
metric = st.builds(
    lambda name, label, value, end: f"{name}{label} {value}{end}",
    st.sampled_from([*NAMES, NAMES[0][:-6] + "_created"]),
    labels,
    counts,
    st.sampled_from(["", " 1700000000", " # {", "\r"]),
)
whole_page = st.builds(
    lambda d, k, a: [f"{n} {v}" for n, v in zip(NAMES, (d, d * k, min(a, d * k)), strict=False)],
    st.integers(0, 50), st.integers(0, 5), st.integers(0, 99),
)  # fmt: skip
pages = st.builds(
    lambda a, b: "\n".join([*a, *b]), whole_page | st.just([]), st.lists(metric | st.text(max_size=20), max_size=4)
)


@given(before=pages, after=st.none() | pages)
@inputs("metrics", 300)
def test_metrics_pages(folder, before, after):
    """Pages of any text: rates within their ranges, or a sentence; never a negative or infinite rate, never a traceback."""
    paths = [folder / "before", folder / "after"]
    for path, text in zip(paths, (before, after), strict=True):
        path.write_bytes((text or "").encode("utf-8", "surrogatepass"))
    with refused_in_a_sentence("metrics"):
        found = summarise(metrics.read(paths[: 1 if after is None else 2]))
        block = json.loads(json.dumps(found, allow_nan=False))
        if block["drafts"]:
            survival = [x["value"] for x in block["marginal_survival"]]
            assert 0 <= block["acceptance_rate"] <= 1 and block["mean_emitted"]["value"] >= 1
            assert all(1 >= a >= b >= 0 for a, b in zip(survival, survival[1:], strict=False))
