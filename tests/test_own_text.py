"""Own text and null arm: coupling by shared noise, how intervals widen as texts part, orders of arithmetic."""

import numpy as np
import pytest
from conftest import FLOAT32, VOCAB, save_model
from test_retune import write_prompts
from test_rollout import prompts_of
from test_study import small_study, strict_json

from specq import files
from specq import study as study_module
from specq.analysis import NULL
from specq.command import resolve
from specq.conclude import conclude
from specq.coupling import beginning, shared_tokens
from specq.errors import Interrupted
from specq.finished import load as load_study
from specq.kv import get_format
from specq.models.loading import load
from specq.progress import Reporter
from specq.replay import ALTERNATIVE, STANDARD
from specq.sampling import Transform
from specq.study import run_study
from specq.texts import sample_texts


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A study of the embedded pair on both kinds of text: (study, study.json, its directory)."""
    out = tmp_path_factory.mktemp("own") / "study"
    names = (
        "pair",
        "target",
        "draft",
        "cost",
        "current_k",
        "text",
        "num_prompts",
        "prompt_tokens",
        "output_tokens",
        "k_max",
    )
    given = dict.fromkeys(names) | {
        "pair": "tiny", "cost": "roofline:h100", "text": "both", "num_prompts": 12, "prompt_tokens": 24,
        "output_tokens": 64, "k_max": 4,
    }  # fmt: skip
    config, directories = resolve(given, ["fp8_e5m2", "bf16"])
    return run_study(config, directories, out, False, Reporter(quiet=True)), strict_json(out / "study.json"), out


def test_arms_of_one_noise_emit_the_same_text_while_they_can(both):
    """Coupling: the FP8 arm's own texts agree with the baseline's from the start and part at one token each; a BF16 arm's own
    texts are the baseline's, and its own-text shift is exactly 0."""
    study, found, _ = both
    shared = shared_tokens(study.own["fp8_e5m2"].texts, study.main.texts)
    assert shared.min() < 64 and np.median(shared) >= 10  # independent noise would share about none
    assert [t.response for t in study.own["bf16"].texts] == [t.response for t in study.main.texts]
    assert found["own_text_coupling"]["bf16+bf16"]["beginnings"][-1]["own"] == {"value": 0.0, "se": 0.0}


def test_the_interval_widens_as_texts_part(both):
    """The standard error of the own-text shift is the same text's while no text has parted, and grows beyond it after."""
    study, found, _ = both
    rows = found["own_text_coupling"]["fp8_e5m2+bf16"]["beginnings"]
    assert [r["positions"] for r in rows] == sorted(r["positions"] for r in rows) and rows[-1]["positions"] == 63
    parted = [r["texts_parted"] for r in rows]
    assert parted == sorted(parted) and parted[-1] > 0.3
    assert rows[-1]["own"]["se"] > 2 * rows[-1]["same"]["se"]
    full = found["shifts_own_text"]["fp8_e5m2+bf16"]["4"]
    assert rows[-1]["own"]["value"] == pytest.approx(full["value"], abs=1e-9)
    assert rows[-1]["own"]["se"] == pytest.approx(full["se"], rel=1e-9)


@pytest.mark.parametrize("text", ["own", "both"])
def test_own_texts_of_unequal_length_are_decided_in_groups(tmp_path, monkeypatch, text):
    """Texts that end by EOS at another token than the baseline's: a study in groups that fails after scoring is resumed,
    counts the tokens it was decided on, and is decided again alone and for a mix of its groups."""
    pair = (save_model(tmp_path / "t", seed=3, scale=3.0), save_model(tmp_path / "d", seed=2, num_hidden_layers=1))
    settings = dict(pair=pair, dtypes=("fp8_e5m2",), text=text, prompts=write_prompts(tmp_path / "p.jsonl", 12),
                    num_prompts=12, output_tokens=48, k_max=4, current_k=3)  # fmt: skip

    def out_of_power(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(study_module, "decide", out_of_power)
        small_study(tmp_path, **settings)
    study, folder = small_study(tmp_path, **settings, resume=True)
    main, own = (s.analysis.lengths for s in (study.main, study.own["fp8_e5m2"]))
    assert main.sum() != own.sum() and (own < 47).any()
    rec = study.recommendations["fp8_e5m2"]
    assert rec.tokens == (own if text == "own" else main).sum()
    assert [g.name for g in study.conclusions["fp8_e5m2"].groups] == ["chat", "code"]
    for mix in (None, {"code": 0.7, "chat": 0.3}):
        found = load_study(folder)
        again = conclude(found.facts(found.config), [get_format("fp8_e5m2")], found.material, study.cost, mix)
        shift = again["fp8_e5m2"].recommendation.mu_shift_own
        assert (shift == rec.mu_shift_own) == (mix is None) and np.isfinite(shift.value)


def test_the_null_arm_has_own_text_in_another_order(both):
    """The null arm samples own text in another valid order (chunks, neighbours, splits) with the same noise: texts part at most
    where rounding decides, and every own-text shift is shown beyond the null arm's own."""
    study, found, _ = both
    null = study.own[NULL]
    assert shared_tokens(null.texts, study.main.texts).mean() > 0.9 * 64
    assert null.texts[0].sampled_by == NULL and "null" in found["arms_own_text"]
    assert ALTERNATIVE.batch != STANDARD.batch and ALTERNATIVE.splits != STANDARD.splits
    paired = study.material.paired["fp8_e5m2"]
    assert paired.arms[NULL] is null.analysis.arms[NULL]
    shift, floor = found["shifts_own_text"]["fp8_e5m2+bf16"]["4"], found["null_arm_own_text"]["4"]
    assert shift["minus_null"]["value"] == pytest.approx(shift["value"] - floor["value"], abs=1e-12)


def test_q15_the_draft_only_arm_is_scored(both):
    """Q-15: (T fp8, D bf16), (T fp8, D fp8) and (T bf16, D fp8) are all there; p of the draft-only arm is the baseline's bit
    for bit, q of the target-only arm too."""
    _, found, out = both
    rows = files.read_parquet(out / "positions.parquet")

    def column(name, arm):
        return rows[name][(rows["text"] == "same") & (rows["arm"] == arm)]

    assert {"fp8_e5m2+bf16", "fp8_e5m2+fp8_e5m2", "bf16+fp8_e5m2"} <= set(found["arms"]) & set(rows["arm"])
    for same, moved in (("logp", "logq"), ("logq", "logp")):
        arm = "bf16+fp8_e5m2" if same == "logp" else "fp8_e5m2+bf16"
        assert len(column(same, arm)) and np.array_equal(column(same, arm), column(same, "bf16+bf16"))
        assert not np.array_equal(column(moved, arm), column(moved, "bf16+bf16"))


def test_orders_of_arithmetic_agree_on_texts(tmp_path):
    """Every order samples the same texts from a float32 cache: orders differ in rounding alone."""
    model = load(str(save_model(tmp_path / "m", seed=5)))
    how = dict(transform=Transform(), vocabulary=VOCAB, max_tokens=20, seed=1, arm="x")
    orders = [dict(), dict(batch=3), dict(chunk=4), dict(splits=3), dict(batch=2, chunk=3, splits=2)]
    texts = [[t.response for t in sample_texts(model, prompts_of(8), FLOAT32, **how, **o)] for o in orders]
    assert all(t == texts[0] for t in texts)


def test_beginnings_cut_texts_and_columns_alike(tmp_path):
    """A beginning holds the first positions of every text, and texts shorter than it whole."""
    model = load(str(save_model(tmp_path / "m", seed=5)))
    model.eos_ids = frozenset(range(3, 9))
    texts = sample_texts(model, prompts_of(6), get_format("bf16"), transform=Transform(), vocabulary=VOCAB, max_tokens=30,
                         seed=1, arm="x")  # fmt: skip
    token = np.concatenate([t.response[1:] for t in texts])
    cut, columns = beginning(texts, {"token": token}, 5)
    assert [t.positions for t in cut] == [min(5, t.positions) for t in texts] and max(t.positions for t in texts) > 5
    assert columns["token"].tolist() == [x for t in cut for x in t.response[1:]]
    assert all(c.ended == (t.ended and t.positions <= 5) for c, t in zip(cut, texts, strict=True))
