"""The hook in vLLM's rejection sampler, on hand-made tensors and a stand-in with the sampler's own signature."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specq.engines.vllm import probe, probed
from specq.engines.vllm.probe import COLUMNS, ProbeError, install, score
from specq.engines.vllm.protocol import CellResult, Pass, RequestLog
from specq.errors import SpecqError
from specq.files import read_parquet

P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
Q = torch.tensor([[0.3, 0.6, 0.1], [0.5, 0.3, 0.2]])


def test_scores_are_those_of_the_distributions():
    """S-04: p = (.6, .3, .1), q = (.3, .6, .1): alpha .7; a token's ratio is min(1, p/q), logs are of p and q."""
    got = score(torch.tensor([1, 2], dtype=torch.int32), [2], Q, P.log(), torch.tensor([[1, 2, 0]]), [False])
    assert got["alpha"] == pytest.approx([0.7, 0.7])
    assert got["ratio"] == pytest.approx([0.5, 1.0])
    assert np.exp(got["logp"]) == pytest.approx([0.3, 0.5]) and np.exp(got["logq"]) == pytest.approx([0.6, 0.2])
    assert got["accepted"] == [True, True] and got["draft_position"] == [1, 2] and got["row"] == [0, 0]


def test_greedy_drafts_count_as_one_hot():
    """Without draft probabilities q is one-hot: log q = 0, and ratio and alpha are p of the drafted token."""
    got = score(torch.tensor([1, 2]), [2], None, P.log(), torch.tensor([[1, 0, -1]]), [False])
    assert got["alpha"] == got["ratio"] == pytest.approx([0.3, 0.5]) and got["logq"] == [0.0, 0.0]
    assert got["accepted"] == [True, False]


def test_rejected_at_once_and_masked_by_top_k():
    """A drafted token outside the target's support has ratio 0, not NaN; one emitted token means nothing accepted."""
    logits = torch.tensor([[0.0, float("-inf"), -1.0]])
    got = score(torch.tensor([1]), [1], Q[:1], logits, torch.tensor([[0, -1]]), [False])
    assert got["ratio"] == [0.0] and got["logp"] == [-float("inf")] and got["accepted"] == [False]


def test_temperature_zero_and_ragged_rows():
    """S-05: greedy requests have ratios in {0, 1}; requests without drafts have no rows and move no index."""
    logits = torch.cat([P.log(), P.log()])
    out = torch.tensor([[0, 2, 1], [1, -1, -1], [0, -1, -1]])
    got = score(torch.tensor([0, 2, 0, 1]), [2, 0, 2], None, logits, out, [True, False, False])
    assert got["row"] == [0, 0, 2, 2] and got["draft_position"] == [1, 2, 1, 2]
    assert got["ratio"][:2] == [1.0, 1.0] and got["ratio"][2:] == pytest.approx([0.6, 0.3])
    assert got["accepted"] == [True, True, False, False]


def stand_in():
    """(module, runner class) with the signatures of vLLM 0.24 and no more: accepts where p is at least q, writes logits."""

    def rejection_sample(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids,
        sampling_metadata, synthetic_mode=False, synthetic_conditional_rates=None, use_fp64_gumbel=False,
    ):  # fmt: skip
        out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1)
        at = 0
        for row, n in enumerate(num_draft_tokens):
            for i in range(n):
                t = int(draft_token_ids[at + i])
                out[row, i] = t
                if target_logits[at + i].exp()[t] < draft_probs[at + i][t]:
                    break
            else:
                out[row, n] = bonus_token_ids[row, 0]
            at += n
        target_logits.zero_()  # vLLM's sampler owns its logits and may overwrite them
        return out

    module = SimpleNamespace(rejection_sample=rejection_sample)

    class RejectionSampler:
        def forward(self, metadata, draft_probs, logits, sampling_metadata):
            return module.rejection_sample(
                metadata.draft_token_ids, metadata.num_draft_tokens, 2, None, draft_probs, logits, metadata.bonus,
                sampling_metadata, synthetic_mode=metadata.synthetic,
            )  # fmt: skip

    class GPUModelRunner:
        def __init__(self, ids):
            self.input_batch = SimpleNamespace(req_ids=ids)
            self.rejection_sampler = RejectionSampler()

        def _sample(self, logits, spec_decode_metadata):
            if spec_decode_metadata is None:
                return "plain"
            greedy = SimpleNamespace(all_greedy=False, temperature=torch.ones(2))
            return self.rejection_sampler.forward(spec_decode_metadata, spec_decode_metadata.q, logits, greedy)

    return module, GPUModelRunner


def metadata(drafts, counts, q, synthetic=False):
    bonus = torch.zeros(len(counts), 1, dtype=torch.int64)
    return SimpleNamespace(
        draft_token_ids=torch.tensor(drafts), num_draft_tokens=counts, bonus=bonus, q=q, synthetic=synthetic
    )


@pytest.fixture
def pinned(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def test_recorded_cycles_have_their_requests_and_the_engine_its_result(tmp_path, pinned):
    """The wrapped sampler returns what the bare one does; rows name request and cycle; warm-up leaves no row."""
    module, runner = stand_in()
    bare = stand_in()[1](["a", "b"])._sample(torch.cat([P, P]).log(), metadata([0, 2, 1, 2], [2, 2], torch.cat([Q, Q])))
    recorder = install(tmp_path, "0.24.0", module, runner)
    engine = runner(["a", "b"])
    assert engine._sample(None, None) == "plain"
    drafts = metadata([0, 2, 1, 2], [2, 2], torch.cat([Q, Q]))
    assert torch.equal(engine._sample(torch.cat([P, P]).log(), drafts), bare)
    engine._sample(P.log(), metadata([0, 2], [0, 2], Q))
    engine.rejection_sampler.forward(drafts, drafts.q, torch.cat([P, P]).log(), None)  # a dummy run of the engine
    recorder.flush()
    recorder.flush()  # nothing held: no second file
    rows = read_parquet(next(tmp_path.glob("*.parquet")))
    assert tuple(rows) == COLUMNS and len(list(tmp_path.glob("*.parquet"))) == 1
    assert rows["prompt"].tolist() == ["a", "a", "b", "b", "b", "b"]
    assert rows["cycle"].tolist() == [0, 0, 0, 0, 1, 1]
    assert rows["accepted"].tolist() == [True, True, False, False, True, True]
    assert rows["alpha"] == pytest.approx([0.7] * 6)  # of the logits before the sampler overwrote them


@pytest.mark.parametrize("version", ["0.33.0", "0.25.1", "0.23.0"])
def test_unknown_versions_are_refused(tmp_path, pinned, monkeypatch, version):
    """At its start, by the two places that look: before vLLM's modules are imported, and before they are wrapped."""
    says = (
        "older than 0.24"
        if version == "0.23.0"
        else f"rejection sampler of vLLM 0.24 and 0.32, not of {version}: unset"
    )
    with pytest.raises((ProbeError, SpecqError), match=says):
        install(tmp_path, version, *stand_in())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with pytest.raises((ProbeError, SpecqError), match=says):
        probe._vllm()


def test_unknown_runners_and_samplers_are_refused(tmp_path, monkeypatch):
    module, runner = stand_in()
    untouched = module.rejection_sample
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with pytest.raises(ProbeError, match="V1 model runner only"):
        install(tmp_path, "0.24.0", module, runner)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    other = SimpleNamespace(rejection_sample=lambda draft_token_ids: None)
    with pytest.raises(ProbeError, match="another rejection sampler"):
        install(tmp_path, "0.24.0", other, runner)
    assert module.rejection_sample is untouched


def test_synthetic_acceptance_is_not_recorded(tmp_path, pinned):
    module, runner = stand_in()
    install(tmp_path, "0.24.0", module, runner)
    with pytest.raises(ProbeError, match="synthetic"):
        runner(["a"])._sample(P.log(), metadata([0, 2], [2], Q, synthetic=True))


def test_plugin_is_off_by_default(monkeypatch):
    """Without SPECQ_PROBE the plugin asks for nothing, imports nothing and wraps nothing."""
    monkeypatch.delenv("SPECQ_PROBE", raising=False)
    monkeypatch.setattr(probe, "_recorder", None)
    probe.register(lambda: pytest.fail("looked for vLLM"))
    assert probe._recorder is None
    probe.close()


def test_plugin_installs_once(monkeypatch, tmp_path, pinned):
    monkeypatch.setenv("SPECQ_PROBE", str(tmp_path))
    monkeypatch.setattr(probe, "_recorder", None)
    monkeypatch.setattr(probe.atexit, "register", lambda f: None)
    module, runner = stand_in()
    probe.register(lambda: ("0.24.0", module, runner))
    wrapped = module.rejection_sample
    probe.register(lambda: ("0.24.0", module, runner))
    assert module.rejection_sample is wrapped and probe._recorder is not None


def test_entry_point_is_declared():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text and "specq.engines.vllm.probe:register" in text


def test_alpha_is_laid_on_the_texts_positions():
    """Cycle 0: two accepted, positions 0, 1, and the third draft unreached at 2 in K = 3; the next cycle starts at 3."""
    names = ["warmup-0", *["pass0-5-ab"] * 6, *["pass0-4"] * 1]
    rows = {
        "prompt": np.array(names),
        "cycle": np.array([0, 0, 0, 0, 1, 1, 1, 0]),
        "alpha": np.array([9, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        "accepted": np.array([True, True, True, False, False, False, False, True]),
    }
    found = probed.reached(rows)
    assert found == {(0, 5): [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)], (0, 4): [(0, 0.7)]}
    logs = [RequestLog(prompt=n, steps=[[1], [1] * 4], first=0.0, last=1.0, finish_reason="length") for n in (4, 5)]
    done = Pass(seconds=1.0, requests=logs, step_ends=[], rows=[], firsts=[])
    result = CellResult(digest="", versions={}, device="", timing_mode="", passes=[done], counters=None)
    a = np.array([0.7, 0, 0, 0, 0.1, 0.2, 0.3, 0.5])
    made = probed.compare_alpha(rows, result, result.requests, a)
    assert made["positions"] == 5 and made["largest"] == pytest.approx(0.1)
    assert made["mean_difference"] == pytest.approx(-0.02)
