"""`specq rollout` as users meet it, and n-gram lookup against brute force."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import save_model
from test_cli import run

from specq import pairs
from specq.analysis import by_text
from specq.chain import run_chain
from specq.ngram import NgramIndex, NgramLookup, proposals_along

SMALL = ["--num-prompts", "5", "--prompt-tokens", "32", "--output-tokens", "16", "--quiet"]
DOCUMENTED = ["arm", "prompt", "cycle", "draft_position", "token", "logp", "logq", "ratio", "alpha", "accepted"]


def strict_json(path):
    def refuse(word):
        raise AssertionError(f"{word} in {path}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_rollout_end_to_end(tmp_path):
    """Two formats of the embedded pair: the answer, the files, bytes that are half of BF16's, one story in all of them; the
    same command answers from the files, another configuration is refused."""
    args = ["rollout", "--pair", "tiny", "--dtype", "bf16", "--dtype", "fp8", "--k", "3", *SMALL]
    first = run(*args, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "runs" / "rollout-tiny-bf16-fp8-k3"
    assert sorted(p.name for p in folder.iterdir()) == ["cycles.parquet", "rollout.json", "texts.parquet"]
    for part in ("bf16+bf16, K = 3", "accepted per cycle", "50 % of BF16's", "replay of this text", "cycles.parquet"):
        assert part in first.stdout
    found = strict_json(folder / "rollout.json")
    cycles = pq.read_table(folder / "cycles.parquet").to_pydict()
    assert list(cycles)[: len(DOCUMENTED)] == DOCUMENTED
    texts = pq.read_table(folder / "texts.parquet").to_pydict()
    for arm, block in found["arms"].items():
        mine = np.array(cycles["arm"]) == arm
        assert np.array(cycles["accepted"])[mine].sum() == block["accepted"]
        assert mine.sum() == block["drafted"] == 3 * block["cycles"]
        assert sum(block["marginal_survival"]) == pytest.approx(block["mu_accepted"])
        mine = [r for r, a in zip(texts["response_token_ids"], texts["arm"], strict=True) if a == arm]
        assert sum(map(len, mine)) == block["tokens"] and len(mine) == 5
        assert sum(block["engine"]["per_position"]) == block["engine"]["accepted"]
    target = found["pair"]["target"]["kv_bytes_per_token"]
    measured = {arm: b["kv_bytes_per_token"]["target"] for arm, b in found["arms"].items()}
    assert measured == {"bf16+bf16": target["bf16"]["codes"], "fp8_e4m3+bf16": target["bf16"]["codes"] / 2}
    again = run(*args, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout == first.stdout
    other = run(*args, "--temperature", "0.5", "--out", folder, cwd=tmp_path)
    assert other.returncode == 2 and "another configuration" in other.stderr


def test_other_drafts_have_directories_of_their_own(tmp_path):
    """The drafts of docs/guide.md, one after the other without --out: none finds another's rollout in its directory."""
    small = ["--num-prompts", "1", "--prompt-tokens", "16", "--output-tokens", "4", "--quiet"]
    for more in ([], ["--draft", "self"], ["--draft", "ngram"], ["--draft-dtype", "same"]):
        out = run("rollout", "--pair", "tiny", "--dtype", "fp8", "--k", "2", *more, *small, cwd=tmp_path)
        assert out.returncode == 0, out.stderr
    tiny = pairs.find("tiny", None, None).target.source
    own = ["--target", tiny, "--draft", tiny]  # a pair of one's own has the draft in its name already
    out = run("rollout", *own, "--dtype", "fp8", "--k", "2", *small, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    made = sorted(p.name.removeprefix("rollout-") for p in (tmp_path / "runs").iterdir())
    assert made == [
        "target+target-fp8-k2",
        *(f"tiny-fp8-k2{s}" for s in ("", "-draft-ngram", "-draft-same", "-draft-self")),
    ]


@pytest.mark.parametrize("draft", ["self", "ngram"])
def test_drafts_without_weights_of_their_own(tmp_path, draft):
    """--draft self takes the target with its own KV format, ngram takes no model; both are named in the file."""
    out = run("rollout", "--draft", draft, "--draft-dtype", "same", "--out", "r", *SMALL, cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    found = strict_json(tmp_path / "r" / "rollout.json")
    arm = found["arms"]["fp8_e4m3+fp8_e4m3"]
    assert found["draft_kind"] == {"self": "the target itself", "ngram": "n-gram lookup"}[draft]
    assert arm["kv_bytes_per_token"]["draft"] == (arm["kv_bytes_per_token"]["target"] if draft == "self" else 0)
    assert (arm["engine"]["mu_accepted"] > 3) if draft == "self" else arm["cycles_without_draft"] > 0
    steady, whole = arm["mu_accepted"], arm["engine"]["accepted"] / arm["cycles"]
    told = [w for w in found["warnings"] if "are short for K" in w]
    assert bool(told) == (abs(steady - whole) > 0.02 * whole) and all(f"{whole:.3f}" in w for w in told)


def test_s23_a_short_draft_is_counted_apart(tmp_path):
    """S-23: a draft whose positions end inside the texts stops drafting there; the answer and the file say so, and mu counts
    cycles that drafted only."""
    target, draft = save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2, max_position_embeddings=12)
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [0, 5, 6, 7, 8, 9]}\n')
    out = run("rollout", "--target", target, "--draft", draft, "--prompts", "p.jsonl", "--num-prompts", "1", "--k", "2",
              "--prompt-tokens", "8", "--output-tokens", "40", "--out", "r", "--quiet", cwd=tmp_path)  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert "because a model's positions had ended" in out.stdout
    arm = strict_json(tmp_path / "r" / "rollout.json")["arms"]["fp8_e4m3+bf16"]
    assert arm["cycles_out_of_positions"] == arm["cycles_without_draft"] == arm["cycles"] - arm["engine"]["drafts"] > 0
    assert arm["replay"] is None


def test_s23_a_block_that_jumps_over_the_end_of_the_drafts_positions(tmp_path):
    """S-23: a twin of the target with 32 positions drafts up to its last one and the bonus token ends a text of 34: no cycle
    was without a draft, yet the replay's draft could not read the text; there is none then, and no crash."""
    target, draft = save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=1, max_position_embeddings=32)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt_token_ids": [0, *range(5, 32)]}))
    out = run("rollout", "--target", target, "--draft", draft, "--prompts", "p.jsonl", "--num-prompts", "1", "--k", "4",
              "--temperature", "0", "--prompt-tokens", "28", "--output-tokens", "6", "--out", "r", "--quiet",
              "--dtype", "bf16", cwd=tmp_path)  # fmt: skip
    assert out.returncode == 0, out.stderr
    arm = strict_json(tmp_path / "r" / "rollout.json")["arms"]["bf16+bf16"]
    assert arm["cycles_out_of_positions"] == 0 and arm["tokens"] == 6 and arm["replay"] is None


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--k", "0"], "--k: Input should be greater than or equal to 1"),
        (["--dtype", "fp4"], "unknown KV format 'fp4'"),
        (["--ngram", "3,2", "--draft", "ngram"], "--ngram: needs the shortest and the longest"),
        (["--target", "self"], "--target self: only a draft can be that"),
        (["--out", "."], "is no directory"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_sentence(tmp_path, args, says):
    """Exit code 2, what is wrong, no traceback, nothing left."""
    out = run("rollout", "--quiet", *args, cwd=tmp_path)
    assert out.returncode == 2 and says in out.stderr and "Traceback" not in out.stderr, out.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_study_is_never_replaced(tmp_path):
    """--overwrite replaces rollouts only."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "study.json").write_text("{}")
    out = run("rollout", *SMALL, "--out", "s", "--overwrite", cwd=tmp_path)
    assert out.returncode == 2 and "is no rollout" in out.stderr and (tmp_path / "s" / "study.json").exists()


def brute_force(tokens, shortest, longest, k):
    """The definition: the longest n-gram at the end that occurred before, at its earliest place, and what followed it."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tokens[start + n : start + n + k]
    return []


def test_ngram_lookup_is_its_definition():
    """Against brute force over random texts of few tokens; the example of vLLM's documentation."""
    index = NgramIndex(NgramLookup(2, 3), [1, 2, 3, 4, 2, 3])
    assert index.propose(4) == [4, 2, 3] and NgramIndex(NgramLookup(2, 3), [1, 2, 3]).propose(4) == []
    rng = np.random.default_rng(0)
    found = 0
    for shortest, longest in ((1, 1), (1, 3), (2, 4), (3, 3)):
        text = rng.integers(0, 4, 80).tolist()
        index = NgramIndex(NgramLookup(shortest, longest))
        for n, token in enumerate(text, 1):
            index.extend([token])
            mine = index.propose(3)
            assert mine == brute_force(text[:n], shortest, longest, 3)
            found += len(mine) > 0
    assert found > 100


def test_proposals_by_depth_reproduce_literal_cycles():
    """The chain fed with a and b by depth counts exactly the cycles that lookup makes on a given text (one-hot target)."""
    rng, lookup, start = np.random.default_rng(1), NgramLookup(1, 3), 10
    for k in (1, 3, 6):
        text = rng.integers(0, 5, 90).tolist()
        proposed = proposals_along(lookup, text, start, k)
        hit = (proposed == np.array(text[start:])[:, None]).astype(float)[:, None]
        chain = run_chain(hit, hit, np.array([len(hit)]), k)
        at, accepted, ends = start, np.zeros(k), 0
        while at < len(text):
            guess = brute_force(text[:at], 1, 3, k)
            n = next((i for i, g in enumerate(guess) if at + i >= len(text) or g != text[at + i]), len(guess))
            accepted[:n] += 1
            ends += at + n < len(text)
            at += n + 1
        assert chain.ends[0, k - 1] == ends and (chain.accepted[0, k - 1, :k] == accepted).all()


def test_a_study_with_ngram_lookup(tmp_path):
    """`specq study --draft ngram`: scored with the chain's second index, free drafts, vLLM's method ngram, no draft cache; the
    proposals by depth are in positions.parquet, and a new analysis of it gives the same mu."""
    from test_study import SMALL as STUDY

    from specq import files
    from specq.chain import emitted

    out = run(
        "study", "--draft", "ngram", "--ngram", "1,3", "--cost", "roofline:h100", "--out", "s", *STUDY, cwd=tmp_path
    )
    assert out.returncode == 0, out.stderr
    study = strict_json(tmp_path / "s" / "study.json")
    rec = strict_json(tmp_path / "s" / "fp8" / "recommendation.json")
    assert study["pair"]["draft"] == {"source": "ngram", "shortest": 1, "longest": 3}
    assert rec["draft"] == "ngram" and rec["draft_kv_dtype"] == "none"
    if rec["vllm"]["speculative_config"]:
        assert rec["vllm"]["speculative_config"]["method"] == "ngram"
        assert rec["vllm"]["speculative_config"]["prompt_lookup_max"] == 3
    assert any("VLLM_USE_V2_MODEL_RUNNER=0" in w for w in rec["warnings"])
    assert rec["mu_shift"] == rec["mu_shift_inherited_draft"]
    rows = files.read_parquet(tmp_path / "s" / "positions.parquet")
    base = rows["arm"] == "bf16+bf16"
    a, b = (rows[n][base].astype(float) for n in ("alpha_by_depth", "b_by_depth"))
    assert (
        a.shape[1] == b.shape[1] == 6 and (a[:, 0] == rows["alpha"][base]).all() and (b[:, 0] == rows["b"][base]).all()
    )
    lengths = np.diff(np.append(np.flatnonzero(rows["position"][base] == 1), base.sum()))
    result = run_chain(by_text(a, lengths), by_text(b, lengths), lengths, 6)
    mu = emitted(result.tokens, result.ends) - 1
    assert mu == pytest.approx([rec["baseline_mu_accepted"][str(k)] for k in range(1, 7)], abs=1e-6)


def test_ngram_for_vllm():
    """vLLM's ngram method knows its lengths and neither a model nor how a draft samples."""
    from specq.kv import get_format
    from specq.vllm_options import vllm_block

    block = vllm_block(version="0.32", target="t", draft="ngram", fmt=get_format("fp8"), draft_fmt=get_format("bf16"),
                       schedule=[[1, 8, 3]], draft_sampling="greedy", survival=[0.5, 0.2, 0.1],
                       lookup=NgramLookup(2, 4))  # fmt: skip
    assert block.speculative_config == {
        "method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3
    }  # fmt: skip
