"""Model directories as users have them: what is missing, cut short or foreign is refused before anything is loaded."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import CONFIGS, FLOAT32, VOCAB, edit_json, save_model
from safetensors.torch import load_file, save_file

from specq.command import resolve
from specq.config import StudyConfig
from specq.errors import SpecqError
from specq.models.checkpoint import open_checkpoint
from specq.models.examine import examine
from specq.models.fingerprint import fingerprint
from specq.models.geometry import geometry_of
from specq.models.loading import load
from specq.models.quantization import kv_cache_format, weight_quantization
from specq.models.vocabulary import check_pair
from specq.models.weight_files import read_header


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "m", seed=3, tie_word_embeddings=False)


def rewrite(path, change):
    """Let `change` edit the weights in place."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def split(path, index=True, parts=3):
    """Turn the single weight file into shards."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, table = sorted(weights), {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        mine = {n: weights[n] for n in names[i::parts]}
        save_file(mine, path / file, metadata={"format": "pt"})
        table |= dict.fromkeys(mine, file)
    if index:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def logits(path, count=100):
    m = load(str(path))
    tokens = torch.arange(count)[None] % (VOCAB - 3) + 3
    return m.forward(tokens, m.new_cache(FLOAT32, 1, count))


def test_i12_tied_and_untied_single_files_and_shards_load_alike(tmp_path, model):
    """I-12: one file without index, shards with and without one, give the same logits; tied embeddings need no lm_head."""
    single = logits(model)
    for index in (True, False):
        sharded = shutil.copytree(model, tmp_path / f"s{index}")
        split(sharded, index)
        assert torch.equal(logits(sharded), single)
    tied = save_model(tmp_path / "tied", seed=3, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    loaded = load(str(tied)).model
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    untied = shutil.copytree(tied, tmp_path / "untied")
    edit_json(untied / "config.json", tie_word_embeddings=False)
    with pytest.raises(SpecqError, match=r"lack 1 tensors .*lm_head.weight; they would be random"):
        load(str(untied))


def test_missing_shards_and_stray_files(tmp_path, model):
    """A missing shard is named, with and without index; files that the index does not name are left alone."""
    for index in (True, False):
        path = shutil.copytree(model, tmp_path / f"s{index}")
        split(path, index)
        save_file({"model.embed_tokens.weight": torch.zeros(1)}, path / "adapter_model.safetensors")
        assert len(open_checkpoint(path).files) == 3
        (path / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(SpecqError, match="lacks 1 of 3 weight files: model-00002-of-00003"):
            open_checkpoint(path)
    path = shutil.copytree(model, tmp_path / "twice")
    split(path, index=False, parts=2)
    shutil.copy(path / "model-00001-of-00002.safetensors", path / "model-00001-of-00003.safetensors")
    with pytest.raises(SpecqError, match="shards of several checkpoints"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"weight_map": {"a": "../../etc/passwd"}}, "no file beside it"),
        ({"weight_map": {"a": "x.bin"}}, "no file beside it"),
        ({"weight_map": []}, "no weight_map"),
        ([], "no JSON object"),
    ],
)
def test_an_index_cannot_lead_elsewhere(model, table, says):
    """File names of an index stay inside the directory and are safetensors."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(SpecqError, match=says):
        open_checkpoint(model)


def test_an_index_that_lies_is_refused(model):
    """A tensor that is not in the file the index names."""
    split(model)
    table = json.loads((model / "model.safetensors.index.json").read_text())
    table["weight_map"]["model.norm.weight"] = table["weight_map"]["model.embed_tokens.weight"]
    table["weight_map"]["made.up"] = table["weight_map"]["model.embed_tokens.weight"]
    (model / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(SpecqError, match="the index says that"):
        open_checkpoint(model)


def test_i15_lfs_pointers_and_truncated_files(model):
    """I-15: a 130-byte pointer "looks like a Git LFS pointer"; a file cut short anywhere is "incomplete"."""
    file = model / "model.safetensors"
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4444444444\n"
    file.write_bytes(pointer)
    with pytest.raises(SpecqError, match="looks like a Git LFS pointer"):
        load(str(model))
    for size in (0, 5, 9, 200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(SpecqError, match="incomplete"):
            load(str(model))
    for body, says in (
        (b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>", "no safetensors file"),
        (whole + b"tail", "4 bytes more than its header describes"),
        (whole[:8] + b"{]" + whole[10:], "damaged header"),
    ):
        file.write_bytes(body)
        with pytest.raises(SpecqError, match=says):
            load(str(model))


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "m.gguf"])
def test_a_pipe_in_the_place_of_weights_is_refused(tmp_path, model, name):
    """Reading a pipe would wait for ever; a directory under that name is no file either."""
    (model / "model.safetensors").unlink()
    os.mkfifo(model / name)
    if name.startswith("model-"):
        os.mkfifo(model / "model-00002-of-00002.safetensors")
    with pytest.raises(SpecqError, match=f"{name}: it is not a regular file"):
        open_checkpoint(model / name if name.endswith("gguf") else model)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(("body", "says"), [("{", "Expecting property name"), ("[1]", "it holds no JSON object")])
def test_damaged_files_beside_the_weights_are_named(model, name, body, says):
    """The file and what is wrong with it, not a library's exception."""
    (model / name).write_text(body)
    with pytest.raises(SpecqError, match=rf"{name} is damaged: {says}"):
        load(str(model))


def test_a_missing_tokenizer_and_what_libraries_mumble(model):
    """Messages that a library spreads over lines, or that are a bare key, still say what is wrong."""
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecqError, match="no usable tokenizer in .*'added_tokens' is missing or unknown"):
        load(str(model))
    (model / "tokenizer.json").unlink()
    with pytest.raises(SpecqError, match="no usable tokenizer in .*it has none of tokenizer.json"):
        load(str(model))
    edit_json(model / "config.json", num_attention_heads=3)
    with pytest.raises(SpecqError, match="hidden size .32. is not a multiple of the number of attention heads .3."):
        load(str(model))


def header(entries, data=b""):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes for shape"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "negative or broken"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "overlap or leave holes"),
        ({"dtype": "Q4_K", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype 'Q4_K'"),
        ({"shape": [1]}, "dtype"),
        ([], "damaged header"),
        ({"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}, "incomplete"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entry, says):
    """Sizes, offsets and dtypes of a header must agree with one another and with the file."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(header({"t": entry}, b"\0" * 8))
    with pytest.raises(SpecqError, match=says):
        read_header(path)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("pickle-was-loaded",))


def test_no_pickle_is_ever_loaded(tmp_path, model, monkeypatch):
    """A directory with pickles alone is refused, one with both loads safetensors, and a config that points at a pickle is
    not followed; nothing in a pickle runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "tokenizer.pkl"):
        (model / name).write_bytes(pickle.dumps(Bomb()))
    edit_json(model / "config.json", transformers_weights="adapter_model.bin")
    load(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(SpecqError, match=r"pickled weights only \(.*pytorch_model.bin.*can run code"):
        load(str(model))
    assert not (tmp_path / "pickle-was-loaded").exists()


def test_adapters_are_told_apart(model):
    """A LoRA directory is no model; an adapter_config.json beside a model does not lead to another base model."""
    (model / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "some/base", "peft_type": "LORA"})
    )
    load(str(model))
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    with pytest.raises(SpecqError, match="is an adapter"):
        load(str(model))
    (model / "config.json").unlink()
    with pytest.raises(SpecqError, match="it is an adapter"):
        load(str(model))


def test_no_remote_code_runs(tmp_path, model, monkeypatch):
    """auto_map and Python files of a checkpoint are never imported: a known model_type loads as transformers' own class,
    an unknown one is refused with that reason, and nobody is asked."""
    monkeypatch.chdir(tmp_path)
    (model / "modeling_evil.py").write_text("import os; os.mkdir('code-ran')")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_json(model / "config.json", auto_map=auto_map)
    edit_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.Tok", None]})
    load(str(model))
    edit_json(model / "config.json", model_type="evil")
    with pytest.raises(SpecqError, match="run code of its own"):
        load(str(model))
    assert not (tmp_path / "code-ran").exists()


def test_no_network_for_local_directories(tmp_path):
    """A whole study of local models opens no connection, although nothing tells the hub's client to stay offline."""
    target, draft = (save_model(tmp_path / n, seed=i) for i, n in enumerate("td"))
    (tmp_path / "p.txt").write_text("\n".join(f"w{i} w{i + 1} w{i + 2}" for i in range(3, 20)))
    code = (
        "import socket, sys\n"
        "def refuse(*a, **k): print('NETWORK', a, file=sys.stderr); raise OSError('no network in this test')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from specq.cli import main\n"
        "main()\n"
    )
    args = [
        "study",
        "--target",
        target,
        "--draft",
        draft,
        "--prompts",
        "p.txt",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "12",
    ]
    args += ["--num-prompts", "3", "--k-max", "3", "--current-k", "2", "--device", "cpu", "--out", "out", "--quiet"]
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    out = subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=tmp_path, env=environment,
                         capture_output=True, text=True)  # fmt: skip
    assert out.returncode == 0 and "NETWORK" not in out.stderr, out.stderr


def test_q07_scales_under_unknown_names_are_said(model):
    """Q-07: scale tensors that nothing maps are named in a note "scales ignored"; kv_scale stands for K and V; a scale of
    the wrong length is refused; another tower's scales are none of ours."""

    def add(**tensors):
        rewrite(model, lambda w: w.update({n.replace("__", "."): torch.tensor(v) for n, v in tensors.items()}))

    add(model__layers__0__self_attn__kv_scale=[0.5], vision_tower__layers__0__self_attn__k_scale=[9.0])
    loaded = load(str(model))
    assert (loaded.scales[0].k.item(), loaded.scales[0].v.item(), loaded.scales[0].source) == (0.5, 0.5, "checkpoint")
    assert loaded.scales[1].source == "one" and not any("ignored" in n for n in loaded.notes)
    add(model__layers__1__cache__k_scale=[0.5], model__layers__7__self_attn__v_scale=[0.5])
    notes = [n for n in load(str(model)).notes if "scales ignored" in n]
    assert len(notes) == 1 and "2 scale tensors" in notes[0] and "layers.1.cache.k_scale" in notes[0]
    add(model__layers__1__self_attn__k_scale=[0.5, 0.5, 0.5])
    with pytest.raises(SpecqError, match="3 values, neither one nor one per head"):
        load(str(model))


def test_q16_quantized_weights_run_as_they_are_or_not_at_all(model):
    """Q-16: weights that would have to be dequantized, or whose format nothing names, are refused, never read as plain
    numbers."""
    edit_json(model / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    rewrite(model, lambda w: w.update({
        "model.layers.0.mlp.up_proj.weight": w["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 2)}))  # fmt: skip
    with pytest.raises(SpecqError, match="only be run dequantized here"):
        load(str(model))
    edit_json(model / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(SpecqError, match="'modelopt', which transformers cannot run"):
        load(str(model))
    edit_json(model / "config.json", quantization_config=None)
    with pytest.raises(SpecqError, match="no quantization_config that says how"):
        load(str(model))


KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}


def options(**given):
    settings = {k: None for k in StudyConfig.model_fields if k != "dtypes" and not k.endswith("sha256")}
    return settings | {"pair": "tiny"} | given


def test_q17_auto_means_what_the_checkpoint_asks_for(tmp_path, model):
    """Q-17: kv_cache_scheme makes `auto` FP8, and that is said; BF16 stays BF16; without a scheme `auto` is BF16. Such a
    checkpoint's weights are plain and load without the quantizer's package."""
    pair = {"target": str(model), "draft": str(model)}
    assert resolve(options(**pair), ["auto"])[0].dtypes == ("bf16",)
    edit_json(model / "config.json", quantization_config=KV_ONLY)
    config, directories = resolve(options(**pair), ["auto"])
    assert config.dtypes == ("fp8_e4m3",) and directories == {"fp8_e4m3": "auto"}
    assert resolve(options(**pair), ["bf16"])[0].dtypes == ("bf16",)
    loaded = load(str(model))
    assert any("auto means that format here" in n for n in loaded.notes)
    assert kv_cache_format(loaded.checkpoint) == "fp8_e4m3" and weight_quantization(loaded.checkpoint) is None
    edit_json(model / "config.json", quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    assert kv_cache_format(load(str(model)).checkpoint) == "fp8_e4m3"


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim"])
def test_q28_latent_attention_is_refused_by_its_keys(model, key):
    """Q-28: MLA is recognised by its keys under any model_type, and refused before weights are read."""
    edit_json(model / "config.json", **{key: 64})
    (model / "model.safetensors").write_bytes(header({}))
    with pytest.raises(SpecqError, match="hold no tensor"):
        load(str(model))
    (model / "model.safetensors").write_bytes(
        header({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234")
    )
    with pytest.raises(SpecqError, match=f"latent KV attention .MLA; config.json has {key}"):
        load(str(model))


def test_other_architectures_are_refused_with_the_reason():
    """Layers without K and V, encoder-decoders, and configs without a decoder's sizes."""
    from transformers import MambaConfig, T5Config

    linear = CONFIGS["llama"]()
    linear.layer_types = ["full_attention", "linear_attention"]
    for config, says in (
        (linear, "layers of type linear_attention"),
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "layers of type linear_attention|num_attention_heads is None"),
    ):
        with pytest.raises(SpecqError, match=says):
            geometry_of(config)


def test_i16_rope_spellings_are_one(tmp_path):
    """I-16: top-level rope_theta with rope_scaling null, and rope_parameters, give the same logits at position 100;
    another theta gives others; llama3 scaling loads alike under `type` and `rope_type`."""
    base = save_model(tmp_path / "base", seed=4)
    raw = json.loads((base / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        raw.pop(key, None)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

    def at(name, **rope):
        path = shutil.copytree(base, tmp_path / name)
        (path / "config.json").write_text(json.dumps(raw | rope))
        return logits(path, 101)[0, 100]

    old = at("a", rope_theta=1e6, rope_scaling=None)
    assert torch.equal(old, at("b", rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))
    assert not torch.allclose(old, at("c", rope_theta=1e4), atol=1e-4)
    scaled = at("d", rope_theta=1e6, rope_scaling=llama3 | {"type": "llama3"})
    assert torch.equal(scaled, at("e", rope_theta=1e6, rope_scaling=llama3 | {"rope_type": "llama3"}))
    assert torch.equal(scaled, at("f", rope_parameters=llama3 | {"rope_type": "llama3", "rope_theta": 1e6}))
    assert not torch.allclose(old, scaled, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "own", "noted"),
    [
        ({"torch_dtype": "float16"}, "float16", False),
        ({"dtype": "float16"}, "float16", False),
        ({}, "float16", False),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16", True),
        ({"dtype": "bfloat16"}, "bfloat16", True),
    ],
)
def test_i18_the_stated_dtype_is_used_and_named(model, keys, own, noted):
    """I-18: `dtype`, `torch_dtype`, both or none: an FP16 checkpoint stays FP16, conflicts and FP16 served as BF16 are
    said. What computes on a CPU is float32."""
    raw = json.loads((model / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if k not in ("dtype", "torch_dtype")} | keys
    (model / "config.json").write_text(json.dumps(raw))
    rewrite(model, lambda w: w.update({n: t.half() for n, t in w.items()}))
    loaded = load(str(model))
    assert loaded.checkpoint_dtype == own and loaded.checkpoint.stored_dtype == "float16"
    assert loaded.compute_dtype == torch.float32 and bool(loaded.notes) == noted


def test_i18_an_unknown_dtype_is_refused(model):
    """A dtype that torch does not know, or an integer one, is no dtype to serve in."""
    edit_json(model / "config.json", dtype="int8")
    with pytest.raises(SpecqError, match="int8|cannot read"):
        load(str(model))


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim", "right"),
    [(5120, 32, 8, 128, 128), (2880, 64, 8, 64, 64), (4096, 32, 8, None, 128), (2560, 32, 8, None, 80)],
)
def test_i19_head_dim_is_the_configs(hidden, heads, kv_heads, head_dim, right):
    """I-19: head_dim 128 and not 160, 64 and not 45; null means division; KV bytes per token follow."""
    from transformers import LlamaConfig, Qwen3Config

    kind = LlamaConfig if head_dim is None else Qwen3Config
    g = geometry_of(kind(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
                         num_hidden_layers=3))  # fmt: skip
    from specq.kv import get_format

    assert g.head_dim == right
    assert g.kv_bytes_per_token(get_format("bf16")) == (2 * 3 * kv_heads * right * 2, 0)


def test_i19_a_wrong_head_dim_is_refused_not_run(model):
    """I-19: sizes that contradict the weights stop loading with a sentence; impossible ones stop before it."""
    edit_json(model / "config.json", head_dim=16)
    with pytest.raises(SpecqError, match=r"k_proj.weight has shape \[16, 32\], and config.json calls for \[32, 32\]"):
        load(str(model))
    for change, says in (
        ({"head_dim": None, "hidden_size": 30}, "no multiple of 4 heads|cannot read"),
        ({"num_key_value_heads": 3}, "make no attention|cannot read"),
        ({"num_hidden_layers": -2}, "num_hidden_layers is -2|cannot read"),
        ({"vocab_size": "many"}, "vocab_size is 'many'|cannot read"),
    ):
        raw = json.loads((model / "config.json").read_text())
        edit_json(model / "config.json", **({"head_dim": 8} | change))
        with pytest.raises(SpecqError, match=says):
            load(str(model))
        (model / "config.json").write_text(json.dumps(raw))


def test_pairs_are_checked_before_weights(tmp_path, model):
    """A pair of different tokenizers is refused from the directories alone: the weights are never opened."""
    other = save_model(tmp_path / "o", words=[f"w{i}" for i in range(VOCAB)])
    for path in (model, other):
        file = path / "model.safetensors"
        whole = read_header(file)
        with file.open("r+b") as f:  # data gone bad; only a load would notice
            f.seek(min(t.start for t in whole.values()))
            f.write(b"\xff" * 64)
    with pytest.raises(SpecqError, match="different tokenizers: id 0"):
        check_pair(examine(str(model)), examine(str(other)))


def test_the_fingerprint_is_of_content(tmp_path, model, monkeypatch):
    """Copies have the fingerprint of the original; changed weights, configs or templates have another, large files too."""
    from specq.models import fingerprint as module

    def of(path):
        return fingerprint(open_checkpoint(path))

    first = of(model)
    copy = shutil.copytree(model, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (0, 0))
    assert of(copy) == first
    (copy / "README.md").write_text("a card")
    assert of(copy) == first
    (copy / "chat_template.jinja").write_text("{{ 1 }}")
    assert of(copy) != first
    (copy / "chat_template.jinja").unlink()
    monkeypatch.setattr(module, "WHOLE_FILE", 1000)
    sampled = of(model)
    assert of(copy) == sampled != first
    rewrite(copy, lambda w: w["model.layers.1.mlp.up_proj.weight"].mul_(1.001))
    assert of(copy) != sampled


def test_s23_a_draft_with_too_short_a_context_is_refused(tmp_path):
    """S-23: draft positions 32, target 64: prompts of up to 40 tokens are refused before any weight is read, and so is a
    prompt of 28 with 20 new tokens, which would cross the draft's end; 12 + 20 fits."""
    from specq.inputs import load_models
    from specq.progress import Reporter

    target = save_model(tmp_path / "t", max_position_embeddings=64)
    draft = save_model(tmp_path / "d", max_position_embeddings=32)

    def run(prompt, new):
        config, _ = resolve(
            options(target=str(target), draft=str(draft), prompt_tokens=prompt, output_tokens=new), ["fp8"]
        )
        return load_models(config, Reporter(quiet=True))

    for prompt, new in ((40, 16), (28, 20)):
        with pytest.raises(SpecqError, match=f"the draft has 32 positions and the study needs {prompt + new}"):
            run(prompt, new)
    run(12, 20)
