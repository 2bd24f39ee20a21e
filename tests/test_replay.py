"""Replay on real models: exact controls, independence, bounded memory, faults that must be named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import FLOAT32, VOCAB, save_model
from torch.utils._python_dispatch import TorchDispatchMode

from specq import analysis
from specq.clock import Clock
from specq.errors import SpecqError
from specq.kv import get_format
from specq.kv.cache import LayerScales
from specq.kv.paged import Backend
from specq.models.loaded import LoadedModel
from specq.models.loading import load
from specq.models.vocabulary import Vocabulary
from specq.ngram import NgramLookup
from specq.prompts import Prompt, Text
from specq.replay import ALTERNATIVE, Arm, Room, Setting, batches, score_texts
from specq.rules import Rule, Transform
from specq.texts import sample_texts

BF16, FP8, INT8 = (get_format(n) for n in ("bf16", "fp8", "int8"))
BASE = Arm.of(BF16, BF16)
V = Vocabulary(VOCAB, VOCAB, VOCAB, VOCAB)


def setting(transform=None, **kw):
    transform = transform or Transform()
    return Setting(
        transform, kw.pop("draft_transform", transform), kw.pop("rule", Rule()), kw.pop("vocabulary", V), 0, **kw
    )


def texts_of(model, n=6, tokens=40, seed=0, transform=None):
    prompts = [Prompt(f"p{i}", f"p{i}", None, (0, *range(3 + i, 9 + 2 * i))) for i in range(n)]
    model.eos_ids = frozenset()
    return sample_texts(
        model,
        prompts,
        BF16,
        transform=transform or Transform(),
        vocabulary=VOCAB,
        max_tokens=tokens,
        seed=seed,
        arm="bf16+bf16",
    )


def mus(result, texts, base="bf16+bf16", rule=None, k_max=8):
    columns = {n: s.columns for n, s in result.arms.items()}
    return analysis.analyse(texts, columns, base, rule or Rule(), k_max, seed=0, draws=50)


SELF_DRAFTS = [
    (Transform(), Rule()),
    (Transform(0.7, 5, 0.8), Rule()),
    (Transform(0.0), Rule()),
    (Transform(0.0), Rule("greedy")),
    (Transform(0.0), Rule("probabilistic", "strict")),
]


@pytest.mark.parametrize(("transform", "rule"), SELF_DRAFTS, ids=str)
def test_self_draft_accepts_everything(small_pair, transform, rule):
    """Check 1: a float32 target drafting for itself accepts exactly 100 % at every position and K; emitted is K + 1."""
    target, _ = small_pair
    texts = texts_of(target, tokens=1 + 5 * 6, transform=transform)
    result = score_texts(target, target, texts, [Arm.of(FLOAT32, FLOAT32)], setting(transform, rule=rule))
    columns = result.arms["float32+float32"].columns
    assert (columns["alpha"] == 1).all() and (columns["ratio"] == 1).all()
    done = mus(result, texts, "float32+float32", rule)
    for k in (1, 2, 4, 5):  # K + 1 divides the 30 positions
        assert done.arms["float32+float32"].emitted(k) == k + 1


def test_identity_quantization_shifts_nothing(tmp_path):
    """Check 2: K and V that every format represents exactly (0, and eighths up to 2 from a bias) give a shift of
    exactly 0, FP8 at scale 1 included, through the whole path."""
    path = save_model(tmp_path / "t", seed=1, attention_bias=True)
    target, draft = load(str(path)), load(str(save_model(tmp_path / "d", seed=2)))
    with torch.no_grad():
        for layer in target.model.model.layers:
            for name in ("k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight.zero_()
                getattr(layer.self_attn, name).bias.zero_()
            layer.self_attn.v_proj.bias.copy_(torch.arange(16) / 8.0)
    texts = texts_of(target)
    arms = [BASE, Arm.of(FP8, BF16), Arm.of(get_format("fp8_e5m2"), BF16), Arm.of(BF16, BF16, name="again")]
    result = score_texts(target, draft, texts, arms, setting(round_query=lambda f: f.rounds_query))
    done = mus(result, texts)
    for arm in ("fp8_e4m3+bf16", "again"):
        for k in (1, 4, 8):
            shift = done.shift(arm, k)
            assert (shift.value, shift.se, shift.lo, shift.hi) == (0.0, 0.0, 0.0, 0.0)
        assert (result.arms[arm].columns["kl"] == 0).all()


def test_q15_only_the_quantized_side_moves(small_pair):
    """Q-15: with the draft alone quantized the target's p is bit-identical, with the target alone the draft's q is."""
    target, draft = small_pair
    texts = texts_of(target)
    arms = [BASE, Arm.of(BF16, FP8), Arm.of(FP8, BF16), Arm.of(FP8, FP8)]
    r = {n: s.columns for n, s in score_texts(target, draft, texts, arms, setting()).arms.items()}
    base = r["bf16+bf16"]
    assert np.array_equal(r["bf16+fp8_e4m3"]["logp"], base["logp"]) and not np.array_equal(
        r["bf16+fp8_e4m3"]["logq"], base["logq"]
    )
    assert np.array_equal(r["fp8_e4m3+bf16"]["logq"], base["logq"]) and not np.array_equal(
        r["fp8_e4m3+bf16"]["logp"], base["logp"]
    )
    assert np.array_equal(r["fp8_e4m3+fp8_e4m3"]["logp"], r["fp8_e4m3+bf16"]["logp"])
    assert np.array_equal(r["fp8_e4m3+fp8_e4m3"]["logq"], r["bf16+fp8_e4m3"]["logq"])


def test_scores_do_not_depend_on_company_or_order(small_pair):
    """Check 4: a text's columns are bit-identical alone, among others, in another order, and with more arms beside it."""
    target, draft = small_pair
    texts = texts_of(target)
    all_arms = [BASE, Arm.of(INT8, BF16), Arm.of(FP8, FP8)]
    whole = score_texts(target, draft, texts, all_arms, setting())
    turned = score_texts(target, draft, texts[::-1], [BASE, Arm.of(FP8, FP8)], setting())
    alone = score_texts(target, draft, texts[2:3], [BASE, Arm.of(FP8, FP8)], setting())
    at, n = sum(t.positions for t in texts[:2]), texts[2].positions
    back = sum(t.positions for t in texts[::-1][:3])
    for arm in ("bf16+bf16", "fp8_e4m3+fp8_e4m3"):
        for name, column in alone.arms[arm].columns.items():
            assert np.array_equal(column, whole.arms[arm].columns[name][at : at + n]), name
            assert np.array_equal(column, turned.arms[arm].columns[name][back : back + n]), name


def test_columns_equal_a_plain_forward_pass(small_pair):
    """logp and logq of the text's tokens equal those of an ordinary no-cache forward pass (float32 storage)."""
    target, draft = small_pair
    texts = texts_of(target, n=2)
    columns = score_texts(target, draft, texts, [Arm.of(FLOAT32, FLOAT32)], setting()).arms["float32+float32"].columns
    at = 0
    for t in texts:
        ids, start = torch.tensor([t.tokens]), len(t.prompt.tokens)
        for model, name in ((target, "logp"), (draft, "logq")):
            logits = model.forward(ids, model.new_cache(FLOAT32, 1, ids.shape[1]))[0, start : start + t.positions]
            expected = logits.log_softmax(-1).gather(-1, ids[0, start + 1 :, None])[:, 0]
            assert np.allclose(columns[name][at : at + t.positions], expected.numpy(), atol=2e-5)
        at += t.positions


def test_the_null_arm_is_another_order_and_nearly_the_same(small_pair):
    """The null arm computes the same thing in another order: not bit-equal, and far closer than any 8-bit format."""
    target, draft = small_pair
    texts = texts_of(target, n=4, tokens=120)
    arms = [BASE, Arm.of(BF16, BF16, ALTERNATIVE, "null"), Arm.of(INT8, BF16)]
    r = {n: s.columns for n, s in score_texts(target, draft, texts, arms, setting()).arms.items()}
    gap = {n: np.abs(r[n]["logp"] - r["bf16+bf16"]["logp"]) for n in ("null", "int8_per_token_head+bf16")}
    assert gap["null"].max() > 0
    assert gap["null"].mean() < 0.2 * gap["int8_per_token_head+bf16"].mean()


@pytest.mark.parametrize("t", [Transform(0.0), Transform(1.0, 3), Transform(0.5, 0, 0.6)], ids=str)
def test_truncated_and_greedy_sampling_give_no_nan(small_pair, t):
    """Tokens outside an arm's support and flips at T = 0 give finite a, b, ratios and shifts."""
    target, draft = small_pair
    texts = texts_of(target, transform=t)
    result = score_texts(target, draft, texts, [BASE, Arm.of(FP8, BF16)], setting(t))
    for arm in result.arms.values():
        for name in ("alpha", "ratio", "alpha_greedy", "alpha_strict", "entropy"):
            assert np.isfinite(arm.columns[name]).all(), name
    for rule in (Rule(), Rule("greedy"), Rule("probabilistic", "strict")):
        done = mus(result, texts, rule=rule)
        assert np.isfinite(done.arms["fp8_e4m3+bf16"].b).all() and np.isfinite(done.shift("fp8_e4m3+bf16", 4).value)


@pytest.mark.parametrize("who", ["target", "draft"])
def test_s09_nan_logits_stop_with_prompt_and_position(small_pair, who):
    """S-09: a NaN row at one position stops the study, naming the model, the prompt and the response position."""
    target, draft = small_pair
    texts = texts_of(target, n=3)
    broken = {"target": target, "draft": draft}[who]
    where = (len(texts[1].prompt.tokens), 7)  # the prompt's tokens, then the 7th scored position

    forward = broken.forward
    seen = {"texts": 0}

    def poisoned(tokens, cache, counts=None, keep=0):
        logits = forward(tokens, cache, counts, keep)
        if (
            keep == 0
            and texts[1].response[0] == int(tokens[0, 0])
            and len(texts[1].prompt.tokens) + tokens.shape[1] == cache.rows.longest
        ):
            logits = logits.clone()
            logits[0, where[1]] = float("nan")
            seen["texts"] += 1
        return logits

    broken.forward = poisoned
    try:
        with pytest.raises(
            SpecqError, match=rf"the {who} with a bf16 KV cache gave NaN logits for prompt p1 at response position 8"
        ):
            score_texts(target, draft, texts, [BASE], setting())
    finally:
        del broken.forward
    assert seen["texts"] == 1


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor, in elements, that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return out


def test_a_large_vocabulary_is_scored_in_bounded_chunks(tmp_path):
    """At 128,256 ids no tensor of text x vocabulary is ever made: the largest is one chunk of logits."""
    vocab, positions = 128_256, 300
    words = ["<s>", "</s>"]
    target = load(
        str(save_model(tmp_path / "t", vocab_size=vocab, words=words, num_hidden_layers=1, max_position_embeddings=512))
    )
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (9 + positions,), generator=g).tolist()
    text = Text(Prompt("p", "p", None, tuple(ids[:8])), tuple(ids[8:]), "given", False)
    chunk = Room.on(target.device).chunk(vocab, 1)
    assert chunk == 64
    voc = Vocabulary(vocab, vocab, vocab, vocab)
    with LargestTensor() as seen:
        score_texts(target, target, [text], [BASE, Arm.of(FP8, BF16)], setting(vocabulary=voc))
    assert seen.largest <= chunk * vocab < positions * vocab


def test_chunk_sizes_follow_the_vocabulary():
    """Chunks depend on the vocabulary alone (so numbers do not depend on the study), within 16 and 512 positions on a CPU; on
    a GPU on the rows of the batch too, 2^29 logits at most."""
    widths = (48, 8192, 32_000, 128_256, 262_144, 10**7)
    assert [Room.on(torch.device("cpu")).chunk(v, 1) for v in widths] == [512, 512, 256, 64, 32, 16]
    gpu = Room.on(torch.device("cuda"))
    assert [gpu.chunk(128_256, rows) for rows in (1, 8, 32)] == [4096, 512, 128]
    assert gpu.chunk(128_256, 8) * 8 * 128_256 <= gpu.logits


def test_batches_hold_texts_of_similar_length():
    """Every text once, none twice as long as another in its batch, no batch beyond its tokens with the padding counted."""
    lengths = [5, 90, 7, 30, 31, 6, 200, 29]
    texts = [Text(Prompt(str(i), "", None, (1,)), (0,) * (n - 1), "given", False) for i, n in enumerate(lengths)]
    assert batches(texts, 0) == [[i] for i in range(8)]
    assert batches(texts, 120) == [[0, 5, 2], [7, 3, 4], [1], [6]]
    assert batches(texts, 61) == [[0, 5, 2], [7, 3], [4], [1], [6]]


@pytest.mark.parametrize("lookup", [False, True])
def test_texts_scored_together_have_the_numbers_of_texts_scored_alone(small_pair, monkeypatch, lookup):
    """Ragged prompts and responses side by side, as on a GPU: the same columns, ranges and saturated elements as one at a
    time, in both orders of arithmetic; padding counts for nothing."""
    target, draft = small_pair
    g = torch.Generator().manual_seed(3)
    texts = [
        Text(Prompt(f"p{i}", "", None, tuple(torch.randint(3, 48, (n,), generator=g).tolist())),
             tuple(torch.randint(3, 48, (m,), generator=g).tolist()), "given", False)
        for i, (n, m) in enumerate([(3, 40), (20, 9), (11, 25), (1, 2), (19, 33)])
    ]  # fmt: skip
    scales = [LayerScales(k=torch.full((1, 1, 1, 1), 2e-3)) for _ in range(target.geometry.layers)]
    how = replace(setting(), depth=4, scales={("target", "fp8_e4m3"): scales})
    arms = [BASE, Arm.of(FP8, BF16), Arm.of(FP8, BF16, ALTERNATIVE, "null")]
    arms = [Arm.of(FLOAT32, FLOAT32), *arms]
    with_draft = NgramLookup(1, 3) if lookup else draft
    alone = score_texts(target, with_draft, texts, arms, how)
    monkeypatch.setattr(
        Room, "on", lambda device: Room(tokens=130, prefill=1024, logits=1 << 14, positions=16, copied=1 << 12)
    )
    together = score_texts(target, with_draft, texts, arms, how)
    for arm in arms:
        for name, column in alone.arms[arm.name].columns.items():
            assert together.arms[arm.name].columns[name] == pytest.approx(column, rel=2e-4, abs=2e-5), (arm.name, name)
    assert together.saturated == alone.saturated and sum(alone.saturated[arms[2].target]) > 0
    for role, found in alone.ranges.items():
        for a, b in zip(found.k + found.v, together.ranges[role].k + together.ranges[role].v, strict=True):
            assert torch.allclose(a, b, rtol=1e-4)


def test_a_pass_is_timed_until_all_gpus_of_its_model_are_done(small_pair, monkeypatch):
    """Target and draft on GPUs of their own, the target over two: every lap waits for those of its pass."""
    target, draft = small_pair
    gpus = {id(target): [torch.device("cuda:0"), torch.device("cuda:2")], id(draft): [torch.device("cuda:1")]}
    waited, laps, texts = [], [], texts_of(target, 2, 4)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(LoadedModel, "devices", property(lambda self: gpus.get(id(self), [self.model.device])))
    monkeypatch.setattr(LoadedModel, "backend", Backend("torch", ""))
    lap = Clock.lap

    def seen(self, p, devices):
        waited.clear()
        lap(self, p, devices)
        laps.append((p.role, list(waited)))

    monkeypatch.setattr(Clock, "lap", seen)
    score_texts(target, draft, texts, [BASE], setting())
    assert {(role, tuple(map(str, devices))) for role, devices in laps} == {
        ("target", ("cuda:0", "cuda:2")),
        ("draft", ("cuda:1",)),
    }
