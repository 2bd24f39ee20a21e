"""Rollouts are interrupted as studies are: finished pieces stay, and continuing gives the very bytes of one left alone."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import VOCAB, save_model
from interruptions import interrupted_after, killed_at_random, one_thread, raising  # noqa: F401

from specq import rollout_stage, shards
from specq.config import RolloutConfig
from specq.errors import Interrupted, SpecqError
from specq.rollout_command import rollout_command

KILLS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random pair and 20 prompts: three pieces of eight."""
    root, rng = tmp_path_factory.mktemp("pair"), np.random.default_rng(0)
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(3, VOCAB, 6)), "id": f"p{n}"} for n in range(20)]
    (root / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    target, draft = save_model(root / "t", seed=1), save_model(root / "d", seed=2, num_hidden_layers=1)
    return {"target": str(target), "draft": str(draft), "prompts": str(root / "p.jsonl")}


def run(pair, out, dtypes=("bf16", "fp8"), resume=False, overwrite=False, **changes):
    base = {k: None for k in RolloutConfig.model_fields if k != "dtypes" and not k.endswith("sha256")}
    small = {"pair": "tiny", "num_prompts": 20, "prompt_tokens": 8, "output_tokens": 10, "k": 3, "rows": 8}
    rollout_command(base | small | pair | changes, list(dtypes), out, resume=resume, overwrite=overwrite, quiet=True)


def data(out):
    assert sorted(p.name for p in out.iterdir()) == ["cycles.parquet", "rollout.json", "texts.parquet"]
    return {n: (out / n).read_bytes() for n in ("cycles.parquet", "texts.parquet")}


def arms(out):
    """What rollout.json says of the arms, apart from what a clock said."""
    found = json.loads((out / "rollout.json").read_text())["arms"]
    return {n: {k: v for k, v in b.items() if k not in ("seconds", "tokens_per_second")} for n, b in found.items()}


@pytest.fixture(scope="module")
def alone(pair, tmp_path_factory):
    """The directory of rollouts that nothing interrupted."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run(pair, out)
    return out


def test_killed_at_20_random_moments_and_resumed_gives_the_same_bytes(pair, alone, tmp_path):
    """kill -9 at 20 random function calls: every continued rollout ends with the parquet files and the figures (replay
    included) of the one left alone, and leaves nothing else behind."""

    def checked(out):
        assert data(out) == data(alone) and arms(out) == arms(alone)

    assert killed_at_random(KILLS, lambda out, resume: run(pair, out, resume=resume), tmp_path, checked) > KILLS / 4


@pytest.mark.parametrize("draft", ["self", "ngram"])
def test_pieces_hold_all_of_a_rollout(pair, tmp_path, monkeypatch, draft):
    """Drafts without weights of their own, texts that end early, cycles without a draft: what is read back from pieces is
    what one go in memory makes."""
    made = []

    def kept(*args, **how):
        made.append(roll_out(*args, **how))
        return made[-1]

    roll_out = rollout_stage.roll_out
    monkeypatch.setattr(rollout_stage, "roll_out", kept)
    run(pair, tmp_path / "out", ["fp8"], draft=draft, ngram=(1, 2))
    cycles = pq.read_table(tmp_path / "out" / "cycles.parquet").to_pydict()
    assert len(made) == 3 and sum(len(m.log["token"]) for m in made) == len(cycles["token"]) > 0
    for name in ("cycle", "draft_position", "token", "logp", "logq", "ratio", "alpha", "accepted", "accepted_engine"):
        assert cycles[name] == np.concatenate([m.log[name] for m in made]).tolist()
    ids = [m.texts[i].prompt.id for m in made for i in m.log["prompt"]]
    assert cycles["prompt"] == ids
    block = arms(tmp_path / "out")["fp8_e4m3+bf16"]
    assert block["cycles"] == sum(m.cycles.sum() for m in made)
    assert block["cycles_without_draft"] == sum(m.undrafted.sum() for m in made)
    assert block["accepted"] == sum(m.accepted.sum() for m in made)
    assert block["ended_by_eos"] == sum(t.ended for m in made for t in m.texts)


def test_ctrl_c_keeps_pieces_and_resume_continues(pair, alone, tmp_path, monkeypatch):
    """After Ctrl-C: one sentence; without --resume nothing is touched, nor with other options, nor by a study; with it only
    what is missing is made, from a directory whose models have moved."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(patch, 7, raising(KeyboardInterrupt()))  # three of cycles and three of replay per arm
        with pytest.raises(Interrupted, match=r"interrupted; 7 finished pieces are kept in .*out.partial, .* --resume"):
            run(pair, out)
    assert not out.exists()
    with pytest.raises(SpecqError, match="7 finished pieces of an interrupted rollout; --resume continues it"):
        run(pair, out)
    with pytest.raises(SpecqError, match="interrupted rollout of another configuration"):
        run(pair, out, resume=True, k=4)
    with pytest.raises(SpecqError, match="give one of them"):
        run(pair, out, resume=True, overwrite=True)
    from test_shards import run as run_study

    with pytest.raises(SpecqError, match="interrupted rollout of another configuration"):
        run_study(pair, out, resume=True)
    moved = {k: str(shutil.copytree(pair[k], tmp_path / k)) for k in ("target", "draft")}
    made, write = [], shards.Shards._write
    monkeypatch.setattr(shards.Shards, "_write", lambda s, path, piece: (made.append(path.name), write(s, path, piece)))
    run(pair | moved, out, resume=True)
    assert len(made) == 2 * (3 + 3) - 7 and data(out) == data(alone) and arms(out) == arms(alone)


def test_out_of_memory_halves_the_prompts_decoded_together(pair, alone, tmp_path, monkeypatch):
    """Fewer prompts at once, the same rollout, and rollout.json says so; with nothing left to halve, a sentence."""
    roll_out, batches = rollout_stage.roll_out, []

    def short(fits):
        def rolled(*args, batch, **how):
            batches.append(batch)
            if batch > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return roll_out(*args, batch=batch, **how)

        monkeypatch.setattr(rollout_stage, "roll_out", rolled)

    short(fits=2)
    run(pair, tmp_path / "out")
    assert batches[:5] == [8, 4, 2, 2, 2]
    said = json.loads((tmp_path / "out" / "rollout.json").read_text())["warnings"]
    assert "out of memory: prompts decoded together are taken 2 at a time from here on" in said
    assert arms(tmp_path / "out") == arms(alone)
    for name in ("cycles.parquet", "texts.parquet"):
        mine, theirs = (pq.read_table(d / name).to_pydict() for d in (tmp_path / "out", alone))
        assert mine.keys() == theirs.keys()
        for column, values in mine.items():
            if column in ("logp", "logq", "ratio", "alpha"):  # another batch rounds the last bits differently
                assert values == pytest.approx(theirs[column], abs=1e-5)
            else:
                assert values == theirs[column]
    short(fits=0)
    with pytest.raises(SpecqError, match="out of memory with a single one of the prompts decoded together"):
        run(pair, tmp_path / "none")
    assert not (tmp_path / "none.partial").exists()
