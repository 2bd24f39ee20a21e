"""Rollouts: real speculative decoding against plain decoding, exact distributions, caches that roll back, and replay."""

import numpy as np
import pytest
import torch
from conftest import CONFIGS, FLOAT32, VOCAB, save_model
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

import specq.rollout
from specq.acceptance import Rule, verify_cycle
from specq.agreement import LEVEL, _hotelling, compare, joint
from specq.errors import SpecqError
from specq.kv import FORMATS, get_format
from specq.kv.calibration import measure_range
from specq.kv.paged import Backend
from specq.models.loaded import LoadedModel
from specq.models.loading import load
from specq.models.vocabulary import Vocabulary
from specq.ngram import NgramLookup
from specq.prompts import Prompt
from specq.replay import Arm, Setting, score_texts
from specq.rollout import roll_out
from specq.sampling import Transform, log_probs
from specq.texts import sample_texts

BF16, FP8, INT8 = (get_format(n) for n in ("bf16", "fp8", "int8"))
RULES = [Rule(d, v) for d in ("probabilistic", "greedy") for v in ("standard", "strict")]
V = Vocabulary(VOCAB, VOCAB, VOCAB, VOCAB)
ALL32 = Arm.of(FLOAT32, FLOAT32)


def prompts_of(n, shortest=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(shortest, shortest + 9, (n,), generator=g).tolist()
    return [
        Prompt(f"p{i}", f"p{i}", None, (0, *torch.randint(3, VOCAB, (size,), generator=g).tolist()))
        for i, size in enumerate(sizes)
    ]


def setting(transform=None, rule=None, **kw):
    transform = transform or Transform()
    return Setting(transform, transform, rule or Rule(), V, kw.pop("seed", 0), **kw)


@pytest.fixture
def pair(small_pair):
    """The small pair without EOS."""
    for m in small_pair:
        m.eos_ids = frozenset()
    return small_pair


@pytest.fixture(scope="module")
def scales(small_pair):
    """Calibrated static scales of every format that wants some, for both roles of the small pair."""
    ranges = {
        role: measure_range(m, [p.tokens for p in prompts_of(8, 20, seed=9)])
        for role, m in zip(("target", "draft"), small_pair, strict=True)
    }
    return {(role, f.name): r.scales(f) for role, r in ranges.items() for f in FORMATS if f.static_parts}


def drafts_of(pair):
    return {"model": pair[1], "self": pair[0], "ngram": NgramLookup(1, 3)}


@pytest.mark.parametrize("kind", ["model", "self", "ngram"])
@pytest.mark.parametrize("fmt", [FLOAT32, *FORMATS], ids=lambda f: f.name)
def test_greedy_rollout_is_plain_greedy_decoding(pair, scales, fmt, kind):
    """At temperature 0 a rollout emits plain greedy decoding of the same arm, token for token, whatever drafts."""
    target, draft = pair[0], drafts_of(pair)[kind]
    cold, prompts = Transform(0.0), prompts_of(6)
    plain = sample_texts(target, prompts, fmt, transform=cold, vocabulary=VOCAB, max_tokens=25, seed=0, arm="x",
                         scales=scales.get(("target", fmt.name)))  # fmt: skip
    for k in (1, 4):
        made = roll_out(target, draft, prompts, Arm.of(fmt, BF16), setting(cold, scales=scales), k=k, max_tokens=25)
        assert [t.response for t in made.texts] == [t.response for t in plain]


@pytest.mark.parametrize("transform", [Transform(0.0), Transform(), Transform(0.7, 8, 0.9)], ids=str)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_s16_s17_a_float32_self_draft_accepts_everything(pair, k, transform):
    """S-16, S-17: target drafting for itself in float32 accepts every draft of every cycle; a draft cache that lacks the
    last drafted token would lose acceptance from the second cycle on."""
    made = roll_out(pair[0], pair[0], prompts_of(8), ALL32, setting(transform), k=k, max_tokens=1 + 3 * (k + 1))
    assert made.log["accepted_engine"].all() and len(made.log["token"]) == 8 * 3 * k
    assert (made.cycles == 3).all() and (made.ends == 3).all() and (made.accepted == 3).all()
    assert made.log["ratio"] == pytest.approx(1.0, abs=1e-4) and made.log["alpha"] == pytest.approx(1.0, abs=1e-4)


def test_s17_a_bf16_self_draft_and_a_rerun(pair):
    """S-17: a self-draft over a BF16 cache may lose acceptance to rounding, by very little; the same rollout again is the same
    to the bit."""
    first, again = (
        roll_out(pair[0], pair[0], prompts_of(16), Arm.of(BF16, BF16), setting(), k=4, max_tokens=41) for _ in "ab"
    )
    assert first.log["accepted_engine"].mean() > 0.98 and first.log["ratio"].mean() > 0.99
    assert [t.response for t in first.texts] == [t.response for t in again.texts]
    assert all(np.array_equal(first.log[n], again.log[n]) for n in first.log)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_first_emitted_token_follows_the_target(pair, rule):
    """Over 1e5 one-step rollouts (25,000 for the other rules) the pair (token of prefill, first token of the first cycle) is
    distributed as the target's own two tokens: chi-square over all 48 x 48 pairs, small cells pooled."""
    target, draft = pair
    n, prompt = 100_000 if rule == Rule() else 25_000, (0, 7, 5, 11)
    prompts = [Prompt(str(i), str(i), None, prompt) for i in range(n)]
    hot = Transform(2.0, 12)  # few tokens, none too rare
    made = roll_out(target, draft, prompts, ALL32, setting(hot, rule), k=1, max_tokens=2, batch=25_000)
    first = target.forward(torch.tensor([prompt]), target.new_cache(FLOAT32, 1, 4))[:, -1]
    both = torch.tensor([[*prompt, v] for v in range(VOCAB)])
    second = target.forward(both, target.new_cache(FLOAT32, VOCAB, 5))[:, -1]
    law = log_probs(first, hot).exp().double()[0, :, None] * log_probs(second, hot).exp().double()
    expected = (n * law).flatten().numpy()
    pairs = np.array([t.response for t in made.texts])
    seen = np.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2)
    assert seen[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 10)
    frequent = expected >= 10
    seen, expected = (np.append(x[frequent], x[rare].sum() or []) for x in (seen, expected))
    assert len(seen) > 30
    assert chisquare(seen, expected * n / expected.sum()).pvalue > 0.001


def test_s14_what_follows_eos_does_not_count(pair):
    """S-14: K = 5, draft == target, EOS is the third drafted token: the cycle emits 3 and stops. Its mu counts 3 accepted, a
    server's counters say 5; both are given. Over 100 prompts the two differ by 2 in every cycle."""
    target, _ = pair
    prompts, run = prompts_of(100), dict(k=5, max_tokens=30)
    free = roll_out(target, target, prompts, ALL32, setting(), **run)
    for text in free.texts[:3]:
        third = text.response[3]
        if third in text.response[:3]:
            continue
        target.eos_ids = frozenset({1, third})
        made = roll_out(target, target, [text.prompt], ALL32, setting(), **run)
        assert made.texts[0].response == text.response[:4] and made.texts[0].ended
        assert (made.accepted.sum(), made.cycles[0], made.ends[0]) == (3, 1, 0)
        assert made.log["accepted"].tolist() == [True] * 3 + [False] * 2
        assert made.log["accepted_engine"].tolist() == [True] * 5
    target.eos_ids = frozenset(range(3, VOCAB, 6))  # a list of EOS ids: answers of a few tokens
    made = roll_out(target, target, prompts, ALL32, setting(), **run)
    for text, whole in zip(made.texts, free.texts, strict=True):
        ends = [i for i, token in enumerate(whole.response) if token in target.eos_ids]
        assert text.response == (whole.response[: ends[0] + 1] if ends else whole.response)
    assert made.log["accepted"].sum() == made.accepted.sum() < made.log["accepted_engine"].sum()
    assert sum(t.positions for t in made.texts) == made.accepted.sum() + made.ends.sum()


def test_lengths_stop_at_the_limit_and_tokens_add_up(pair):
    """A block never reaches beyond the length limit, and every token after the first is a kept draft or a cycle's end."""
    for kind, draft in drafts_of(pair).items():
        for limit in (2, 3, 7, 20):
            made = roll_out(pair[0], draft, prompts_of(7), Arm.of(FP8, BF16), setting(), k=4, max_tokens=limit, batch=3)
            assert {len(t.response) for t in made.texts} == {limit}, kind
            assert (made.accepted.sum(1) + made.ends == limit - 1).all()
            assert ((made.cycles == made.ends) | (made.cycles == made.ends + 1)).all()


def test_the_log_is_what_happened(pair):
    """cycles: positions 1..K in order, an accepted prefix, ratio = min(1, p/q), per-position counts as in `accepted`."""
    made = roll_out(pair[0], pair[1], prompts_of(9), Arm.of(INT8, FP8), setting(), k=4, max_tokens=40, batch=4)
    log = made.log
    assert len(log["token"]) == 4 * made.cycles.sum() and made.undrafted.sum() == 0
    assert (log["draft_position"].reshape(-1, 4) == [1, 2, 3, 4]).all()
    assert np.allclose(log["ratio"], np.exp(np.minimum(0, log["logp"] - log["logq"])), atol=1e-5)
    for name in ("accepted", "accepted_engine"):
        assert (np.diff(log[name].reshape(-1, 4).astype(int), axis=1) <= 0).all()
    for i in range(4):
        assert log["accepted"][log["draft_position"] == i + 1].sum() == made.accepted[:, i].sum()
    assert 0 < log["alpha"].min() and log["alpha"].max() <= 1
    assert (log["prompt"][1:] >= log["prompt"][:-1]).all()


def test_rows_do_not_depend_on_their_batch(pair):
    """Check 4: every prompt has its own noise, so batches of 1, 3 and 8 in any order emit the same texts and cycles."""
    prompts = prompts_of(8)

    def run(batch, order):
        made = roll_out(
            pair[0], pair[1], [prompts[i] for i in order], ALL32, setting(), k=3, max_tokens=20, batch=batch
        )
        return {t.prompt.id: (t.response, int(c)) for t, c in zip(made.texts, made.cycles, strict=True)}

    first = run(8, range(8))
    assert first == run(1, range(8)) == run(3, reversed(range(8)))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_s18_caches_hold_the_committed_tokens(pair, monkeypatch, size):
    """S-18: with the rejection forced at each j = 0..4 at K = 4, both caches hold the committed tokens but those not fed yet
    (one; two in the draft after a whole block), and their next logits equal a forward pass without any cache."""
    target, draft = pair
    plain = [
        AutoModelForCausalLM.from_pretrained(m.name, dtype=torch.float32, attn_implementation="eager").eval()
        for m in pair
    ]
    prompts, cycle = [Prompt("p", "p", None, tuple(range(3, 3 + size)))], specq.rollout._Batch.cycle

    def next_logits(model, cache, ids):
        held = cache.lengths.clone()
        logits = model.forward(torch.tensor([ids[int(held) :]]), cache)[:, -1]
        cache.rollback(held)
        return logits

    for j in range(5):
        seen = []

        def checked(batch, j=j, seen=seen):
            row = batch.rows[0]
            log = cycle(batch)
            n = len(row.ids)
            assert batch.cache.lengths.tolist() == [n - 1]
            assert batch.drafter.cache.lengths.tolist() == [n - 2 if j == 4 else n - 1]
            for model, cache, reference in zip(pair, (batch.cache, batch.drafter.cache), plain, strict=True):
                expected = reference(torch.tensor([row.ids]), use_cache=False).logits[:, -1]
                got = next_logits(model, cache, row.ids)
                assert torch.allclose(got, expected, atol=1e-5 * float(expected.abs().max()))
            seen.append(n)
            return log

        forced = lambda p, q, d, *rest, j=j: (torch.tensor([j]), torch.tensor([5 + j]))  # noqa: E731
        monkeypatch.setattr(specq.rollout, "verify_cycle", forced)
        monkeypatch.setattr(specq.rollout._Batch, "cycle", checked)
        roll_out(target, draft, prompts, ALL32, setting(), k=4, max_tokens=1 + 3 * (j + 1))
        assert seen == [size + 1 + i * (j + 1) for i in (1, 2, 3)]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_s19_what_a_rejection_leaves_equals_the_prefix_alone(pair, scales, fmt):
    """S-19: prompt 10, K = 6, all drafts rejected: codes already stored for them go with them. Lengths agree, and the bytes of
    every code and scale equal those of storing the committed tokens alone; nothing is kept in full precision."""
    target, _ = pair
    g, heads, dim = torch.Generator().manual_seed(0), target.geometry.kv_heads, target.geometry.head_dim
    x = torch.randn(1, heads, 18, dim, generator=g)
    x[0, :, 10:17] *= 50  # rejected tokens of another range must leave no trace in a scale
    mine = scales.get(("target", fmt.name))

    def cache_of(blocks, keep):
        cache = target.new_cache(fmt, 1, 20, mine)
        for k, held in zip(blocks, keep, strict=True):
            for layer in cache.layers:
                layer.update(k, -k)
            cache.advance(k.shape[2])
            cache.rollback(torch.tensor([held]))
        return cache

    rejected = cache_of([x[:, :, :10], x[:, :, 10:17], x[:, :, 17:]], [10, 10, 11])
    scratch = cache_of([torch.cat([x[:, :, :10], x[:, :, 17:]], 2)], [11])
    assert rejected.lengths.tolist() == [11] and rejected.get_seq_length() == 11
    for a, b in zip(rejected.layers, scratch.layers, strict=True):
        for part in "kv":
            for s, t in zip(a.stored[part], b.stored[part], strict=True):
                assert torch.equal(s[:, :, :11].view(torch.uint8), t[:, :, :11].view(torch.uint8))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["gemma3", "mistral", "gemma2"])
def test_s21_sliding_windows_survive_rollback(tmp_path, kind, splits):
    """S-21: window 8, prompt 6, K = 4, 30 new tokens, sliding and full layers: the logits of every verified position equal the
    windowed reference without a cache. Both attention implementations (fused, and split with soft cap)."""
    path = save_model(tmp_path / kind, kind, seed=3, sliding_window=8)
    target, draft = load(str(path)), load(str(save_model(tmp_path / "d", kind, seed=4, sliding_window=8)))
    target.eos_ids = frozenset()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    new_cache, forward, seen = target.new_cache, target.forward, []
    target.new_cache = lambda *args: new_cache(*args, splits)

    def spy(tokens, cache, counts=None, keep=0):
        before = cache.lengths.clone()
        logits = forward(tokens, cache, counts, keep)
        if not keep:
            seen.append((before, tokens.clone(), logits, counts))
        return logits

    target.forward = spy
    prompts = [Prompt(str(i), str(i), None, (0, *range(3 + i, 8 + i))) for i in range(3)]
    made = roll_out(target, draft, prompts, ALL32, setting(), k=4, max_tokens=30)
    whole = [torch.tensor(t.tokens) for t in made.texts]

    def equal(ids, logits):
        with torch.inference_mode():
            expected = reference(ids[None], use_cache=False).logits[0, -len(logits) :]
        return torch.allclose(logits, expected, atol=2e-4 * float(expected.abs().max()))

    for before, block, logits, counts in seen:
        for row, (start, n) in enumerate(zip(before.tolist(), counts.tolist(), strict=True)):
            texts = [w[:start] for w in whole if len(w) > start and w[start] == block[row, 0]]
            assert any(equal(torch.cat([w, block[row, :n]]), logits[row, :n]) for w in texts)
    assert sum(len(before) for before, *_ in seen) == len(prompts) + made.cycles.sum()


def test_s23_a_draft_with_fewer_positions(tmp_path):
    """S-23: draft 32 positions, target 64. Prompt 40: drafting is skipped and counted, no 0 % acceptance enters an average.
    Prompt 28, K = 8, 20 new tokens: no draft input stands beyond position 31, and the text is the target's all the same."""
    target = load(str(save_model(tmp_path / "t", seed=1, max_position_embeddings=64)))
    for kind in ("llama", "gpt2"):
        size = {"max_position_embeddings": 32} if kind == "llama" else {"n_positions": 32}
        draft = load(str(save_model(tmp_path / kind, kind, seed=2, **size)))
        target.eos_ids = frozenset()
        positions, cold = [], Transform(0.0)
        forward = draft.model.forward
        draft.model.forward = lambda *a, f=forward, seen=positions, **kw: (
            seen.append(kw["position_ids"].max()),
            f(*a, **kw),
        )[1]
        long, short = (Prompt(n, n, None, (0, *([5, 9, 7, 11] * 10)[: size - 1])) for n, size in (("l", 40), ("s", 28)))
        plain = sample_texts(
            target, [long, short], FLOAT32, transform=cold, vocabulary=VOCAB, max_tokens=20, seed=0, arm=""
        )
        made = roll_out(target, draft, [long, short], ALL32, setting(cold), k=8, max_tokens=20)
        assert [t.response for t in made.texts] == [t.response for t in plain]
        assert made.undrafted[0] == made.out_of_positions[0] == made.cycles[0] == 19
        assert not (made.log["prompt"] == 0).any()
        assert 0 < made.out_of_positions[1] < made.cycles[1]
        assert made.log["draft_position"][made.log["cycle"] == 1].max() == 4  # 32 + 1 - 29 committed tokens
        assert max(positions) <= 31


@pytest.mark.parametrize("fmt", [FLOAT32, *FORMATS], ids=lambda f: f.name)
def test_q28_the_second_turn_is_as_good_as_the_first(pair, scales, fmt):
    """Q-28: a second turn, behind the first one's prompt and answer, is decoded from a prompt of both: its text is plain greedy
    decoding of the whole conversation, its cycles count from 1 again, and the p of its tokens are those of the replay. A cache
    that goes on from the first turn, rejected drafts and all, holds the codes of one that read the conversation at once."""
    target, draft = pair
    arm, cold = Arm.of(fmt, BF16), setting(Transform(0.0), scales=scales)
    first = roll_out(target, draft, prompts_of(4), arm, cold, k=4, max_tokens=12)
    conversations = [
        Prompt(t.prompt.id, t.prompt.id, None, (*t.tokens, 1, 0, 9, 17 + i)) for i, t in enumerate(first.texts)
    ]
    second = roll_out(target, draft, conversations, arm, cold, k=4, max_tokens=12)
    plain = sample_texts(target, conversations, fmt, transform=Transform(0.0), vocabulary=VOCAB, max_tokens=12, seed=0,
                         arm="x", scales=scales.get(("target", fmt.name)))  # fmt: skip
    assert [t.response for t in second.texts] == [t.response for t in plain]
    assert min(second.log["cycle"]) == 1 and (second.cycles > 0).all()
    warm = setting(scales=scales)
    made = roll_out(target, draft, conversations, arm, warm, k=4, max_tokens=12)
    replayed = score_texts(target, draft, made.texts, [arm], warm).arms[arm.name].columns
    kept = [made.log["alpha"][(made.log["prompt"] == i) & (made.log["cycle"] == 1)][0] for i in range(4)]
    begins = np.cumsum([0, *(t.positions for t in made.texts)])[:4]
    assert kept == pytest.approx(replayed["alpha"][begins], abs=1e-4 if fmt is FLOAT32 else 0.05)

    ids = torch.tensor([conversations[0].tokens])
    turn = len(first.texts[0].tokens)
    whole, parts = (target.new_cache(fmt, 1, 64, scales.get(("target", fmt.name))) for _ in "ab")
    target.forward(ids, whole)
    target.forward(ids[:, :5], parts)
    target.forward(torch.tensor([[40, 41, 42]]), parts)
    parts.rollback(torch.tensor([5]))
    target.forward(ids[:, 5:turn], parts)
    target.forward(ids[:, turn:], parts)
    assert parts.lengths.tolist() == whole.lengths.tolist() == [ids.shape[1]]
    held, flipped = ids.shape[1], 0.0 if fmt is FLOAT32 else 0.02
    for a, b in zip(whole.layers, parts.layers, strict=True):
        for x, y in zip(a.read(torch.float32), b.read(torch.float32), strict=True):
            apart = (x[:, :, :held] - y[:, :, :held]).abs() / x.abs().amax()
            assert apart.max() < 1 / 8  # pieces of another length may round to the next code, rarely and no further
            assert (apart > 1e-5).float().mean() <= flipped


def test_s09_nan_names_arm_prompt_cycle_and_position(pair):
    """S-09: a NaN row of the target's logits stops the rollout, naming where, with the cycle's number in the log; so does one
    of the draft's."""
    target, draft = pair
    where = r"arm fp8_e4m3\+bf16: the target gave NaN logits for prompt p1 in cycle 3 at draft position 3"
    for model, says in (
        (target, where),
        (draft, r"arm fp8_e4m3\+bf16: the draft gave NaN logits for prompt p1 in cycle 1 at draft position 3"),
    ):
        forward, calls = model.forward, [0]

        def poisoned(tokens, cache, counts=None, keep=0, forward=forward, calls=calls, target=model is target):
            logits = forward(tokens, cache, counts, keep).clone()
            calls[0] += tokens.shape[1] == 5 if target else not keep
            if calls[0] == 3:
                logits[1, 2 if target else -1] = float("nan")
            return logits

        model.forward = poisoned
        try:
            with pytest.raises(SpecqError, match=says):
                roll_out(target, draft, prompts_of(3), Arm.of(FP8, BF16), setting(), k=4, max_tokens=30)
        finally:
            del model.forward


def test_infinite_values_of_the_draft_stop_the_rollout(pair, monkeypatch):
    """FP8 saturates and per-channel INT8 stores zeros for NaN: the logits cannot show it, the count does."""
    target, draft = pair
    project = draft.model.model.layers[0].self_attn.v_proj
    plain = project.forward
    monkeypatch.setattr(project, "forward", lambda x: plain(x).index_fill_(-1, torch.tensor(0), torch.inf))
    with pytest.raises(SpecqError, match=r"arm bf16\+fp8_e4m3: the draft produced NaN or infinite K or V"):
        roll_out(target, draft, prompts_of(2), Arm.of(BF16, FP8), setting(), k=2, max_tokens=4)


def test_seconds_wait_for_the_gpus_of_both_models(pair, monkeypatch):
    """A draft on a GPU of its own is waited for as the target's GPUs are."""
    gpus = {id(pair[0]): ["cuda:0", "cuda:2"], id(pair[1]): ["cuda:1"]}
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    monkeypatch.setattr(LoadedModel, "devices", property(lambda self: [torch.device(d) for d in gpus[id(self)]]))
    monkeypatch.setattr(LoadedModel, "backend", Backend("torch", ""))
    roll_out(*pair, prompts_of(2), Arm.of(BF16, BF16), setting(), k=2, max_tokens=4)
    assert waited[:3] == ["cuda:0", "cuda:2", "cuda:1"]


def test_bytes_are_measured_and_fp8_takes_half(pair):
    """The caches that decoded are measured: FP8 takes half of BF16's bytes, self-speculation pays for its second cache."""
    target, draft = pair

    def measured(arm, draft):
        return roll_out(target, draft, prompts_of(4), arm, setting(), k=4, max_tokens=8).kv_bytes

    bf16, fp8 = measured(Arm.of(BF16, BF16), draft), measured(Arm.of(FP8, INT8), target)
    assert bf16["target"] == sum(target.geometry.kv_bytes_per_token(BF16)) == 2 * fp8["target"]
    assert fp8["draft"] == sum(target.geometry.kv_bytes_per_token(INT8))
    assert measured(Arm.of(FP8, BF16), NgramLookup())["draft"] == 0


def test_rollout_and_replay_agree(pair, scales):
    """Cycles and every S_k agree with the replay of the rollouts' own tokens in one joint test at the 1 % level, over formats
    with and without static scales, every rule, K = 1, 4, 8 and both kinds of draft. Greedy and n-gram drafts agree exactly
    given the text; for the others the test finds a 2 % error in nine of ten."""
    found = []
    for fmt in (FP8, INT8, get_format("int8_per_channel")):
        for rule in RULES:
            for k in (1, 4, 8):
                found.append(agreement(pair, setting(rule=rule, scales=scales), fmt, k))
                assert found[-1].exact == (rule.draft_sampling == "greedy")
        found.append(agreement((pair[0], NgramLookup(1, 3)), setting(scales=scales), fmt, 4))
        assert found[-1].exact
    result = joint(found)
    assert result.p_value > LEVEL and result.power > 0.9, result


def agreement(pair, how, fmt, k, texts=48, tokens=40):
    target, draft = pair
    arm = Arm.of(fmt, FP8)
    made = roll_out(target, draft, prompts_of(texts), arm, how, k=k, max_tokens=tokens, batch=texts)
    return compare(made, score_texts(target, draft, made.texts, [arm], how), how.rule)


def test_the_joint_test_finds_faults(pair, monkeypatch):
    """The test above can fail: a rollout that accepts 10 % too rarely, or corrects from p, not the residual, is found."""

    def rare(p, q, drafted, rule, coins, picks):
        return verify_cycle(p, q, drafted, rule, coins / 0.9, picks)

    def unnormalised(p, q, drafted, rule, coins, picks):
        accepted, final = verify_cycle(p, q, drafted, rule, coins, picks)
        return accepted, p[torch.arange(len(p)), accepted].multinomial(1, generator=torch.Generator().manual_seed(0))[
            :, 0
        ]

    assert _hotelling(np.ones((30, 1)), np.ones(1))[2] == 0  # the same error in every document is one, too
    assert _hotelling(np.full((1, 4), 0.1), np.ones(4))[2] == 1  # one document shows no error that is the same in all
    for fault in (rare, unnormalised):
        monkeypatch.setattr(specq.rollout, "verify_cycle", fault)
        assert joint([agreement(pair, setting(seed=s), BF16, 4) for s in range(6)]).p_value < LEVEL, fault.__name__


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_architecture_rolls_out(tmp_path, kind):
    """Llama, Qwen2, Qwen3, Mistral, Gemma 2 and 3, GPT-2: a greedy rollout over an FP8 cache is plain greedy decoding."""
    target, draft = (load(str(save_model(tmp_path / str(s), kind, seed=s))) for s in (3, 4))
    prompts, cold = prompts_of(4), Transform(0.0)
    plain = sample_texts(target, prompts, FP8, transform=cold, vocabulary=VOCAB, max_tokens=20, seed=0, arm="x")
    made = roll_out(target, draft, prompts, Arm.of(FP8, FP8), setting(cold), k=3, max_tokens=20, batch=4)
    assert [t.response for t in made.texts] == [t.response for t in plain]
