"""The report: five plots and one page from a study's files, whatever a study may lack."""

import copy
import re
import struct
import zlib

import numpy as np
import pytest

from specq import files
from specq.report import write_report
from specq.report.html import write_html
from specq.report.position_plots import clustered, context_edges, sums_by_prompt
from specq.report.view import FormatView

K_MAX, PROMPTS, POSITIONS, FORMAT = 4, 5, 30, "fp8_e4m3"
ARM, BOTH, NASTY = f"{FORMAT}+bf16", f"{FORMAT}+{FORMAT}", "<script>alert(1)</script>"
PLOTS = {"acceptance_curve", "mu_shift", "speedup_vs_k", "ratio_histogram", "context", "break_even", "sensitivity"}


def estimate(value, half=0.002):
    return {"value": value, "se": half / 2, "ci95": [value - half, value + half]}


def shifts(value, significant):
    one = estimate(value)
    return {str(k): one | {"minus_null": one, "significant": significant} for k in range(1, K_MAX + 1)}


def arm_block(mu):
    return {
        "mu_accepted": {str(k): estimate(mu + 0.2 * k, 0.1) for k in range(1, K_MAX + 1)},
        "marginal_survival": {str(k): [0.8**i for i in range(1, k + 1)] for k in range(1, K_MAX + 1)},
        "alpha_mean": 0.7,
        "ratio_mean": 0.7,
        "kl_from_baseline_mean": 0.001,
        "top1_agreement_with_baseline": 0.99,
        "entropy_mean": 1.5,
        "groups": {"<i>code</i>": {"prompts": 2, "mu_accepted": {str(k): 0.9 for k in range(1, K_MAX + 1)}}},
    }


def curve(batch):
    speed = [1.0, 1.3, 1.4, 1.3, 1.1]
    return {
        "batch": batch,
        "context": 512,
        "recommended": 2,
        "recommended_bf16": 2,
        "over_bf16": 1.05,
        "over_bf16_ci95": [1.01, 1.09],
        "break_even": {
            "k": 3,
            "emitted_ratio": 0.98,
            "emitted_ratio_ci95": [0.97, 0.99],
            "cycle_time_ratio": 0.9,
            "speed_ratio": 0.98 / 0.9,
            "speed_ratio_ci95": [1.0, 1.1],
        },
        "speedup": speed,
        "speedup_ci95": [[s - 0.1, s + 0.1] for s in speed],
        "speedup_bf16": speed,
        "speedup_bf16_ci95": [[s - 0.1, s + 0.1] for s in speed],
        "cycle_seconds": [0.01 * (1 + 0.2 * k) for k in range(K_MAX + 1)],
        "cycle_seconds_bf16": [0.011 * (1 + 0.2 * k) for k in range(K_MAX + 1)],
    }


def sensitivity():
    point = {"recommended": 2, "recommended_bf16": 3, "over_bf16": 1.05, "ci95": [1.01, 1.09]}
    return {"at": {"batch": 1, "context": 512}} | {
        key: [point | {"x": x} for x in xs]
        for key, xs in (("alpha", (-0.1, 0.0, 0.1)), ("draft_cost", (0.5, 1.0, 2.0)), ("batch", (1, 8)))
    }


def groups():
    return [
        {
            "name": "<i>code</i>",
            "documents": 2,
            "k": 3,
            "mu_bf16": 0.9,
            "mu": 0.9,
            "best": 1,
            "loss": 0.02,
            "loss_ci95": [0.0, 0.05],
        }
    ]


def side(source):
    return {
        "source": source,
        "parameters": 1000,
        "checkpoint_dtype": "bfloat16",
        "compute_dtype": "float32",
        "geometry": {"layers": 2, "heads": 2},
        "kv_bytes_per_token": {n: {"codes": 64, "scales": 4} for n in ("bf16", FORMAT)},
        "kv_scale_sources": ["one"],
    }


def fake_study():
    """The parts of a study.json that the report reads, small."""
    return {
        "configuration": {
            "k_max": K_MAX,
            "current_k": 3,
            "draft_sampling": "probabilistic",
            "verify": "standard",
            "draft_transform": "same",
            "query_dtype": "auto",
            "text": "same",
        },
        "directories": {FORMAT: "fp8"},
        "environment": {"command": "specq study", "date": "2026-01-01", "device": None},
        "pair": {"name": NASTY, "target": side("<b>target</b>"), "draft": side("draft")},
        "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        "rule": "probabilistic draft, standard verification",
        "prompts": {
            "source": "<u>prompts</u>.jsonl",
            "records": 9,
            "kept": PROMPTS,
            "scored": PROMPTS,
            "truncated": 1,
            "responses_truncated": 0,
            "too_short": 0,
            "not_drawn": 0,
            "shapes": {"prompt": 9},
            "skipped_records": 1,
            "skipped": [{"line": 7, "reason": "<em>empty</em> prompt"}],
            "tokens_per_prompt_mean": 512.0,
        },
        "tokens": {"scored": PROMPTS * POSITIONS, "ended_by_eos": 1},
        "scales": {FORMAT: "one"},
        "saturated_per_layer": {},
        "arms": {n: arm_block(mu) for n, mu in (("bf16+bf16", 0.5), ("null", 0.5), (ARM, 0.49), (BOTH, 0.48))},
        "null_arm": {str(k): estimate(0.00001, 0.0001) for k in range(1, K_MAX + 1)},
        "shifts": {ARM: shifts(-0.0123, True), BOTH: shifts(-0.0234, True)},
        "arms_own_text": {},
        "shifts_own_text": {},
        "text_sampled_from_target": {"sum_b_minus_a_mean": 0.1, "se": None, "z": 0.0},
        "decisions": {FORMAT: {"curves": [curve(1), curve(8)], "sensitivity": sensitivity(), "groups": groups()}},
        "cost": {"source": "roofline:$h100$"},
        "bootstrap": {"draws": 2000, "documents": PROMPTS, "seed": 0},
        "timings_seconds": {"score": 1.5},
    }


def fake_recommendation():
    shift = {"k": 3, "text": "same", "null_value": 0.0, "null_ci95": [0.0, 0.0], "significant": True}
    return {
        "pair": NASTY,
        "target_kv_dtype": FORMAT,
        "vllm_kv_cache_dtype": "fp8",
        "baseline_mu_accepted": {str(k): 0.5 + 0.2 * k for k in range(1, K_MAX + 1)},
        "mu_accepted": {str(k): 0.49 + 0.2 * k for k in range(1, K_MAX + 1)},
        "mu_shift": shift | estimate(-0.0123),
        "mu_shift_own": shift | estimate(-0.3, 0.4) | {"text": "own", "significant": False},
        "current_num_speculative_tokens": 3,
        "recommended_num_speculative_tokens": 2,
        "recommended_schedule": [[1, 8, 2]],
        "speedup": {
            "retuning_gain": 0.0769,
            "ci95": [0.05, 0.11],
            "kept_bf16_k": {"k": 3, "loss": 0.07, "ci95": [0.01, 0.12]},
        },
        "break_even": {
            "k": 3,
            "emitted_ratio": 0.98,
            "emitted_ratio_ci95": [0.97, 0.99],
            "cycle_time_ratio": 0.9,
            "speed_ratio": 1.0889,
            "speed_ratio_ci95": [1.0, 1.1],
        },
        "capacity": {
            "server": "8 x h100",
            "context": 512,
            "sequences": 65,
            "bf16_sequences": 35,
            "batch": 65,
            "bf16_batch": 35,
            "tokens_per_second_over_bf16": 1.75,
            "ci95": [1.7, 1.8],
        },
        "cost": {"source": "roofline:$h100$", "details": {"records": [{"seconds": 1.0}], "note": None}},
        "decision": f"enable {FORMAT} & set num_speculative_tokens to 2",
        "verdicts": [{"code": "scale_one", "decision": "calibrate", "evidence": "none was asked for"}],
        "warnings": ["prompts <few>"],
        "vllm": {
            "version": "0.32",
            "serve_args": ["my model", "--kv-cache-dtype", "fp8", "--speculative-config", '{"model": "it\'s"}'],
            "speculative_config": {"model": "it's"},
            "synthetic_acceptance_rates": [0.8, 0.64],
        },
    }


def fake_positions(arms, text="same"):
    """positions.parquet of `arms`; every arm has the same prompts and positions."""
    rng = np.random.default_rng(0)
    n = PROMPTS * POSITIONS
    base = rng.uniform(0.2, 0.95, n)
    parts = {
        name: [] for name in ("arm", "text", "prompt", "context_len", "alpha", "alpha_greedy", "alpha_strict", "ratio")
    }
    for i, arm in enumerate(arms):
        alpha = np.clip(base + 0.01 * i * rng.standard_normal(n), 0, 1)
        parts["arm"].append(np.full(n, arm))
        parts["text"].append(np.full(n, text if "fp8" in arm else "same"))
        parts["prompt"].append(np.repeat([f"<p>{i}" for i in range(PROMPTS)], POSITIONS))
        parts["context_len"].append(np.tile(np.arange(POSITIONS), PROMPTS) + 500)
        for name in ("alpha", "alpha_greedy", "alpha_strict"):
            parts[name].append(alpha.astype(np.float32))
        parts["ratio"].append(np.where(rng.random(n) < 0.5, 1.0, alpha).astype(np.float32))
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


@pytest.fixture
def report(tmp_path):
    """Writes a study's files and its report; returns (page, folder of the format)."""

    def write(study, recommendation, positions=None):
        (tmp_path / "fp8").mkdir()
        files.write_json(tmp_path / "study.json", study)
        files.write_json(tmp_path / "fp8" / "recommendation.json", recommendation)
        positions = positions or fake_positions(["bf16+bf16", "null", ARM, BOTH])
        files.write_parquet(tmp_path / "positions.parquet", positions)
        write_report(tmp_path)
        return (tmp_path / "fp8" / "report.html").read_text(encoding="utf-8"), tmp_path / "fp8"

    return write


def pixels(path):
    """(width, height, number of distinct bytes in the picture) of a PNG file."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    body, at = b"", 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    return width, height, len(set(zlib.decompress(body)))


def test_plots_and_a_page_that_needs_nothing_else(report):
    page, folder = report(fake_study(), fake_recommendation())
    assert {p.stem for p in (folder / "plots").glob("*.png")} == PLOTS
    for path in (folder / "plots").glob("*.png"):
        width, height, levels = pixels(path)
        assert width > 1000 and height > 500 and levels > 50, path.name
        assert f'id="{path.stem}"' in page
    assert page.count("data:image/png;base64,") == len(PLOTS)
    assert not re.search(r"""(?:src|href|url\()\s*=?\s*["']?(?:https?:)?//""", page)
    assert "<script" not in page and "<link" not in page


def page_alone(folder):
    """The page without plots, which are slow to draw."""
    write_html(folder / "report.html", fake_study(), fake_recommendation(), {})
    return (folder / "report.html").read_text(encoding="utf-8")


def test_everything_from_outside_is_escaped(tmp_path):
    page = page_alone(tmp_path)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    for raw in (NASTY, "<b>target", "<u>prompts", "<em>empty", "<i>code", "<few>"):
        assert raw not in page
    assert "&lt;em&gt;empty&lt;/em&gt; prompt" in page
    # what a browser shows is quoted for a shell
    assert "vllm serve &#39;my model&#39; \\\n    --kv-cache-dtype fp8" in page


def test_control_characters_of_names_are_written_out(tmp_path):
    """A name or group that would steer a terminal, or turn the direction of text, appears as escapes; line ends stay."""
    study, rec = fake_study(), fake_recommendation()
    rec["target"] = study["pair"]["target"]["source"] = "evil\x1b[31m\u202e<b>"
    write_html(tmp_path / "report.html", study, rec, {})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "evil\\x1b[31m\\u202e&lt;b&gt;" in page
    assert all(c.isprintable() or c in "\n" for c in page)


def test_the_answer_comes_first_in_full(tmp_path):
    page = page_alone(tmp_path)
    top = page[page.index("<h1>") : page.index("</h1>")]
    assert "-0.0123 [-0.0143, -0.0103] at K = 3 (1.100 to 1.090)" in top and "beyond the noise floor" in top
    assert "num_speculative_tokens = 2 rather than 3 gives +7.7 % [+5.0, +11.0]" in top
    assert page.index("enable fp8_e4m3 &amp; set") < page.index("<h2>Evidence")
    assert "lost by keeping BF16&#39;s best K = 3" in page and "+7.0 %" in page and "[+1.0, +12.0]" in page
    assert "sequences that fit in fp8_e4m3" in page and "1.750x" in page
    assert "<td>0.9800</td><td>0.9000</td><td>+5.0 %</td><td>[+1.0, +9.0]</td>" in page
    assert "-0.3000" in page and "-0.0234" in page  # own text, and the draft's cache in the format too
    assert all(word in page for word in ("accepted", "emitted", "marginal", "conditional"))


def nulled(value):
    """The same JSON with every interval and standard error null, as one document gives."""
    if isinstance(value, dict):
        gone = {"se": None, "ci95": [None, None], "significant": False}
        return {k: gone[k] if k in gone else nulled(v) for k, v in value.items()}
    return value


def test_nulls_are_said_not_available(report):
    study, rec = nulled(fake_study()), nulled(fake_recommendation())
    rec["mu_shift_own"] = rec["vllm"] = None
    page, folder = report(study, rec)
    assert "without an interval, nothing is resolved" in page
    assert page.count(">n/a<") > 10 and "None" not in page and "nan" not in re.sub('base64,[^"]*', "", page)
    assert "vllm serve" not in page and "shift on own text" not in page
    assert len(list((folder / "plots").glob("*.png"))) == len(PLOTS)


def test_speculation_off_now(report):
    study, rec = fake_study(), fake_recommendation()
    rec["current_num_speculative_tokens"] = rec["mu_shift"]["k"] = rec["mu_shift_own"]["k"] = 0
    page, _ = report(study, rec)
    assert "num_speculative_tokens = 2 rather than 0" in page and "so mu is shown at K = 2" in page


def test_dropping_speculation(report):
    rec = fake_recommendation() | {"recommended_num_speculative_tokens": 0, "recommended_schedule": [[1, 8, 0]]}
    rec["vllm"] |= {"speculative_config": None, "synthetic_acceptance_rates": []}
    page, _ = report(fake_study(), rec)
    assert "dropping speculation (K = 0 rather than 3)" in page and "No speculative_config" in page


def test_own_text_only(report):
    study, rec = fake_study(), fake_recommendation()
    study["arms_own_text"] = {n: study["arms"].pop(n) for n in (ARM, BOTH)}
    for block in study["arms_own_text"].values():
        del block["kl_from_baseline_mean"], block["top1_agreement_with_baseline"]
    study["shifts_own_text"], study["shifts"] = study["shifts"], {}
    rec["mu_shift"]["text"] = "own"
    page, _ = report(study, rec, fake_positions(["bf16+bf16", "null", ARM, BOTH], text="own"))
    assert "beyond the noise floor; own text, paired" in page and "1.090" in page


def test_the_baseline_as_the_format_under_test(report):
    study, rec = copy.deepcopy(fake_study()), fake_recommendation() | {"target_kv_dtype": "bf16", "mu_shift_own": None}
    study["decisions"]["bf16"] = study["decisions"][FORMAT]
    study["arms"] = {n: study["arms"][n] for n in ("bf16+bf16", "null")}
    study["shifts"] = {}
    study["configuration"]["draft_sampling"] = "greedy"
    page, _ = report(study, rec, fake_positions(["bf16+bf16", "null"]))
    assert "BF16, the baseline itself, has 1.100" in page and "Shift of mu against BF16 (" not in page


def test_certain_acceptance(report):
    positions = fake_positions(["bf16+bf16", "null", ARM, BOTH])
    positions["alpha"][:], positions["ratio"][:] = 1.0, 1.0
    page, folder = report(fake_study(), fake_recommendation(), positions)
    assert all(pixels(p)[2] > 50 for p in (folder / "plots").glob("*.png")) and page


def test_clustered_errors_are_those_of_the_means_over_equal_prompts():
    """With equally many positions per prompt the delta method is the plain standard error over prompts' means."""
    positions = fake_positions(["bf16+bf16", ARM])
    view = FormatView(fake_study(), fake_recommendation())
    base, mine = (view.rows(positions, arm) for arm in ("bf16+bf16", ARM))
    edges = context_edges(positions["context_len"][base])
    before, after = (sums_by_prompt(positions, rows, edges, "alpha") for rows in (base, mine))
    difference, half = clustered(after, before)
    by_prompt = after[0] / after[1] - before[0] / before[1]
    np.testing.assert_allclose(difference, by_prompt.mean(0))
    quantile = 2.7764451052  # Student, 4 degrees of freedom
    np.testing.assert_allclose(half, quantile * by_prompt.std(0, ddof=1) / np.sqrt(PROMPTS))
