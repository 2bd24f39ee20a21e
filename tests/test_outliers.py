"""Key outlier channels: a stress that leaves the BF16 model unchanged, what formats lose by it, and the verdict."""

import numpy as np
import pytest
import torch
from conftest import save_model
from test_replay import mus, setting, texts_of
from test_study import strict_json

from specq import pairs
from specq.acceptance import Rule
from specq.command import resolve
from specq.kv import get_format
from specq.kv.calibration import KVRange, measure_range
from specq.models.loading import load
from specq.models.vocabulary import check_pair
from specq.outliers import OUTLIER_RATIO, find_outliers
from specq.progress import Reporter
from specq.prompts import encode_prompts, read_records
from specq.replay import Arm, Setting, score_texts
from specq.sampling import Transform
from specq.study import run_study
from specq.texts import sample_texts
from studies.common.stress import CHANNELS, HEAD, add_outliers

BF16 = get_format("bf16")
TENSOR, TOKEN, CHANNEL = "int8_per_tensor", "int8_per_token_head", "int8_per_channel"


@pytest.fixture(scope="module")
def stressed(tiny_pair):
    """{factor: (columns per arm, mu shift per arm, outliers)} of the embedded pair."""
    draft = tiny_pair[1]
    target = load(pairs.locate(pairs.find("tiny", None, None))[0])
    records, report = read_records(pairs.DEFAULT_PROMPTS)
    vocabulary = check_pair(target, draft)
    prompts = encode_prompts(
        records, report, target.tokenizer, count=16, prompt_tokens=48, vocabulary=vocabulary.size, seed=0
    )
    texts = sample_texts(
        target,
        prompts[:8],
        BF16,
        transform=Transform(),
        vocabulary=vocabulary.size,
        max_tokens=64,
        seed=0,
        arm="bf16+bf16",
    )
    out, before = {}, 1
    for factor in (1, 8, 64, 512):
        add_outliers(target, factor / before)
        before = factor
        ranges = measure_range(target, [p.tokens for p in prompts[8:]])
        formats = [get_format(n) for n in (TENSOR, TOKEN, CHANNEL)]
        scales = {("target", f.name): ranges.scales(f) for f in formats if f.static_parts}
        how = Setting(Transform(), Transform(), Rule(), vocabulary, 0, scales)
        result = score_texts(target, draft, texts, [Arm.of(f, BF16) for f in (BF16, *formats)], how)
        done = mus(result, texts, k_max=4)
        columns = {name: arm.columns for name, arm in result.arms.items()}
        shifts = {f.name: done.shift(f"{f.name}+bf16", 4).value for f in formats}
        out[factor] = columns, shifts, find_outliers(result.ranges["target"])
    return out


def mean(columns, fmt, name):
    return float(columns[f"{fmt}+bf16"][name].mean())


@pytest.mark.parametrize("factor", [8, 64, 512])
def test_outlier_stress_costs_coarse_scales(stressed, factor):
    """The BF16 model is unchanged to the bit; per-tensor INT8 drifts farthest from it, per-token-head less, and per-channel,
    whose scales follow the channels, is what it was without outliers."""
    before, after = stressed[1][0], stressed[factor][0]
    for name in ("logp", "logq", "alpha"):
        assert np.array_equal(after["bf16+bf16"][name], before["bf16+bf16"][name])
        assert np.allclose(after[f"{CHANNEL}+bf16"][name], before[f"{CHANNEL}+bf16"][name], atol=1e-6)
    added = {f: mean(after, f, "kl") - mean(before, f, "kl") for f in (TENSOR, TOKEN, CHANNEL)}
    assert added[TENSOR] > 1.3 * added[TOKEN] > 0 and abs(added[CHANNEL]) < 1e-6
    if factor > 8:
        lost = {f: mean(before, f, "alpha") - mean(after, f, "alpha") for f in (TENSOR, TOKEN, CHANNEL)}
        assert lost[TENSOR] > max(lost[TOKEN], 0) and lost[TOKEN] > lost[CHANNEL] - 1e-6
        assert stressed[factor][1][TENSOR] < stressed[factor][1][TOKEN] < stressed[factor][1][CHANNEL]


@pytest.mark.parametrize("factor", [64, 512])
def test_outliers_are_named_by_layer_head_and_channel(stressed, factor):
    """Exactly the scaled channels are found, with their layer, head, channel and ratio; none without the stress."""
    assert stressed[1][2] == []
    found = stressed[factor][2]
    expected = {(layer, HEAD, c + o) for layer in range(12) for c in CHANNELS for o in (0, 32)}
    assert {(o.layer, o.head, o.channel) for o in found} == expected
    assert all(o.ratio > OUTLIER_RATIO for o in found) and found[0].ratio > factor / 2
    assert [o.ratio for o in found] == sorted((o.ratio for o in found), reverse=True)


def test_the_verdict_fires(tmp_path):
    """A whole study of the stressed pair: kv_outliers fires for formats whose K shares a scale, naming layers and channels, and
    not for a scale per channel; per-tensor INT8 loses acceptance significantly."""
    target = load(pairs.locate(pairs.find("tiny", None, None))[0])
    add_outliers(target, 64)
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    names = ("pair", "target", "draft", "cost", "current_k")
    given = dict.fromkeys(names) | {
        "pair": "tiny", "target": str(tmp_path / "target"), "cost": "roofline:h100", "num_prompts": 12,
        "prompt_tokens": 48, "output_tokens": 48, "k_max": 4,
    }  # fmt: skip
    config, directories = resolve(given, [TENSOR, "fp8", CHANNEL])
    study = run_study(config, directories, tmp_path / "out", False, Reporter(quiet=True))
    by_format = {n: {v.code: v for v in r.verdicts} for n, r in study.recommendations.items()}
    assert "kv_outliers" in by_format[TENSOR] and "kv_outliers" in by_format["fp8_e4m3"]
    assert "kv_outliers" not in by_format[CHANNEL]
    said = by_format[TENSOR]["kv_outliers"]
    assert "head 0 channel" in said.evidence and "layer " in said.evidence and "int8_per_channel" in said.decision
    found = strict_json(tmp_path / "out" / "study.json")["key_outliers"]
    assert {(o["layer"], o["channel"]) for o in found} == {
        (i, c + o) for i in range(12) for c in CHANNELS for o in (0, 32)
    }
    shift = study.recommendations[TENSOR].mu_shift
    assert shift.value < -0.01 and shift.value < study.recommendations[CHANNEL].mu_shift.value


def test_q11_a_key_bias_spoils_per_tensor_scales(tmp_path):
    """Q-11: Qwen2 with k_proj bias 300 in one channel of one layer, drafting for itself: per-tensor INT8 loses the other
    channels (KL ten times that of a scale per channel, mu), per channel recovers them; layer, channel and ratio are named."""
    target, draft = (load(str(save_model(tmp_path / n, "qwen2", seed=1, scale=2.0))) for n in "td")
    with torch.no_grad():
        for model in (target, draft):
            model.model.model.layers[1].self_attn.k_proj.bias[3] = 300.0  # KV head 0; RoPE shares it with channel 7
    texts = texts_of(target, n=8, tokens=60)
    ranges = measure_range(target, [t.tokens for t in texts_of(target, n=8, tokens=60, seed=1)])
    formats = [get_format(n) for n in (TENSOR, CHANNEL)]
    scales = {("target", f.name): ranges.scales(f) for f in formats}
    result = score_texts(target, draft, texts, [Arm.of(BF16, BF16), *(Arm.of(f, BF16) for f in formats)],
                         setting(scales=scales))  # fmt: skip
    done = mus(result, texts, k_max=4)
    columns = {name: arm.columns for name, arm in result.arms.items()}
    found = find_outliers(result.ranges["target"])
    assert {(o.layer, o.head, o.channel) for o in found} == {(1, 0, 3), (1, 0, 7)}
    assert str(found[0]).startswith("layer 1 head 0 channel 3 (") and found[0].ratio > 50
    assert mean(columns, TENSOR, "kl") > 8 * mean(columns, CHANNEL, "kl")
    tensor, channel = (done.shift(f"{n}+bf16", 4).value for n in (TENSOR, CHANNEL))
    assert tensor < -0.5 and tensor < 2.5 * channel


def test_zeros_and_equal_channels_are_no_outliers():
    """A head of zeros has no outlier and no 0/0; channels of one size have none."""
    k = torch.zeros(1, 2, 1, 8)
    k[0, 1] = 3.0
    assert find_outliers(KVRange([k], [k])) == []
    k[0, 1, 0, 2] = 3.0 * OUTLIER_RATIO + 1
    assert [(o.layer, o.head, o.channel) for o in find_outliers(KVRange([k], [k]))] == [(0, 1, 2)]
