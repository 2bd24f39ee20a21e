"""A finished study decided again from its files: the same answer, other questions, two studies compared, in no time."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import VOCAB, save_model
from test_cli import run
from test_study import small_study, strict_json

from specq import files
from specq.analysis import BASE
from specq.compare import mu_difference, mu_table, same_documents
from specq.conclude import conclude
from specq.errors import SpecqError
from specq.finished import load, reconfigured
from specq.kv import get_format
from specq.report.schema import Recommendation
from specq.tune_command import parse_mix, tune_command


def write_prompts(path, count=8, seed=0):
    """Prompts of two groups for the random models."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "prompt": " ".join(f"w{i}" for i in rng.integers(3, VOCAB, 12)),
            "id": f"p{n}",
            "group": ("code", "chat")[n % 2],
        }
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Finished studies by name: a roofline's on both kinds of text, a measured one, one on own text with greedy drafts."""
    root = tmp_path_factory.mktemp("retune")
    pair = (save_model(root / "t", seed=1), save_model(root / "d", seed=2, num_hidden_layers=1))
    shared = {"prompts": write_prompts(root / "p.jsonl"), "num_prompts": 8, "k_max": 4, "current_k": 3}
    settings = {
        "both": {"text": "both", "cost": "roofline:2xh100", "dtypes": ("fp8", "int8")},
        "measured": {"cost": "measured", "batch": (1, 2), "context": (16,)},
        "own": {"text": "own", "draft_sampling": "greedy", "temperature": 0.7, "objective": "throughput"},
        "bf16": {"dtypes": ("bf16",), "draft_sampling": "greedy"},
    }
    return {name: small_study(root / name, pair, **shared | s) for name, s in settings.items()} | {"root": root}


def again(folder, **changes):
    """(conclusions, cost) of a finished study under other settings."""
    finished = load(folder)
    config = reconfigured(finished.config, changes)
    formats = [get_format(n) for n in config.dtypes]
    return conclude(finished.facts(config), formats, finished.material, finished.cost(config))


@pytest.mark.parametrize("name", ["both", "measured", "own", "bf16"])
def test_nothing_changed_gives_the_very_same_recommendation(studies, name):
    """From the files alone, every number of recommendation.json comes out again, timing noise included."""
    study, folder = studies[name]
    found = again(folder)
    assert set(found) == set(study.recommendations)
    for fmt, conclusion in found.items():
        written = strict_json(folder / study.directories[fmt] / "recommendation.json")
        mine = files.finite(conclusion.recommendation.model_dump(mode="json"))
        mine["cost"]["details"].pop("records", None), written["cost"]["details"].pop("records", None)
        assert mine == written


def test_other_costs_batches_and_contexts_are_decided_anew(studies):
    """Another GPU, batch and context move the cost and the schedule; mu and its shift do not change."""
    study, folder = studies["both"]
    before = study.recommendations["fp8_e4m3"]
    after = again(folder, cost="roofline:a100", batch=(4, 16), context=(512, 1024), current_k=0)[
        "fp8_e4m3"
    ].recommendation
    assert after.cost.source == "roofline:a100" and after.recommended_schedule[-1][1] == 16
    assert after.cost.details["operating_point"] == {"batch": 4, "context": 512}
    assert after.mu_accepted == before.mu_accepted and after.current_num_speculative_tokens == 0
    assert "no_native_fp8" in {v.code for v in after.verdicts} - {v.code for v in before.verdicts}
    assert Recommendation.model_validate_json(after.model_dump_json()) == after


def test_findings_are_of_the_machine_and_k_decided_for(studies, tmp_path):
    """A study for a GPU without FP8 units, decided again by the times of an unnamed machine: nothing is said of its units. The
    word on texts that are short for K is about the K in use now and the one recommended."""
    timings = tmp_path / "timings.json"
    timings.write_text(json.dumps(strict_json(studies["measured"][1] / "study.json")["cost"]["details"]["records"]))
    pair = (studies["root"] / "t", studies["root"] / "d")
    own = {"batch": (1,), "context": (16,), "prompts": str(studies["root"] / "p.jsonl"), "k_max": 4, "current_k": 3}
    study, folder = small_study(tmp_path, pair, cost="roofline:a100", **own)

    def codes(rec):
        return {v.code for v in rec.verdicts}

    before = study.recommendations["fp8_e4m3"]
    assert "no_native_fp8" in codes(before)
    for cost, known in ((str(timings), None), (f"roofline:h100@{timings}", True), ("roofline:a100", False)):
        found = load(folder)
        assert found.facts(reconfigured(found.config, {"cost": cost})).native_fp8 is known
        after = again(folder, cost=cost, current_k=1)["fp8_e4m3"].recommendation
        assert ("no_native_fp8" in codes(after)) == (known is False)
        for rec, k in ((before, 3), (after, 1)):
            named = {int(w.split("K = ")[1].split(":")[0]) for w in rec.warnings if "are short for K" in w}
            assert named <= {k, rec.recommended_num_speculative_tokens}
    assert any("are short for K = 3:" in w for w in before.warnings)
    from_file, _ = small_study(tmp_path / "file", pair, cost=str(timings), **own)
    assert from_file.facts.native_fp8 is None


def test_a_timings_file_decides_and_its_change_is_noticed(studies, tmp_path):
    """--cost FILE with the study's own repeats gives what `measured` gave; a roofline calibrated on it says so."""
    study, folder = studies["measured"]
    records = strict_json(folder / "study.json")["cost"]["details"]["records"]
    path = tmp_path / "timings.json"
    path.write_text(json.dumps(records))
    found = again(folder, cost=str(path))["fp8_e4m3"].recommendation
    assert found.speedup == study.recommendations["fp8_e4m3"].speedup and found.cost.source == "file:timings.json"
    fitted = again(folder, cost=f"roofline:h100@{path}")["fp8_e4m3"].recommendation.cost
    assert fitted.source == "roofline:h100@timings.json" and fitted.details["calibration"]["records"] == len(records)
    config = reconfigured(study.config, {"cost": str(path)})
    path.write_text(json.dumps(records[::-1]))
    with pytest.raises(SpecqError, match="has changed since"):
        reconfigured(config, {})


def test_a_file_of_one_point_warns_where_it_was_not_timed(studies, tmp_path, capsys):
    """One batch and context serves all others, K beyond its new tokens the last one's time: recommendation.json and the
    terminal say so, and say nothing of it where the file was timed."""
    _, folder = studies["both"]
    cases = [("draft", 1, f) for f in ("bf16",)] + [("target", n, f) for f in ("bf16", "fp8", "int8") for n in (1, 3)]
    records = [{"kind": k, "batch": 32, "context": 4192, "new_tokens": n, "kv_format": f, "seconds": 0.01 * n}
               for k, n, f in cases]  # fmt: skip
    path = tmp_path / "one.json"
    path.write_text(json.dumps(records))
    tune_command(folder, {"cost": str(path), "batch": (1, 64), "context": (512,)}, None, tmp_path / "new")
    shown = " ".join(capsys.readouterr().out.split())
    for fmt in ("fp8", "int8"):
        warnings = strict_json(tmp_path / "new" / fmt / "recommendation.json")["warnings"]
        (point,) = [w for w in warnings if "batch 32, context 4192 alone" in w]
        assert "batch 1, context 512 and batch 64, context 512" in point
        assert sum("flatters K = 3 to 4" in w for w in warnings) == 1
    assert shown.count("flatters K = 3") == 2
    there = again(folder, cost=str(path), batch=(32,), context=(4192,))["fp8_e4m3"].recommendation.warnings
    assert not any("alone" in w for w in there) and any("flatters" in w for w in there)


def test_the_command_takes_under_two_seconds_and_no_torch(studies, tmp_path):
    """Issue: retuning takes under 2 s, because neither torch nor transformers nor matplotlib is imported for it; with --out
    the plots need matplotlib, and still no torch."""
    _, folder = studies["both"]
    code = (
        "import sys; sys.argv = ['specq', 'tune', *sys.argv[1:], '--cost', 'roofline:4xh200', '--batch', '1,8,64']\n"
        "from specq.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'vllm'} & set(sys.modules)\n"
        "assert heavy <= ({'matplotlib'} if '--out' in sys.argv else set()), heavy"
    )
    began = os.times().children_user
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    taken = os.times().children_user - began
    assert out.returncode == 0, out.stderr
    assert taken < 2, f"{taken:.2f} s of CPU"
    written = subprocess.run(
        [sys.executable, "-c", code, str(folder), "--out", str(tmp_path / "new")], stderr=-1, text=True
    )
    assert written.returncode == 0, written.stderr
    assert "roofline:4xh200" in out.stdout and "num_speculative_tokens" in out.stdout


def test_the_command_writes_what_it_decided(studies, tmp_path):
    """--out: recommendation, decision and plots per format, strict JSON, valid; a directory in use is refused."""
    _, folder = studies["both"]
    out = run("tune", folder, "--mix", "code=0.8,chat=0.2", "--objective", "throughput", "--out", tmp_path / "new")
    assert out.returncode == 0, out.stderr
    for name in ("fp8", "int8"):
        sub = tmp_path / "new" / name
        Recommendation.model_validate(strict_json(sub / "recommendation.json"))
        block = strict_json(sub / "decision.json")
        assert block["configuration"]["objective"] == "throughput" and [g["name"] for g in block["groups"]] == [
            "chat",
            "code",
        ]
        assert {p.name for p in (sub / "plots").iterdir()} == {"break_even.png", "sensitivity.png"}
        decided = next(e for e in block["sensitivity"]["alpha"] if e["x"] == 0)
        assert decided["over_bf16"] == pytest.approx(block["curves"][0]["over_bf16"])  # of the mixture as well
    assert "prompt groups" in out.stdout and "tokens are 80 % code, 20 % chat" in " ".join(out.stdout.split())
    taken = run("tune", folder, "--out", tmp_path / "new")
    assert taken.returncode == 2 and "is not empty" in taken.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new"]


def test_what_cannot_be_decided_is_refused(studies, tmp_path):
    """One sentence and exit code 2 for no study, an older or damaged one, values without sense, and unknown groups."""
    _, folder = studies["both"]
    for args, says in (
        ([tmp_path], "holds no study"),
        ([folder, "--cost", "measured"], "measured no step times"),
        ([folder, "--cost", "roofline:h900"], "unknown GPU"),
        ([folder, "--current-k", "9"], "--current-k 9 is beyond --k-max 4"),
        ([folder, "--objective", "fame"], "--objective: Input should be 'latency' or 'throughput'"),
        ([folder, "--max-ms-per-token", "0"], "--max-ms-per-token: Input should be greater than 0"),
        ([folder, "--mix", "poetry=1"], "no group 'poetry'"),
        ([folder, "--mix", "code"], "--mix takes shares like"),
        ([studies["measured"][1], "--batch", "64"], "no draft timing for bf16 at batch 64"),
    ):
        out = run("tune", *args)
        assert out.returncode == 2 and says in out.stderr and "Traceback" not in out.stderr, (args, out.stderr)
    old = tmp_path / "old"
    old.mkdir()
    for name in ("texts.parquet", "positions.parquet"):
        (old / name).write_bytes((folder / name).read_bytes())
    for damage in (
        lambda s: s["pair"]["target"].pop("shape"),
        lambda s: s["pair"].update(draft=[]),
        lambda s: s["prompts"].update(kept=0),
    ):
        study = json.loads((folder / "study.json").read_text())
        damage(study)
        (old / "study.json").write_text(json.dumps(study))
        out = run("tune", old)
        assert out.returncode == 2 and "another version of specq" in out.stderr and "Traceback" not in out.stderr
    (old / "study.json").write_text("[" * 100_000)
    assert "study.json is damaged" in run("tune", old).stderr
    (old / "study.json").write_bytes((folder / "study.json").read_bytes())
    (old / "positions.parquet").write_bytes(b"PAR1")
    assert "is damaged" in run("tune", old).stderr


def test_shares_of_a_mix():
    """Names may hold anything but commas; spaces do not matter."""
    assert parse_mix("code=0.7, a=b =0.3") == {"code": 0.7, "a=b": 0.3}


def test_two_studies_are_compared_with_the_difference(studies, tmp_path):
    """The same documents: paired, exactly 0 against itself. Other documents: independent, errors added in squares."""
    root, (_, folder) = studies["root"], studies["both"]
    mine = load(folder).material.main
    same = mu_difference(mine, mine, [(1.0, BASE)], 3, paired=True)
    assert same.value == same.se == 0 and not same.excludes_zero
    prompts = write_prompts(tmp_path / "q.jsonl", seed=9)
    other, where = small_study(
        tmp_path, (root / "t", root / "d"), prompts=prompts, num_prompts=7, k_max=4, current_k=3, seed=5
    )
    theirs = other.main.analysis
    different = mu_difference(mine, theirs, [(1.0, BASE)], 3, paired=False)
    alone = [a.resampler.emitted(a.arms[BASE].sums, 3) for a in (mine, theirs)]
    assert different.value == pytest.approx(alone[1].value - alone[0].value)
    assert different.se == pytest.approx(np.hypot(alone[0].se, alone[1].se))
    out = run("compare", folder, where, COLUMNS="160")
    assert out.returncode == 0, out.stderr
    words = (
        "settings that differ",
        "roofline:2xh100",
        "as independent studies",
        "mu fp8_e4m3",
        "shift fp8_e4m3",
        "decision",
    )
    for text in words:
        assert text in out.stdout, text
    found, others = load(folder), load(where)
    assert same_documents(found, load(folder)) and not same_documents(found, others)
    others = load(folder)  # line1, line2, ... of another file are other documents
    others.config = others.config.model_copy(update={"prompts_sha256": "another file's"})
    assert not same_documents(found, others)
    assert "as independent studies" in mu_table(found, others, ["fp8_e4m3"], 3).title
    none = run("compare", folder, studies["bf16"][1])
    assert none.returncode == 2 and "share no format" in none.stderr
