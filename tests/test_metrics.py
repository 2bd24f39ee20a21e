"""Counters of a server: exact names, sums before ratios, resets, contradictions."""

import json

import pytest
from test_cli import run

from specq.engines.metrics import import_metrics
from specq.errors import SpecqError


def page(path, drafts, drafted, accepted, per_position=(), engine="0", model="m", extra=""):
    """A metrics page as vLLM's prometheus client writes it; returns its path. Lists give one series per engine."""
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
        "# TYPE vllm:spec_decode_num_drafts_total counter",
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
    ]
    every = drafts if isinstance(drafts, list) else [drafts]
    for i, n in enumerate(every):
        label = f'engine="{i if len(every) > 1 else engine}",model_name="{model}"'
        share = len(every)
        for name, value in (("drafts", n), ("draft_tokens", drafted / share), ("accepted_tokens", accepted / share)):
            lines.append(f"vllm:spec_decode_num_{name}_total{{{label}}} {value:.6e}" if value >= 1e6 else
                         f"vllm:spec_decode_num_{name}_total{{{label}}} {value}")  # fmt: skip
            lines.append(f"vllm:spec_decode_num_{name}_created{{{label}}} 1.7769e+09")
        for position, value in enumerate(per_position):
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}} {value / share}'
            )
    path.write_text("\n".join([*lines, extra, ""]))
    return path


def test_m01_created_timestamps_and_scientific_notation(tmp_path):
    """M-01: `_created` gauges of 1.8e9, HELP and TYPE lines count for nothing: K inferred 1, acceptance 0.801."""
    got = import_metrics(page(tmp_path / "a", 6.491797e6, 6.491797e6, 5.2e6))
    assert got.k == 1 and got.counts.acceptance_rate == pytest.approx(0.801, abs=5e-4)
    assert got.counts.drafts == 6491797


def test_m02_accepted_and_emitted_are_two_names(tmp_path):
    """M-02: 4,816 drafts, 33,712 drafted, 12,208 accepted: accepted 2.5349, emitted 3.5349 per cycle, rate 0.3621."""
    out = run("import-metrics", page(tmp_path / "a", 4816, 33712, 12208))
    block = json.loads(out.stdout)
    assert round(block["mean_accepted_per_cycle"], 4) == 2.5349 and round(block["mean_emitted_per_cycle"], 4) == 3.5349
    assert round(block["acceptance_rate"], 4) == 0.3621 and block["drafted_per_cycle"] == 7
    assert block["since"] == "since server start" and block["marginal_survival"] == []


def test_m03_engines_are_summed_before_ratios(tmp_path):
    """M-03: engines 0..3 with 22, 15, 29, 20 drafts: 86 in all; the mean of ratios would be another number."""
    got = import_metrics(page(tmp_path / "a", [22, 15, 29, 20], 344, 172))
    assert got.counts.drafts == 86 and got.counts.mean_accepted == 2.0
    assert [c.drafts for c in got.engines.values()] == [22, 15, 29, 20]
    ratios = [c.mean_accepted for c in got.engines.values()]
    assert sum(ratios) / 4 != pytest.approx(2.0)


def test_m04_differences_and_counter_resets(tmp_path):
    """M-04: two scrapes give their difference; a counter that fell, or vanished, is a reset and never a negative rate."""
    before, after = page(tmp_path / "a", 100, 400, 150), page(tmp_path / "b", 187, 659, 317)
    got = import_metrics(before, after)
    assert (got.counts.drafts, got.counts.drafted, got.counts.accepted) == (87, 259, 167)
    assert got.since == "between a and b"
    with pytest.raises(SpecqError, match="counter reset: .*num_drafts_total of engine 0 was 187 and is 100"):
        import_metrics(after, before)
    other = page(tmp_path / "c", 500, 2000, 900, engine="1")
    with pytest.raises(SpecqError, match="counter reset"):
        import_metrics(before, other)
    with pytest.raises(SpecqError, match="counts no cycle"):
        import_metrics(before, before)


def test_m05_per_position_series_are_not_accepted_tokens(tmp_path):
    """M-05: accepted 167, per position 70/55/42, drafted 259: 0.645 and not 1.29; contradictions are no number."""
    got = import_metrics(page(tmp_path / "a", 87, 259, 167, (70, 55, 42)))
    assert round(got.counts.acceptance_rate, 3) == 0.645
    assert [round(x, 3) for x in got.counts.marginal] == [0.805, 0.632, 0.483]
    assert got.counts.conditional[1] == 55 / 70
    for wrong in (
        (87, 259, 168, (70, 55, 42)),
        (87, 259, 167, (55, 70, 42)),
        (69, 259, 167, (70, 55, 42)),
        (87, 160, 167, ()),
        (0, 5, 0, ()),
    ):
        with pytest.raises(SpecqError, match="inconsistent counts"):
            import_metrics(page(tmp_path / "w", *wrong))


def test_pages_that_are_none_are_refused(tmp_path):
    """Other text, broken lines, values that are no counts, several models: a sentence and exit code 2."""
    path = tmp_path / "x"
    for body, says in (
        ("<html>", "has no vllm:spec_decode_num_drafts_total"),
        ("vllm:spec_decode_num_drafts_total{engine= 5", "no Prometheus text"),
        ("vllm:spec_decode_num_drafts_total NaN", "no count"),
        ("vllm:spec_decode_num_drafts_total -1", "no count"),
        ("vllm:spec_decode_num_drafts_total 0.5", "no count"),
        ("vllm:spec_decode_num_drafts_total 1e300", "no count"),
        ("vllm:spec_decode_num_drafts_total 1\nvllm:spec_decode_num_drafts_total 2", "appears twice"),
    ):
        path.write_text(body)
        out = run("import-metrics", path)
        assert out.returncode == 2 and says in out.stderr and "Traceback" not in out.stderr, out.stderr
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecqError, match="not UTF-8"):
        import_metrics(path)
    several = page(path, 10, 20, 5, extra='vllm:spec_decode_num_drafts_total{engine="0",model_name="n"} 7')
    with pytest.raises(SpecqError, match="several models .m, n.; say which with --model"):
        import_metrics(several)
    assert import_metrics(several, model="m").counts.drafts == 10
