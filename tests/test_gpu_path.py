"""A GPU's way through replay, texts and rollouts, end to end without one: texts side by side, paged caches, the acceptance
and drawing kernels, all in Triton's interpreter, against the CPU's way over the same models.

Models of one layer, as in test_paged: a last bit in one layer's attention can move a code of the next by one step.
"""

import numpy as np
import pytest
import torch
from conftest import save_model

pytest.importorskip("triton")
from specq_kernels.codec import INTERPRETED  # noqa: E402

from specq import scoring  # noqa: E402
from specq.kv import get_format
from specq.kv.cache import LayerScales
from specq.kv.paged import Backend, PagedLayer
from specq.models import loaded  # noqa: E402
from specq.models.loading import load
from specq.models.vocabulary import Vocabulary
from specq.ngram import NgramLookup
from specq.prompts import Prompt, Text
from specq.replay import ALTERNATIVE, Arm, Room, Setting, score_texts
from specq.rollout import roll_out
from specq.rules import Rule, Transform
from specq.texts import sample_texts

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not INTERPRETED, reason="make test-gpu runs the real thing"),
]
BF16, FP8, TOKEN, CHANNEL = (get_format(n) for n in ("bf16", "fp8", "int8", "int8_per_channel"))
ARMS = [
    Arm.of(BF16, BF16),
    Arm.of(BF16, BF16, ALTERNATIVE, "null"),
    Arm.of(FP8, TOKEN),
    Arm.of(CHANNEL, BF16),
]
SIZE, WIDTH = 48, 64  # ids that count, and logits of the target
HOT = Transform(1.0), Transform(1.0)
CASES = [  # test_scoring has every rule at every temperature
    (Rule(), HOT),
    (
        Rule("probabilistic", "strict"),
        (Transform(0.7, 8, 0.9), Transform(0.7)),
    ),  # torch forms p and q, from paged caches
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target with a padded vocabulary and a bias in K, draft with a sliding window; one layer each."""
    root = tmp_path_factory.mktemp("pair")
    words = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, SIZE))]
    shape = {"head_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    target = save_model(root / "t", "qwen2", seed=3, words=words, vocab_size=WIDTH, **shape)
    draft = save_model(root / "d", "mistral", seed=4, words=words, sliding_window=6, **shape)
    return load(str(target)), load(str(draft))


@pytest.fixture
def gpu(monkeypatch):
    """Call it, and what follows goes the way of a GPU; returns the rooms that were asked for."""

    def turn():
        monkeypatch.setattr(Room, "on", classmethod(lambda cls, device: cls(60, 1 << 12, 1 << 14, 1 << 12, 5 * SIZE)))
        monkeypatch.setattr(scoring, "kernels_run_on", lambda device: True)
        monkeypatch.setattr(loaded, "kernel_backend", lambda *a: Backend("triton", ""))
        monkeypatch.setattr(PagedLayer, "read", _only_for_ranges(PagedLayer.read))

    return turn


def _only_for_ranges(read):
    """Attention of these models must go through the kernels: the pages are gathered for float32 ranges alone."""

    def checked(self, dtype):
        assert not self.pending or dtype == torch.float32
        return read(self, dtype)

    return checked


def texts_of(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = lambda n: tuple(torch.randint(3, SIZE, (n,), generator=g).tolist())  # noqa: E731
    return [Text(Prompt(f"p{i}", "d", None, ids(a)), ids(b), "bf16+bf16", False) for i, (a, b) in enumerate(sizes)]


TEXTS = texts_of([(1, 2), (9, 1), (17, 4)])


def setting_of(pair, rule, heat, **more):
    scales = {}
    for role, model in zip(("target", "draft"), pair, strict=True):
        geometry = model.geometry
        g = torch.Generator().manual_seed(5)
        k, v = (0.002 + 0.01 * torch.rand(1, geometry.kv_heads, 1, geometry.head_dim, generator=g) for _ in "kv")
        scales[role, CHANNEL.name] = [LayerScales(k, v, source="calibration")]
    vocabulary = Vocabulary(SIZE, SIZE, *(m.geometry.vocab for m in pair))
    return Setting(*heat, rule, vocabulary, 7, scales, lambda fmt: fmt.rounds_query, **more)


def same(got, expected, exact=()):
    for arm, columns in expected.arms.items():
        assert got.arms[arm].columns.keys() == columns.columns.keys()
        for name, column in columns.columns.items():
            mine = got.arms[arm].columns[name]
            if column.dtype in (np.bool_, np.int64) or name in exact:
                assert np.array_equal(mine, column), (arm, name)
            else:
                assert mine == pytest.approx(column, rel=2e-3, abs=2e-4), (arm, name)


@pytest.mark.parametrize(("rule", "heat"), CASES, ids=str)
def test_scores_of_every_rule(pair, gpu, rule, heat):
    """Ragged texts, one position and none among them, in several batches and chunks: every column of every arm, the null arm,
    both caches quantized, counts and ranges."""
    setting = setting_of(pair, rule, heat)
    cpu = score_texts(*pair, TEXTS, ARMS, setting)
    gpu()
    got = score_texts(*pair, TEXTS, ARMS, setting)
    same(got, cpu)
    assert got.saturated == cpu.saturated and sum(map(sum, got.saturated.values())) > 0
    for role, found in cpu.ranges.items():
        for a, b in zip((*got.ranges[role].k, *got.ranges[role].v), (*found.k, *found.v), strict=True):
            assert torch.equal(a, b)


def test_scores_of_a_lookup(pair, gpu):
    """No draft pass: a and b by depth, and what the target alone decides."""
    texts = [Text(t.prompt, (t.prompt.tokens * 5)[:5], t.sampled_by, False) for t in TEXTS]
    setting, arms = setting_of(pair, *CASES[0], depth=3), [ARMS[0], Arm.of(TOKEN, BF16)]
    draft = NgramLookup(1, 2)
    cpu = score_texts(pair[0], draft, texts, arms, setting)
    assert cpu.arms["bf16+bf16"].columns["b_by_depth"].any(axis=0).all()
    gpu()
    same(score_texts(pair[0], draft, texts, arms, setting), cpu, exact=("b_by_depth",))


@pytest.mark.parametrize("order", [None, ALTERNATIVE], ids=["baseline", "null"])
def test_sampled_texts(pair, gpu, order):
    """Own text and the null arm's: the same tokens by the same noise, over pages that lose rows as texts end."""
    prompts = [t.prompt for t in TEXTS]
    how = {"batch": order.batch, "chunk": order.prefill, "splits": order.splits} if order else {"batch": 2}

    def sampled():
        return sample_texts(
            pair[0], prompts, TOKEN, transform=HOT[0], vocabulary=SIZE, max_tokens=4, seed=2, arm="own", **how
        )

    cpu = sampled()
    gpu()
    assert sampled() == cpu


@pytest.mark.parametrize("draft", ["model", "self", "lookup"])
def test_rollouts(pair, gpu, draft):
    """Drafting, verifying, rolling back and dropping rows over paged caches: the CPU's texts, counts, log and bytes."""
    target = pair[0]
    other = {"model": pair[1], "self": target, "lookup": NgramLookup(1, 2)}[draft]
    prompts = [Prompt(p.id, "d", None, p.tokens * 2) for p in (t.prompt for t in TEXTS[1:3])]
    setting = setting_of((target, pair[1]), *CASES[0])

    def rolled():
        return roll_out(target, other, prompts, Arm.of(FP8, TOKEN), setting, k=2, max_tokens=5)

    cpu = rolled()
    assert len(cpu.log["token"]) > 0 and (draft != "self" or cpu.accepted.sum() > 0)
    gpu()
    got = rolled()
    assert got.texts == cpu.texts
    for name in ("cycles", "undrafted", "out_of_positions", "ends", "accepted"):
        assert np.array_equal(getattr(got, name), getattr(cpu, name)), name
    for name, column in cpu.log.items():
        assert got.log[name] == pytest.approx(column, rel=2e-3, abs=2e-4), name
    assert got.kv_bytes == cpu.kv_bytes
