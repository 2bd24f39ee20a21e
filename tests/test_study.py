"""The main job end to end on the embedded pair (small settings), and its files."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import VOCAB, save_model
from test_cli import run

from specq import command, decision, pairs
from specq.capacity import Load
from specq.capacity_command import capacity_command
from specq.command import resolve, study_command
from specq.config import StudyConfig
from specq.engines.vllm.validate import own_pair
from specq.errors import SpecqError
from specq.finished import load
from specq.kv import get_format
from specq.report.schema import Recommendation, SpeculationProfile
from specq.study import run_study
from specq.vllm_options import NO_SELF_SPECULATION

SMALL = [
    "--num-prompts",
    "8",
    "--prompt-tokens",
    "48",
    "--output-tokens",
    "32",
    "--k-max",
    "6",
    "--batch",
    "1,2",
    "--quiet",
]


def strict_json(path):
    """Parse JSON the strict way: NaN and Infinity are errors."""

    def refuse(word):
        raise AssertionError(f"{word} in {path}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished study of two formats on both kinds of text."""
    root = tmp_path_factory.mktemp("study")
    args = ["study", "--pair", "tiny", "--dtype", "fp8", "--dtype", "int8", "--text", "both", *SMALL]
    out = run(*args, cwd=root)
    assert out.returncode == 0, out.stderr
    return root, args, out


def test_the_answer_is_printed_with_its_paths(finished):
    """The terminal ends with mu, its shift and interval, the recommended K, the decision and the files."""
    _, _, out = finished
    words = ("accepted per cycle", "shift of mu", "null arm", "shift on own text", "num_speculative_tokens", "decision")
    paths = ("fp8/report.html", "int8/recommendation.json", "study.json")
    for part in (*words, *(f"runs/tiny-fp8-int8/{p}" for p in paths)):
        assert part in out.stdout
    assert out.stderr == ""  # --quiet


def test_every_promised_file_is_there(finished):
    """The files of docs/guide.md, valid against their schemas, and nothing partial left."""
    root, _, _ = finished
    folder = root / "runs" / "tiny-fp8-int8"
    assert sorted(p.name for p in folder.iterdir()) == [
        "fp8",
        "int8",
        "positions.parquet",
        "study.json",
        "texts.parquet",
    ]
    assert [p.name for p in (root / "runs").iterdir()] == ["tiny-fp8-int8"]
    strict_json(folder / "study.json")
    for name in ("fp8", "int8"):
        Recommendation.model_validate(strict_json(folder / name / "recommendation.json"))
        SpeculationProfile.model_validate(strict_json(folder / name / "speculation_profile.json"))
        plots = {
            "acceptance_curve",
            "mu_shift",
            "speedup_vs_k",
            "ratio_histogram",
            "context",
            "break_even",
            "sensitivity",
        }
        assert {p.stem for p in (folder / name / "plots").glob("*.png")} == plots
        assert (folder / name / "report.html").stat().st_size > 10_000


def test_the_numbers_of_the_files_agree(finished):
    """recommendation, profile, study and positions tell one story: mu = sum of S_k, alpha, shifts and counts match."""
    root, _, _ = finished
    folder = root / "runs" / "tiny-fp8-int8"
    study, rec = strict_json(folder / "study.json"), strict_json(folder / "fp8" / "recommendation.json")
    profile = strict_json(folder / "fp8" / "speculation_profile.json")
    arm = study["arms"]["fp8_e4m3+bf16"]
    for k, rates in arm["marginal_survival"].items():
        assert sum(rates) == pytest.approx(rec["mu_accepted"][k], abs=1e-12)
    assert rec["mu_shift"]["value"] == pytest.approx(
        rec["mu_accepted"]["5"] - rec["baseline_mu_accepted"]["5"], abs=1e-12
    )
    assert rec["mu_shift"]["value"] == study["shifts"]["fp8_e4m3+bf16"]["5"]["value"]
    assert rec["mu_shift_own"]["text"] == "own" and rec["mu_shift"]["text"] == "same"
    assert profile["mean_accept_length"] == pytest.approx(1 + rec["mu_accepted"]["5"], abs=1e-12)
    assert sum(profile["acceptance_length_histogram"].values()) == pytest.approx(1)
    assert rec["vllm"]["synthetic_acceptance_rates"] == pytest.approx(
        arm["marginal_survival"][str(len(rec["vllm"]["synthetic_acceptance_rates"]))]
    )
    rows = pq.read_table(folder / "positions.parquet").to_pydict()
    mine = np.array([a == "bf16+bf16" and t == "same" for a, t in zip(rows["arm"], rows["text"], strict=True)])
    assert mine.sum() == rec["tokens"] == study["tokens"]["scored"]
    assert np.array(rows["alpha"])[mine].mean() == pytest.approx(study["arms"]["bf16+bf16"]["alpha_mean"], abs=1e-6)
    texts = pq.read_table(folder / "texts.parquet").to_pydict()
    assert len(texts["prompt"]) == 8 * 4 and set(texts["arm"]) == {
        "bf16+bf16",
        "null",
        "fp8_e4m3+bf16",
        "int8_per_token_head+bf16",
    }
    documented = {"arm", "prompt", "group", "position", "context_len", "token", "logp", "logq", "b", "alpha", "draft_token",
                  "ratio", "draft_top1", "alpha_greedy", "alpha_strict", "kl", "top1_agrees", "entropy"}  # fmt: skip
    assert documented <= set(rows)


def test_q15_both_dtypes_are_reported(finished):
    """Q-15: the draft's KV format is always stated, and the arm with an inherited one stands beside it."""
    root, _, _ = finished
    rec = strict_json(root / "runs" / "tiny-fp8-int8" / "fp8" / "recommendation.json")
    assert (rec["target_kv_dtype"], rec["draft_kv_dtype"], rec["vllm_kv_cache_dtype"]) == ("fp8_e4m3", "bf16", "fp8")
    assert rec["mu_shift_inherited_draft"]["value"] != rec["mu_shift"]["value"]


def test_q06_scale_one_is_said_per_layer(finished):
    """Q-06: without scales in the checkpoint FP8 uses 1.0, per layer in the JSON, with a warning that offers calibration."""
    root, _, out = finished
    study = strict_json(root / "runs" / "tiny-fp8-int8" / "study.json")
    assert study["pair"]["target"]["kv_scale_sources"] == ["one"] * 12 and study["scales"]["fp8_e4m3"] == "one"
    rec = strict_json(root / "runs" / "tiny-fp8-int8" / "fp8" / "recommendation.json")
    assert any("1.0" in w and "--calibrate" in w for w in rec["warnings"])
    assert "scale_one" in {v["code"] for v in rec["verdicts"]}
    int8 = strict_json(root / "runs" / "tiny-fp8-int8" / "int8" / "recommendation.json")
    assert "scale_one" not in {v["code"] for v in int8["verdicts"]} and "--calibrate" not in " ".join(int8["warnings"])


def test_the_same_configuration_again_answers_at_once(finished):
    """A second run of the same study prints the finished answer and touches nothing."""
    root, args, first = finished
    folder = root / "runs" / "tiny-fp8-int8"
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    again = run(*args, cwd=root)
    assert again.returncode == 0 and again.stdout == first.stdout
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}


def test_another_configuration_into_the_same_directory_is_refused(finished):
    """Exit code 2, offering --out and --overwrite; the finished study stays."""
    root, args, _ = finished
    out = run(*args, "--seed", "7", cwd=root)
    assert out.returncode == 2 and "--out" in out.stderr and "--overwrite" in out.stderr
    assert (root / "runs" / "tiny-fp8-int8" / "study.json").is_file()
    strange = root / "occupied"
    strange.mkdir()
    (strange / "mine.txt").write_text("kept")
    out = run("study", *SMALL, "--out", strange, cwd=root)
    assert out.returncode == 2 and (strange / "mine.txt").read_text() == "kept"


def small_study(tmp_path, pair=None, dtypes=("fp8",), resume=False, **options):
    """Run a study on random models in this process; returns (study, its folder)."""
    from specq.progress import Reporter

    settings = {"num_prompts": 6, "prompt_tokens": 24, "output_tokens": 16, "k_max": 5, "cost": "roofline:h100"}
    base = dict.fromkeys(StudyConfig.model_fields) | {"pair": "tiny", "batch": (1, 8), "context": (2048,)} | settings
    base = {k: v for k, v in base.items() if k != "dtypes" and not k.endswith("sha256")}
    if pair is not None:
        base |= {"target": str(pair[0]), "draft": str(pair[1])}
    config, directories = resolve(base | options, list(dtypes))
    folder = tmp_path / "out"
    return run_study(config, directories, folder, False, Reporter(quiet=True), resume=resume), folder


@pytest.fixture
def word_prompts(tmp_path):
    """Prompts for the random models' word tokenizer."""
    rng = np.random.default_rng(0)
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(3, VOCAB, 12)), "id": f"p{n}"} for n in range(6)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_own_models_and_prompts(tmp_path, word_prompts):
    """--target, --draft and --prompts: a study of a pair and prompts of one's own."""
    pair = (save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2))
    study, folder = small_study(tmp_path, pair, ("int8",), prompts=str(word_prompts))
    rec = study.recommendations["int8_per_token_head"]
    assert rec.pair == "t+d" and rec.prompts == 6 and math.isfinite(rec.mu_shift.value)
    assert strict_json(folder / "study.json")["prompts"]["kept"] == 6


def test_own_models_are_no_registered_pair(tmp_path, word_prompts, monkeypatch):
    """With both sides given study.json names no registered pair and the default directory has theirs. A study that an older
    version recorded as `tiny` is the same study: the same command shows it."""
    pair = (save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2))
    study, folder = small_study(tmp_path, pair, prompts=str(word_prompts))
    written = strict_json(folder / "study.json")
    assert written["configuration"]["pair"] is None
    options = study.config.model_dump(exclude={"dtypes"}) | {"pair": "tiny"}
    options = {k: v for k, v in options.items() if not k.endswith("sha256")}
    monkeypatch.setattr(command, "_run", lambda config, directories, out, *_, **__: started.append(str(out)))
    started = []
    study_command(options, ["fp8"], None)
    assert started == ["runs/t+d-fp8"]
    written["configuration"]["pair"] = "tiny"
    (folder / "study.json").write_text(json.dumps(written))
    study_command(options, ["fp8"], folder)
    assert started == ["runs/t+d-fp8"] and load(folder).config == study.config


@pytest.mark.parametrize("registered", [True, False])
def test_a_target_that_drafts_for_itself(tmp_path, word_prompts, monkeypatch, capsys, registered):
    """One copy of the weights, on the command line (--draft self) and as a registered pair's kind alike: memory counts it once,
    and nothing is written for vLLM, which would load it twice; validate refuses in the same words."""
    target = save_model(tmp_path / "t", seed=1)
    geometry = (
        "layers = 2, hidden = 32, intermediate = 48, heads = 4, kv_heads = 2, head_dim = 8, vocab = 48, tied = false"
    )
    (tmp_path / "pairs.toml").write_text(
        f"[tiny]\nsummary = 'x'\ntarget.path = '{target}'\ntarget.geometry = {{ {geometry} }}\ndraft.kind = 'self'\n"
    )
    monkeypatch.setattr(pairs, "STUDIES", tmp_path)
    given = None if registered else (target, "self")
    study, folder = small_study(tmp_path, given, prompts=str(word_prompts))
    rec = study.recommendations["fp8_e4m3"]
    assert rec.vllm is None and f"nothing is written for vLLM: {NO_SELF_SPECULATION}" in rec.warnings
    heavy = replace(study.facts.target_shape, weights=10**10)  # a number of weights that fills memory
    facts = replace(study.facts, target_shape=heavy, draft_shape=heavy)
    once, twice = (Load(heavy, heavy, shared=s).sequences(get_format("fp8"), 2048, facts.server) for s in (True, False))
    assert decision._fits(facts, get_format("fp8"))[0] == once > twice
    with pytest.raises(SpecqError, match="nothing to run: " + NO_SELF_SPECULATION):
        own_pair(load(folder))
    capsys.readouterr()
    capacity_command(
        pair="tiny", target=given and str(target), draft=given and "self", dtypes=[], draft_dtype="bf16", gpus="h100",
        context=64, sequences=None, weight_bytes=None, utilisation=0.9, reserve_gb=1.0, as_json=True,
    )  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert told["server"]["weights_bytes"] == 2 * told["target"]["weights"]


def test_unequal_padded_vocabularies_run_and_vllm_is_null(tmp_path, word_prompts):
    """S-10: the study runs; vLLM refuses such pairs, so its block is null with that warning."""
    words = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB))]
    pair = (
        save_model(tmp_path / "t", words=words, vocab_size=64),
        save_model(tmp_path / "d", words=words, vocab_size=56),
    )
    study, folder = small_study(tmp_path, pair, prompts=str(word_prompts))
    rec = study.recommendations["fp8_e4m3"]
    assert rec.vllm is None and any("64 and 56" in w for w in rec.warnings)
    sizes = strict_json(folder / "study.json")["pair"]["vocabulary"]
    assert sizes == {"size": VOCAB, "tokenizer": VOCAB, "target_logits": 64, "draft_logits": 56}


def test_formats_vllm_lacks_are_said_to_be_so(tmp_path):
    """int8_per_channel has no vLLM name: the block is null with a warning; its scales come from unscored text."""
    study, _ = small_study(tmp_path, dtypes=("int8_per_channel",))
    rec = study.recommendations["int8_per_channel"]
    assert rec.vllm is None and rec.vllm_kv_cache_dtype is None and any("no KV cache format" in w for w in rec.warnings)
    assert study.facts.scale_sources == {"int8_per_channel": "calibration"}
    scored = {p.id for p in study.prompts}
    assert len(scored) == 6


@pytest.mark.parametrize(("version", "written"), [("0.24", False), ("0.32", False), ("0.33", True)])
def test_nothing_is_written_for_a_server_that_does_not_start(tmp_path, word_prompts, version, written):
    """fp8_e5m2 has a vLLM name, and no server of 0.24 to 0.32 starts with it on CUDA: the block is null and the reason is among
    the warnings. A version of which nothing is known gets the block, and so do the other formats of the study."""
    pair = (save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2))
    study, folder = small_study(tmp_path, pair, ("int8", "fp8_e5m2"), prompts=str(word_prompts), vllm_version=version)
    rec = strict_json(folder / study.directories["fp8_e5m2"] / "recommendation.json")
    assert rec["vllm_kv_cache_dtype"] == "fp8_e5m2" and (rec["vllm"] is not None) == written
    said = f"nothing is written for vLLM: vLLM {version} does not start on CUDA with fp8_e5m2: "
    assert any(w.startswith(said) for w in rec["warnings"]) != written
    other = study.recommendations["int8_per_token_head"]
    assert other.vllm is not None and not any("does not start" in w for w in other.warnings)


def test_calibration_never_uses_scored_prompts(tmp_path, word_prompts):
    """Calibrating on the scored file itself leaves nothing and is refused; with other prompts it runs."""
    from specq.errors import SpecqError

    pair = (save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2))
    with pytest.raises(SpecqError, match="not scored"):
        small_study(tmp_path, pair, prompts=str(word_prompts), calibrate=str(word_prompts))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    with pytest.raises(SpecqError, match="--calibrate FILE"):
        small_study(tmp_path, pair, dtypes=("int8_per_tensor",), prompts=str(word_prompts))
    other = tmp_path / "other.txt"
    other.write_text("w4 w5 w6 w7\nw9 w10 w11 w12 w13")
    study, _ = small_study(tmp_path, pair, prompts=str(word_prompts), calibrate=str(other))
    assert study.facts.scale_sources == {"fp8_e4m3": "calibration"}
    assert "scale_one" not in {v.code for v in study.recommendations["fp8_e4m3"].verdicts}


def test_given_text_warns_when_the_target_did_not_write_it(tmp_path):
    """--text given: responses sampled from the target pass; random tokens in their place are noticed by sum(b - a)."""
    pair = (save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2))
    rng = np.random.default_rng(0)
    prompts = [" ".join(f"w{i}" for i in rng.integers(3, VOCAB, 6)) for _ in range(24)]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    options = dict(num_prompts=24, output_tokens=40, prompts=str(path))
    sampled, _ = small_study(tmp_path / "a", pair, **options)
    by_prompt = {t.prompt.tokens: t.response for t in sampled.main.texts}
    for name, warned in (("own", False), ("random", True)):
        rows = []
        for ids, response in by_prompt.items():
            given = list(response) if name == "own" else rng.integers(3, VOCAB, 40).tolist()
            rows.append({"prompt_token_ids": list(ids), "response_token_ids": given})
        rows = [r for r in rows if len(r["response_token_ids"]) > 1]
        path.write_text("\n".join(map(json.dumps, rows)))
        study, _ = small_study(tmp_path / name, pair, text="given", **options)
        rec = study.recommendations["fp8_e4m3"]
        assert any("do not look sampled" in w for w in rec.warnings) == warned, name
        assert rec.mu_shift.text == "given"


@pytest.mark.parametrize("text", ["own", "both"])
def test_own_text_is_coupled_and_named(tmp_path, text):
    """--text own|both: mu_shift_own is there by name; with own alone mu_shift is the own-text one too."""
    study, folder = small_study(tmp_path, text=text)
    rec = study.recommendations["fp8_e4m3"]
    assert rec.mu_shift_own.text == "own" and rec.mu_shift.text == ("own" if text == "own" else "same")
    if text == "own":
        assert rec.mu_shift == rec.mu_shift_own
    own, same = study.own["fp8_e4m3"].texts, study.main.texts
    shared = sum(a.response[0] == b.response[0] for a, b in zip(own, same, strict=True))
    assert shared >= 4  # coupled by shared noise: first tokens mostly agree
    assert "fp8_e4m3+bf16" in strict_json(folder / "study.json")["arms_own_text"]


def test_one_prompt_gives_nulls_and_a_warning_not_nan(tmp_path):
    """With a single document there is no spread: intervals and standard errors are null, with a warning that says why."""
    study, folder = small_study(tmp_path, num_prompts=1)
    rec = strict_json(folder / "fp8" / "recommendation.json")
    assert rec["mu_shift"]["ci95"] == [None, None] and rec["mu_shift"]["se"] is None
    assert rec["mu_shift"]["significant"] is False and any("one document" in w for w in rec["warnings"])
    assert rec["speedup"]["ci95"] == [None, None] and rec["decision"].startswith("measure more")


def test_a_text_of_one_token_voids_no_interval(tmp_path, recwarn):
    """Three prompts, one of which the target answers by EOS: intervals come from the other two and a warning says so; with two
    prompts one document is left, intervals are null, and that is the reason given."""
    pair = (save_model(tmp_path / "t", seed=6, scale=3.0), save_model(tmp_path / "d", seed=2, num_hidden_layers=1))
    rng = np.random.default_rng(0)
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(3, VOCAB, 12)), "id": f"p{n}"} for n in range(3)]
    options = dict(prompts=str(tmp_path / "p.jsonl"), output_tokens=48, k_max=4, current_k=3)
    for count in (3, 2):
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows[-count:])))
        study, folder = small_study(tmp_path / str(count), pair, num_prompts=count, **options)
        assert sum(t.positions == 0 for t in study.main.texts) == 1
        rec = strict_json(folder / "fp8" / "recommendation.json")
        intervals = [rec["speedup"]["ci95"], rec["break_even"]["speed_ratio_ci95"], rec["mu_shift"]["ci95"]]
        known = count == 3
        assert all((x is not None) == known for bounds in intervals for x in bounds)
        assert any("one document only" in w for w in rec["warnings"]) != known
        assert ("one document shows no spread" in rec["decision"]) != known
        assert any(f"1 of {count} texts end at their first token" in w for w in rec["warnings"])
        assert strict_json(folder / "study.json")["bootstrap"]["documents"] == count - 1
    assert not [w for w in recwarn.list if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("rule", [("greedy", "standard"), ("probabilistic", "strict")])
def test_other_rules_run_and_are_named(tmp_path, rule):
    """Greedy drafting and strict verification: the rule is in the JSON, and vLLM's options follow or a warning says not."""
    study, folder = small_study(tmp_path, draft_sampling=rule[0], verify=rule[1])
    rec = study.recommendations["fp8_e4m3"]
    assert (rec.sampling.draft_sampling, rec.sampling.verify) == rule
    assert ("strictly" in " ".join(rec.warnings)) == (rule[1] == "strict")
    if rec.vllm.speculative_config:
        assert rec.vllm.speculative_config["draft_sample_method"] == rule[0]
    assert rule[0] in strict_json(folder / "study.json")["rule"]


def test_truncation_on_both_sides_warns_about_vllm(tmp_path):
    """With top-p, `same` is not what vLLM does to its draft: a warning says so, and `temperature` has none."""
    both, _ = small_study(tmp_path / "a", top_p=0.8)
    assert any("temperature only" in w for w in both.recommendations["fp8_e4m3"].warnings)
    one, _ = small_study(tmp_path / "b", top_p=0.8, draft_transform="temperature")
    assert not any("temperature only" in w for w in one.recommendations["fp8_e4m3"].warnings)
    assert one.recommendations["fp8_e4m3"].baseline_mu_accepted != both.recommendations["fp8_e4m3"].baseline_mu_accepted


def test_bf16_against_itself_is_exactly_nothing(tmp_path):
    """Check 2 through the main job: the baseline format as format under test has a shift of exactly 0, not significant."""
    study, _ = small_study(tmp_path, dtypes=("bf16",))
    shift = study.recommendations["bf16"].mu_shift
    assert (shift.value, shift.se, shift.ci95, shift.significant) == (0.0, 0.0, (0.0, 0.0), False)


def test_a_report_that_cannot_be_drawn_costs_no_measurement(tmp_path, monkeypatch):
    """When drawing fails the study stays, the message says so, and drawing again completes it."""
    from specq.errors import SpecqError
    from specq.report import plots
    from specq.study import draw

    with monkeypatch.context() as broken:
        broken.setattr(plots, "write_plots", lambda *a: (_ for _ in ()).throw(ValueError("no font")))
        with pytest.raises(SpecqError, match="complete, but its report could not be drawn .ValueError: no font"):
            small_study(tmp_path)
    assert strict_json(tmp_path / "out" / "study.json")["tokens"]["scored"] > 0
    draw(tmp_path / "out")
    assert (tmp_path / "out" / "fp8" / "report.html").is_file()


def test_q16_weight_errors_move_both_arms_and_not_the_shift(tmp_path, word_prompts):
    """Q-16: weights rounded to powers of two (the draft keeps the good ones) lower mu of the baseline and of the format
    alike: the shift stays the cache's own, far smaller."""
    from safetensors.torch import load_file, save_file

    pair = (save_model(tmp_path / "t", seed=1, scale=3.0), save_model(tmp_path / "d", seed=1, scale=3.0))
    found = {}
    for name in ("own", "rounded"):
        study, _ = small_study(tmp_path / name, pair, ("int8",), prompts=str(word_prompts))
        rec = study.recommendations["int8_per_token_head"]
        found[name] = rec.baseline_mu_accepted["5"], rec.mu_accepted["5"], rec.mu_shift.value
        weights = load_file(pair[0] / "model.safetensors")
        rounded = {n: w.sign() * w.abs().clamp_min(1e-9).log2().round().exp2() for n, w in weights.items()}
        save_file(rounded, pair[0] / "model.safetensors", metadata={"format": "pt"})
    (base, mine, shift), (base_rounded, mine_rounded, shift_rounded) = found.values()
    assert base - base_rounded > 1 and mine - mine_rounded > 1
    assert max(abs(shift), abs(shift_rounded)) < 0.2 * (base - base_rounded)


def test_no_speculation_now_still_tells_the_shift(tmp_path):
    """Current K = 0: mu_shift is told for the recommended K (or k_max), not a trivial 0 at K = 0."""
    study, _ = small_study(tmp_path, current_k=0)
    rec = study.recommendations["fp8_e4m3"]
    assert rec.current_num_speculative_tokens == 0 and rec.mu_shift.k == (rec.recommended_num_speculative_tokens or 5)
    assert rec.mu_shift.value != 0 and rec.speedup.dtype_at_current == 1.0


def test_generation_config_sampling_is_used_unless_overridden(tmp_path, word_prompts):
    """As vLLM does: temperature and top_p of generation_config apply; the command line wins."""
    pair = (save_model(tmp_path / "t", seed=1), save_model(tmp_path / "d", seed=2))
    (pair[0] / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}))
    study, _ = small_study(tmp_path / "a", pair, prompts=str(word_prompts))
    assert (study.facts.transform.temperature, study.facts.transform.top_p) == (0.6, 0.9)
    study, _ = small_study(tmp_path / "b", pair, prompts=str(word_prompts), temperature=0.0)
    assert study.facts.transform.greedy and study.facts.transform.top_p == 0.9


def test_overwrite_replaces_studies_and_nothing_else(tmp_path):
    """--overwrite on a directory that holds something else is refused and leaves it; a study is replaced."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    out = run("study", *SMALL, "--out", folder, "--overwrite", cwd=tmp_path)
    assert out.returncode == 2 and "no study" in out.stderr and (folder / "thesis.tex").read_text() == "years of work"
    for bad in (tmp_path / "mine" / "thesis.tex", "."):
        assert run("study", *SMALL, "--out", bad, "--overwrite", cwd=tmp_path).returncode == 2


def test_an_edited_timings_file_is_another_configuration(tmp_path):
    """The answer depends on the timings file's content, so editing it is not answered from the finished study."""
    timing = tmp_path / "t.json"
    kinds = [("draft", 0.3, "bf16"), ("target", 1.0, "bf16"), ("target", 1.0, "fp8")]
    rows = [{"kind": k, "batch": 1, "context": 1, "new_tokens": 1, "kv_format": f, "seconds": s} for k, s, f in kinds]
    timing.write_text(json.dumps(rows))
    args = ["study", *SMALL, "--num-prompts", "2", "--cost", timing, "--out", tmp_path / "out"]
    assert run(*args, cwd=tmp_path).returncode == 0
    rows[0]["seconds"] = 5.0
    timing.write_text(json.dumps(rows))
    again = run(*args, cwd=tmp_path)
    assert again.returncode == 2 and "another configuration" in again.stderr
    timing.write_text(json.dumps(rows[:2]))
    lacking = run(*args[:-1], tmp_path / "new", cwd=tmp_path)
    assert (
        lacking.returncode == 2
        and "no target timing for fp8_e4m3" in lacking.stderr
        and not (tmp_path / "new").exists()
    )


def test_missing_fp8_units_are_said(tmp_path):
    """An A100 has no FP8 units: a verdict says so for FP8 formats and not for INT8."""
    study, _ = small_study(tmp_path, dtypes=("fp8", "int8"), cost="roofline:a100")
    codes = {n: {v.code for v in r.verdicts} for n, r in study.recommendations.items()}
    assert "no_native_fp8" in codes["fp8_e4m3"] and "no_native_fp8" not in codes["int8_per_token_head"]


def test_few_documents_give_wide_but_sane_intervals(tmp_path):
    """Three documents: draws of one repeated document do not blow the interval up, and an exact 0 is never significant."""
    study, folder = small_study(tmp_path, num_prompts=3, dtypes=("bf16", "fp8"))
    assert study.recommendations["bf16"].mu_shift.significant is False
    null = strict_json(folder / "study.json")["null_arm"]["5"]
    assert max(abs(x) for x in null["ci95"]) < 1000 * null["se"]
