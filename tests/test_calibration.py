"""Calibration of the roofline: what made the timings is found again, what they do not determine is said."""

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from test_cli import run

from specq import pairs
from specq.capacity_command import pair_shapes
from specq.cost.calibration import fit
from specq.cost.gpus import Efficiency, get_gpu
from specq.cost.roofline import Roofline
from specq.cost.spec import build, parse_cost
from specq.cost.table import Timing, read_file
from specq.cost_command import as_toml
from specq.errors import SpecqError
from specq.shape import ModelShape

KEPT = Path(__file__).resolve().parents[1] / "studies" / "results" / "llama70b-1b" / "timings.json"
PAIR = pairs.find("llama8b-1b", None, None)
SHAPES = {side: ModelShape.of_registered(getattr(PAIR, side).shape) for side in ("target", "draft")}
H200 = get_gpu("h200")
TRUTH = Efficiency(0.71, 0.42, 0.27, 0.33, 17e-6, 23e-6, 400e-6, "truth")
CASES = [
    ("target", b, c, n, f) for b in (1, 64) for c in (512, 16384) for n in (1, 4, 16) for f in ("bf16", "fp8_e4m3")
]
CASES += [("draft", b, c, 1, "bf16") for b in (1, 64) for c in (512, 16384)]


def timings(truth=TRUTH, gpus=1, cases=CASES, noise=0.0, seed=0, alone=False):
    """Step times that GPUs of these efficiencies take, with relative noise; of one of them, `alone`, no communication."""
    made = Roofline(replace(H200, efficiency=truth), *SHAPES.values(), gpus)
    rng = np.random.default_rng(seed)
    out = []
    for kind, batch, context, new, fmt in cases:
        terms = made.terms(kind, batch, context, new, fmt)
        seconds = (terms.alone if alone else terms.seconds)(truth) * float(np.exp(noise * rng.standard_normal()))
        at = {"kind": kind, "batch": batch, "context": context, "new_tokens": new, "kv_format": fmt}
        out.append(Timing(**at, seconds=seconds))
    return out


@pytest.mark.parametrize(
    "truth",
    [
        TRUTH,
        replace(TRUTH, step_seconds=0.0),
        replace(TRUTH, matrix=0.08, layer_seconds=300e-6),  # far from what is assumed: a GPU driven by eager Python
        replace(TRUTH, layer_seconds=0.0, step_seconds=2e-3),
    ],
)
def test_timings_give_back_what_made_them(truth):
    """Exact timings of known factors: rates within 1 %, times within 5 % of the largest of them, residuals under 0.3 %."""
    found = fit(timings(truth), SHAPES, H200)
    got = found.efficiency
    assert (got.bandwidth, got.matrix) == pytest.approx((truth.bandwidth, truth.matrix), rel=0.01)
    waits = np.array([[32 * e.layer_seconds, e.step_seconds] for e in (got, truth)])
    assert np.abs(waits[0] - waits[1]).max() <= 0.05 * waits[1].sum()
    assert found.as_dict()["relative_error_largest"] < 0.003
    assert got.link == H200.efficiency.link and "calibrated on" in got.source  # one GPU has no link to fit


def test_tensor_parallel_timings_give_link_and_latency():
    """8 GPUs: the link's rate and the all-reduce's latency come out too; launches per layer hide behind the latter."""
    found = fit(timings(gpus=8), SHAPES, H200, 8)
    assert found.efficiency.link == pytest.approx(0.33, rel=0.02)
    together = 32 * found.efficiency.layer_seconds + 65 * found.efficiency.reduce_seconds
    assert together == pytest.approx(32 * 17e-6 + 65 * 23e-6, rel=0.05)
    assert found.undetermined == ["layer_seconds"]


def share_file(path, share_of=2):
    """A timings file of one GPU's share, of known factors but the communication's."""
    records = timings(gpus=share_of, alone=True)
    path.write_text(json.dumps({"records": [t.model_dump() for t in records], "share_of": share_of}))
    return path, records


def test_one_gpus_share_gives_its_rates_and_leaves_the_link(tmp_path):
    """One of 2 GPUs by itself: its rates and waits come out, link and all-reduce stay as assumed to the bit and are named;
    a step of both is the share's time plus exactly the data sheet's communication."""
    path, records = share_file(tmp_path / "t.json")
    cost = build(parse_cost(f"roofline:2xh200@{path}"), *SHAPES.values())
    got, assumed = cost.efficiency, H200.efficiency
    assert (got.bandwidth, got.matrix) == pytest.approx((TRUTH.bandwidth, TRUTH.matrix), rel=0.01)
    assert 32 * got.layer_seconds + got.step_seconds == pytest.approx(32 * 17e-6 + 400e-6, rel=0.02)
    assert (got.link, got.reduce_seconds) == (assumed.link, assumed.reduce_seconds)
    assert cost.details["calibration"]["undetermined"] == ["link", "reduce_seconds"]
    assert (
        cost.details["calibration"]["share_of"] == 2 and cost.details["calibration"]["relative_error_largest"] < 0.003
    )
    assert "one GPU's share of 2, but link and reduce_seconds assumed, not measured" in cost.details["note"]
    for i, t in enumerate(records):
        hidden, layers, vocab = (4096, 32, 128256) if t.kind == "target" else (2048, 16, 128256)
        sent = (
            t.batch * t.new_tokens * 2 * (4 * layers * hidden + vocab) / 2
        )  # half of two all-reduces and of the logits
        link = sent / (450e9 * assumed.link) + (2 * layers + 1) * assumed.reduce_seconds
        step = cost.step_time(t.kind, t.batch, t.context, t.new_tokens, t.kv_format)
        assert step == pytest.approx(cost.calibration.seconds[i] + link, rel=1e-12)


def test_a_share_beside_whole_steps_tells_communication_from_the_rest():
    """Whole steps alone hardly tell a layer's waiting from its two all-reduces. With the share's times every factor that made
    both is found, and the errors of both are the noise."""
    truth = replace(TRUTH, step_seconds=0.0, layer_seconds=80e-6, reduce_seconds=60e-6)
    whole, alone = timings(truth, 2, noise=0.01), timings(truth, 2, noise=0.01, seed=1, alone=True)
    lone, found = fit(whole, SHAPES, H200, 2), fit(whole, SHAPES, H200, 2, share=alone)
    assert "layer_seconds" in lone.undetermined and lone.efficiency.layer_seconds < truth.layer_seconds / 2
    for name in ("bandwidth", "matrix", "attention", "link", "layer_seconds", "reduce_seconds"):
        near = 0.1 if name == "link" else 0.03  # all-reduces are few bytes here
        assert getattr(found.efficiency, name) == pytest.approx(getattr(truth, name), rel=near), name
    assert len(found.residuals) == len(whole) and len(found.beside) == len(alone)
    for errors in (found.residuals, np.log(found.beside)):
        assert 0.005 < np.sqrt(np.mean(errors**2)) < 0.015
    assert found.as_dict()["share_relative_error_rms"] == pytest.approx(np.sqrt(np.mean(np.log(found.beside) ** 2)))


def test_a_share_is_no_step(tmp_path):
    """As a table of step times a share's file is refused, and so is any other number of GPUs: one sentence, code 2."""
    path, _ = share_file(tmp_path / "t.json")
    for cost, says in (
        (
            path,
            f"times of one GPU's share of 2 without their all-reduces, which are no step times: use roofline:2xGPU@{path}",
        ),
        (f"roofline:h200@{path}", "share of 2: they calibrate 2xh200, not 1"),
        (f"roofline:4xh200@{path}", "share of 2: they calibrate 2xh200, not 4"),
    ):
        with pytest.raises(SpecqError) as refused:
            build(parse_cost(str(cost)), *SHAPES.values())
        assert says in str(refused.value)
    bad = run("cost", path, "--gpus", "h200", "--pair", "llama8b-1b")
    assert bad.returncode == 2 and "they calibrate 2xh200" in bad.stderr and "Traceback" not in bad.stderr
    out = tmp_path / "mine.toml"
    said = run("cost", path, "--gpus", "2xh200", "--pair", "llama8b-1b", "--out", out, COLUMNS="160")
    assert said.returncode == 0 and "hardly tell link, reduce_seconds" in said.stdout, said.stderr
    assert "one GPU's share of 2, compared without communication" in said.stdout
    again = build(parse_cost(f"roofline:2x{out}"), *SHAPES.values())
    fitted = build(parse_cost(f"roofline:2xh200@{path}"), *SHAPES.values())
    case = ("target", 8, 4096, 5, "fp8_e4m3")
    assert again.step_time(*case) == fitted.step_time(*case)


def test_what_the_timings_do_not_say_stays_as_assumed():
    """Single tokens of one row are never bound by the matrix rate: it stays at exactly what was assumed, and is named."""
    found = fit(timings(cases=[c for c in CASES if c[1] == c[3] == 1]), SHAPES, H200)
    assert found.efficiency.matrix == pytest.approx(H200.efficiency.matrix) and "matrix" in found.undetermined
    assert found.efficiency.bandwidth == pytest.approx(0.71, rel=0.15) and "bandwidth" not in found.undetermined
    assert found.as_dict()["relative_error_largest"] < 0.01  # weights and waits mix at batch 1, their sum does not


def test_noise_is_left_in_the_residuals():
    """5 % of noise in each of 132 timings: the residuals show it, and rates stay within 5 % in each of ten repetitions."""
    grid = [(b, c) for b in (1, 8, 64, 256) for c in (512, 4096, 32768)]
    cases = [("target", b, c, n, f) for b, c in grid for n in (1, 2, 4, 8, 16) for f in ("bf16", "fp8_e4m3")]
    cases += [("draft", b, c, 1, "bf16") for b, c in grid]
    for seed in range(10):
        found = fit(timings(cases=cases, noise=0.05, seed=seed), SHAPES, H200)
        assert 0.04 < found.as_dict()["relative_error_rms"] < 0.06
        assert (found.efficiency.bandwidth, found.efficiency.matrix) == pytest.approx((0.71, 0.42), rel=0.05)


def test_the_table_is_the_roofline_over_the_measurement():
    """Every row is the fitted roofline's own step time; a format 1.3 times slower than its bytes say shows in its group."""
    records = [t.model_copy(update={"seconds": t.seconds * (1.3 if t.kv_format != "bf16" else 1)}) for t in timings()]
    found = fit(records, SHAPES, H200)
    cost = Roofline(H200, *SHAPES.values(), calibration=found)
    for i, t in enumerate(records):
        row = found.row(i)
        assert row["roofline"] == pytest.approx(cost.step_time(t.kind, t.batch, t.context, t.new_tokens, t.kv_format))
        assert row["roofline_over_measured"] == pytest.approx(row["roofline"] / t.seconds)
    middle = {(g["kind"], g["kv_format"]): g["roofline_over_measured"] for g in found.groups()}
    assert middle["target", "fp8_e4m3"] < 0.95 < 1.05 < middle["target", "bf16"]
    assert sum(g["records"] for g in found.groups()) == len(records)
    assert max(abs(np.log(g["worst"]["roofline_over_measured"])) for g in found.groups()) == pytest.approx(
        found.as_dict()["relative_error_largest"]
    )


def test_rates_above_the_data_sheet_are_named():
    """Timings twice as fast as the hardware can be are of something else."""
    fast = [t.model_copy(update={"seconds": t.seconds / 3}) for t in timings()]
    assert "bandwidth" in fit(fast, SHAPES, H200).impossible and fit(timings(), SHAPES, H200).impossible == []


@pytest.mark.parametrize("pair", ["tiny", "llama8b-1b"])
def test_timings_of_another_model_are_refused(pair, tmp_path):
    """The kept times of a 70B pair against smaller shapes: one sentence that says how to use them, from `--cost` and from
    `specq cost` alike, and nothing written; the same file serves its own pair, and every pair by its factors."""
    path, out = KEPT, tmp_path / "mine.toml"
    shapes = pair_shapes(pair, None, None, None)
    with pytest.raises(
        SpecqError, match="roofline of this pair misses the draft's times of .* by a factor of [23]"
    ) as refused:
        build(parse_cost(f"roofline:2xh200@{path}"), *shapes)
    assert f"`specq cost {path} --pair NAME --gpus NxGPU --out mine.toml`" in str(refused.value)
    bad = run("cost", path, "--gpus", "2xh200", "--pair", pair, "--out", out)
    assert bad.returncode == 2 and str(refused.value) in bad.stderr and not out.exists(), bad.stderr
    own = build(parse_cost(f"roofline:2xh200@{path}"), *pair_shapes("llama70b-1b", None, None, None))
    out.write_text(as_toml(replace(H200, efficiency=own.efficiency)))
    assert build(parse_cost(f"roofline:2x{out}"), *shapes).efficiency.bandwidth == own.efficiency.bandwidth


def test_a_draft_without_a_shape_is_refused():
    """Draft timings need the draft's shape; a target's alone do not."""
    with pytest.raises(SpecqError, match="timings of a draft, whose shape is not given"):
        fit(timings(), {"target": SHAPES["target"]}, H200)
    alone = [c for c in CASES if c[0] == "target"]
    assert fit(timings(cases=alone), {"target": SHAPES["target"]}, H200).efficiency.matrix == pytest.approx(
        0.42, rel=0.01
    )


def write_timings(path, fixed=0.0):
    path.write_text(json.dumps({"records": [t.model_dump() for t in timings()], "fixed": fixed}))
    return path


def test_a_calibrated_cost_keeps_the_files_fixed_term(tmp_path):
    """roofline:GPU@FILE: fitted factors, the file's fixed seconds per cycle, and the residuals in what reports say of it."""
    path = write_timings(tmp_path / "t.json", fixed=3e-4)
    cost = build(parse_cost(f"roofline:h200@{path}"), *SHAPES.values())
    assert cost.source == "roofline:h200@t.json" and cost.fixed == 3e-4
    assert cost.efficiency.bandwidth == pytest.approx(0.71, rel=0.01)
    assert cost.details["calibration"]["records"] == len(CASES) and "calibrated on t.json" in cost.details["note"]
    json.dumps(cost.details, allow_nan=False)


def test_the_command_writes_an_accelerator_of_its_own(tmp_path):
    """Factors, table and JSON; the TOML it writes gives the very step times it found; bad input is one sentence, code 2."""
    path, out = write_timings(tmp_path / "t.json"), tmp_path / "mine.toml"
    said = run("cost", path, "--gpus", "h200", "--pair", "llama8b-1b", "--out", out, COLUMNS="160")
    assert said.returncode == 0, said.stderr
    for text in ("bandwidth", "per step", "calibrated roofline over measurement", "every timing", "16,384"):
        assert text in said.stdout, text
    found = fit(timings(), SHAPES, H200, file="t.json")
    assert tomllib.loads(out.read_text())["efficiency"] == asdict(found.efficiency)
    again = build(parse_cost(f"roofline:{out}"), *SHAPES.values())
    assert again.step_time("target", 8, 4096, 5, "int8") == Roofline(H200, *SHAPES.values(), 1, found).step_time(
        "target", 8, 4096, 5, "int8"
    )
    said = run("cost", path, "--gpus", "h200", "--pair", "llama8b-1b", "--json")
    assert len(json.loads(said.stdout)["rows"]) == len(CASES)
    for args, says in (
        (["--gpus", "h900"], "unknown GPU 'h900'"),
        (["--gpus", "h200", "--out", out], "exists already"),
        (["--gpus", "h200", "--out", tmp_path / "x.json"], "NAME.toml"),
        (["--gpus", "h200", "--out", tmp_path / "none" / "x.toml"], "there is no directory"),
        (["--gpus", "h200", "--draft", "ngram"], "timings of a draft, whose shape is not given"),
        (["--gpus", "3xh200", "--pair", "llama8b-1b"], "cannot be divided over 3"),
    ):
        bad = run("cost", path, *args)
        assert bad.returncode == 2 and says in bad.stderr and "Traceback" not in bad.stderr, (args, bad.stderr)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.toml", "t.json"]


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_is_cut_in_a_narrow_terminal(columns):
    """The kept times: every name and number is whole at 80 columns, and no line is longer than the terminal."""
    said = run("cost", KEPT, "--gpus", "2xh200", "--pair", "llama70b-1b", COLUMNS=str(columns)).stdout
    assert "…" not in said and max(map(len, said.splitlines())) <= columns
    words = set(said.split())
    assert {"reduce_seconds", "int8_per_token_head", "assumed", "measured", "context", "ratio"} <= words
    shapes = dict(zip(("target", "draft"), pair_shapes("llama70b-1b", None, None, None), strict=True))
    file = read_file(str(KEPT))
    found = fit(file.records, shapes, H200, 2, KEPT.name, file.share_of)
    for t, seconds in zip(found.timings, found.seconds, strict=True):
        assert {f"{1e3 * t.seconds:.3f}", f"{1e3 * seconds:.3f}", f"{seconds / t.seconds:.3f}"} <= words
