"""What fits: the figures worked out by hand, windows, latents, replication, and the answers in words."""

import json

import pytest
from conftest import CONFIGS, edit_json, save_model
from test_cli import run
from transformers import DeepseekV3Config, Gemma3nTextConfig, Llama4TextConfig, MixtralConfig, Qwen3NextConfig

from specq import pairs
from specq.capacity import Load, Server, explain, gigabytes, report
from specq.cost.gpus import get_gpu
from specq.errors import SpecqError
from specq.kv import FORMATS, get_format
from specq.shape import ModelShape, attention_layers, bytes_per_weight, shape_of, shape_of_source

BF16, FP8, INT8 = (get_format(n) for n in ("bf16", "fp8", "int8"))
LLAMA_70B = ModelShape.of_registered(pairs.find("llama70b-1b", None, None).target.shape)
LLAMA_1B = ModelShape.of_registered(pairs.find("llama70b-1b", None, None).draft.shape)
EIGHT = Server("h100", 8, get_gpu("h100").memory)


@pytest.mark.parametrize(("tokens", "says"), [(4096, "1.34 GB"), (32768, "10.74 GB"), (131072, "42.9 GB")])
def test_one_sequence_of_a_70b_llama(tokens, says):
    """2 x 80 layers x 8 heads x 128 x tokens x 2 bytes; FP8 takes exactly half, the scales of int8 apart."""
    codes, scales = LLAMA_70B.kv_bytes(BF16, tokens)
    assert (codes, scales) == (2 * 80 * 8 * 128 * tokens * 2, 0) and gigabytes(codes) == says
    assert LLAMA_70B.kv_bytes(FP8, tokens) == (codes // 2, 0)
    assert LLAMA_70B.kv_bytes(INT8, tokens) == (codes // 2, 2 * 80 * 8 * tokens * 4)


def test_200_sequences_of_32k_on_8_h100():
    """What does not fit, and which format and context would: sums redone here by hand."""
    found = report(Load(LLAMA_70B, LLAMA_1B), (BF16, FP8, INT8), 32768, EIGHT, 200)
    free = 1e9 * (80 * 0.92 - 3) - 2 * (70553706496 + 1235814400) / 8
    for row, each in zip(found.rows, (4, 2, 2 + 8 / 128), strict=True):  # bytes per K and V element pair, scales spread
        per_token = (80 * 128 * each) + 16 * 64 * 4  # one of the 8 KV heads per GPU; the draft's cache is BF16
        assert row.per_gpu == per_token * 32768
        assert row.fit == int(free // row.per_gpu) < 200
        assert row.longest == int(free // (200 * per_token))
    assert [r.fit for r in found.rows] == [35, 65, 63]
    text = "\n".join(explain(found))
    assert "200 sequences of 32,768 tokens fit in no format; nearest: fp8_e4m3" in text
    assert (
        "bf16: 2,362 GB of KV cache (target and draft) over all GPUs, does not fit; 35 do, or 200 fit up to 5,843"
        in text
    )
    small = report(Load(LLAMA_70B, LLAMA_1B), (BF16, FP8), 8192, EIGHT, 200)
    assert explain(small)[1] == "200 sequences of 8,192 tokens fit in fp8_e4m3"


def test_the_longest_context_is_the_last_that_fits():
    """At the longest context the sequences fit, at one token more they do not; the model's own limit caps it."""
    load = Load(
        ModelShape(
            weights=10**9, layers=((None, 10), (1000, 30)), heads=8, kv_heads=4, head_dim=64, hidden=512, vocab=9
        )
    )
    server = Server("x", 2, 8.0)
    for fmt in (BF16, INT8):
        longest = load.longest(fmt, 50, server)
        assert load.sequences(fmt, longest, server) >= 50 > load.sequences(fmt, longest + 1, server)
    assert load.longest(BF16, 10**9, server) == 0
    limited = Load(ModelShape.of_registered(pairs.find("tiny", None, None).target.shape))
    assert limited.longest(BF16, 1, server) == 8192


def test_windows_cap_their_layers():
    """A layer of window w keeps min(tokens, w); layers that share another's K and V keep none; states are refused."""
    shape = ModelShape(weights=1, layers=((None, 2), (512, 4)), heads=4, kv_heads=2, head_dim=8, hidden=32, vocab=9)
    assert shape.kept(100) == 600 and shape.kept(1000) == 2 * 1000 + 4 * 512
    assert sum(shape.kv_bytes(BF16, 1000)) == (2 * 1000 + 4 * 512) * 2 * 2 * 8 * 2
    assert attention_layers(CONFIGS["gemma2"]()) == ((6, 1), (None, 1))
    assert attention_layers(CONFIGS["mistral"]()) == ((6, 2),)
    assert attention_layers(CONFIGS["llama"]()) == attention_layers(CONFIGS["gpt2"]()) == ((None, 2),)
    nano = Gemma3nTextConfig()
    kept = sum(n for _, n in attention_layers(nano))
    assert kept == nano.num_hidden_layers - nano.num_kv_shared_layers
    assert dict(attention_layers(Llama4TextConfig(num_hidden_layers=4)))[8192] == 3
    with pytest.raises(SpecqError, match="linear_attention keep no K and V"):
        attention_layers(Qwen3NextConfig())


def test_q28_a_latent_cache_is_one_vector_per_token():
    """Q-28: kv_lora_rank + rope part, whole on every GPU, never K and V per head; per-head formats are refused."""
    shape = shape_of(DeepseekV3Config(), [("w", 10)])
    assert shape.latent == 512 + 64 and shape.kv_bytes(BF16, 1000) == (61 * 1000 * 576 * 2, 0)
    assert shape.kv_bytes(FP8, 1000, gpus=8) == shape.kv_bytes(FP8, 1000) == (61 * 1000 * 576, 0)
    with pytest.raises(SpecqError, match="a latent .MLA. cache has no such heads"):
        shape.kv_bytes(INT8, 1000)
    rows = report(Load(shape), (BF16, INT8), 1000, None, None).rows
    assert rows[0].target_codes and "MLA" in rows[1].refused


def test_kv_heads_are_replicated_beyond_their_number():
    """8 KV heads: 1 each on 8 GPUs, whole ones twice on 16; heads that do not divide are refused."""
    alone = sum(LLAMA_70B.kv_bytes(BF16, 64))
    assert [sum(LLAMA_70B.kv_bytes(BF16, 64, n)) * n / alone for n in (1, 2, 4, 8, 16, 32)] == [1, 1, 1, 1, 2, 4]
    assert not LLAMA_70B.splits(3) and not LLAMA_70B.splits(128) and LLAMA_70B.splits(16)
    with pytest.raises(SpecqError, match="64 heads with 8 KV heads cannot be divided over 3"):
        report(Load(LLAMA_70B), (BF16,), 64, Server("x", 3, 80), None)


def test_a_draft_that_does_not_divide_sits_on_one_gpu():
    """14 heads (a 0.5B Qwen) beside a target over 8: the fullest GPU holds all of the draft's weights and cache."""
    draft = ModelShape.of_registered(pairs.find("qwen2.5-72b-0.5b", None, None).draft.shape)
    load = Load(LLAMA_70B, draft)
    assert load.weights_bytes(8) == LLAMA_70B.resident_bytes / 8 + draft.resident_bytes
    assert sum(load.sequence_bytes(BF16, 10, 8)) == sum(LLAMA_70B.kv_bytes(BF16, 10, 8)) + sum(draft.kv_bytes(BF16, 10))


def test_a_draft_that_is_the_target_lies_in_memory_once():
    """--draft self: two caches, one set of weights; --draft ngram and the pair that registers it: no draft at all."""
    load = Load(LLAMA_70B, LLAMA_70B, shared=True)
    assert load.weights_bytes(8) == LLAMA_70B.resident_bytes / 8
    assert sum(load.sequence_bytes(FP8, 10, 8)) == sum(LLAMA_70B.kv_bytes(FP8, 10, 8)) + sum(
        LLAMA_70B.kv_bytes(BF16, 10, 8)
    )
    shown = {
        args: json.loads(run("capacity", "--pair", *args, "--json").stdout)
        for args in (("llama70b-1b", "--draft", "self", "--gpus", "8xh100"), ("gemma270m-ngram", "--gpus", "h100"))
    }
    own, lookup = shown.values()
    assert own["server"]["weights_bytes"] == LLAMA_70B.resident_bytes and own["draft"] == own["target"]
    assert lookup["draft"] is None and lookup["formats"][0]["fit"] > 0


def test_a_registered_model_keeps_its_windows():
    """Gemma 3 270M: 15 of 18 layers keep 512 tokens; 32,768 of them take 2 x (3 x 32768 + 15 x 512) x 256 x 2 bytes."""
    shape = pairs.find("gemma270m-ngram", None, None).target.shape
    kept = 3 * 32768 + 15 * 512
    assert ModelShape.of_registered(shape).kept(32768) == kept
    assert sum(ModelShape.of_registered(shape).kv_bytes(BF16, 32768)) == shape.kv_bytes(32768) == 2 * kept * 256 * 2
    from specq.models.config import config_of_side

    built = attention_layers(config_of_side(pairs.find("gemma270m-ngram", None, None).target))
    assert dict(built) == dict(shape.layer_windows)


def test_weights_that_do_not_fit_are_said():
    """A 70B model on one H100: nothing fits, and the reason is the weights."""
    found = report(Load(LLAMA_70B), FORMATS, 1024, Server("h100", 1, 80), 4)
    assert all(r.fit == 0 and r.longest == 0 for r in found.rows)
    weights = "1 x h100 do not hold the weights: weights 141.1 GB, 141.1 GB on the fullest GPU"
    assert explain(found) == [f"{weights}, of which 70.6 GB can be used"]


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_shapes_of_model_directories(tmp_path, kind):
    """From config.json alone, the parameters that the saved model really has, for every architecture of the tests."""
    path = save_model(tmp_path / kind, kind)
    saved = sum(t.numel() for t in _tensors(path))
    (path / "model.safetensors").unlink()
    shape = shape_of_source(str(path))
    assert shape.weights == saved and shape.weight_bytes == 2
    tied = json.loads((path / "config.json").read_text()).get("tie_word_embeddings")
    assert shape.table == (0 if tied or kind == "gpt2" else shape.vocab * shape.hidden)


def _tensors(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors").values()


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, 2.0),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, 0.5),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
    ],
)
def test_bytes_per_weight(stated, expected):
    """As the checkpoint's quantization_config says; BF16 otherwise."""
    config = CONFIGS["llama"]()
    if stated:
        config.quantization_config = stated
    assert bytes_per_weight(config) == expected


def test_experts_are_read_as_far_as_tokens_reach_them():
    """Mixture of experts: one token reads k of E, many tokens all; arithmetic is always k of E."""
    config = MixtralConfig(num_local_experts=8, num_experts_per_tok=2)
    shape = shape_of(config, [("model.layers.0.mlp.experts.gate_up_proj", 800), ("other", 100)])
    assert (shape.routed, shape.experts) == (800, 8)
    dense = 100 - shape.table
    assert shape.read_weights(1) - dense == pytest.approx(200) and shape.active_weights - dense == pytest.approx(200)
    assert shape.read_weights(2) - dense == pytest.approx(800 * (1 - 0.75**2))
    assert shape.read_weights(10_000) - dense == pytest.approx(800)


def test_shapes_survive_json():
    """What study.json keeps gives the same shape back."""
    shape = shape_of(CONFIGS["gemma3"](), [("w", 10)])
    assert ModelShape.from_dict(json.loads(json.dumps(shape.as_dict()))) == shape


def test_no_code_of_a_model_is_run_whoever_says_yes(tmp_path, monkeypatch):
    """A configuration that wants code of its own is refused: transformers would ask, and a `y` on stdin would run it. Nor is
    the network asked about a directory."""
    path = save_model(tmp_path / "m")
    edit_json(path / "config.json", model_type="wonder", auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"})
    (path / "m.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    monkeypatch.setattr("socket.socket.connect", lambda *to: pytest.fail(f"connects to {to}"))
    with pytest.raises(SpecqError, match="it wants to run code of its own, auto_map, which specq does not do"):
        shape_of_source(str(path))
    assert not (tmp_path / "ran").exists()


def test_the_command_answers_and_refuses(tmp_path):
    """Tables and JSON for a registered pair and for a bare config.json; bad input is one sentence and exit code 2."""
    out = run("capacity", "--pair", "llama70b-1b", "--gpus", "8xh100", "--sequences", "200", COLUMNS="250")
    assert out.returncode == 0, out.stderr
    assert (
        "10.74 GB" in out.stdout
        and "fit in no format; nearest: fp8_e4m3 would hold 200 of at most 10,712" in out.stdout
    )
    path = save_model(tmp_path / "m", "gemma2")
    (path / "model.safetensors").unlink()
    beyond = run("capacity", "--target", path, "--context", "1000", COLUMNS="250")
    assert "one sequence of 1,000 tokens (beyond the model's 256 positions)" in beyond.stdout
    own = run("capacity", "--target", path, "--context", "100", "--dtype", "fp8", "--json")
    assert own.returncode == 0, own.stderr
    row = json.loads(own.stdout)["formats"][0]
    assert row["target_codes"] == 2 * 2 * 8 * (100 + 6) and row["fit"] is None
    edit_json(path / "config.json", kv_lora_rank=4)  # a latent is found by its key, whatever the model type
    latent = run("capacity", "--target", path, "--context", "100", "--dtype", "fp8", "--json")
    assert json.loads(latent.stdout)["formats"][0]["target_codes"] == 4 * (100 + 6)
    for args, says in (
        (["--sequences", "5"], "name the server with --gpus"),
        (["--gpus", "8xh900"], "unknown GPU 'h900'"),
        (["--gpus", "0xh100"], "at least one GPU"),
        (["--gpus", "3xh100", "--pair", "llama70b-1b"], "cannot be divided over 3"),
        (["--dtype", "fp4"], "unknown KV format"),
        (["--target", "./nowhere"], "no model directory at ./nowhere"),
        (["--context", "0"], "must be at least 1"),
        (["--memory-share", "1.2"], "--memory-share 1.2"),
        (["--weight-bytes", "0"], "--weight-bytes"),
    ):
        bad = run("capacity", *args)
        assert bad.returncode == 2 and says in bad.stderr and "Traceback" not in bad.stderr, (args, bad.stderr)


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_cut_in_a_narrow_terminal(columns):
    """Names and numbers are whole at 80 columns, where vLLM's names make room; 8 GPUs for 8 KV heads keep 1 head each."""
    asked = ["capacity", "--pair", "llama70b-1b", "--gpus", "8xh100", "--context", "32768", "--sequences", "200"]
    said = run(*asked, COLUMNS=str(columns)).stdout
    assert "…" not in said and max(map(len, said.splitlines())) <= columns
    assert "keep 1 KV head each" in " ".join(said.split())
    assert ("bfloat16" in said) == (columns > 80)
    row = next(line.split() for line in said.splitlines() if line.startswith(" int8_per_token_head "))
    assert row[-8:] == "5.54 GB 0.17 GB 0.83 GB 63 10,440".split()
