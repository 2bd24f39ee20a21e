"""Counters of a running server: parsing, differences, restarts, honest intervals. Cases M-01..M-05 and S-28."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from typer.testing import CliRunner

from specq.cli import app
from specq.counters import CycleCounts
from specq.engines.metrics.command import read
from specq.engines.metrics.difference import Reading, difference
from specq.engines.metrics.readings import other_reading
from specq.engines.metrics.summary import choose_k, independent_se, k_measured, shift, summarise, wilson
from specq.engines.metrics.text import Engine, parse
from specq.errors import SpecqError

NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def page(drafts, drafted, accepted, per_position=None, model="m", engine="0"):
    """Prometheus text of one engine as vLLM writes it."""
    labels = f'engine="{engine}",model_name="{model}"'
    lines = []
    for name, value in zip(NAMES, (drafts, drafted, accepted), strict=False):
        lines += [f"# HELP vllm:spec_decode_{name}_total Number of things."]
        lines += [f"# TYPE vllm:spec_decode_{name}_total counter", f"vllm:spec_decode_{name}_total{{{labels}}} {value}"]
    for at, value in enumerate(per_position or ()):
        lines.append(f'vllm:spec_decode_{NAMES[3]}_total{{{labels},position="{at}"}} {value}')
    return "\n".join(lines) + "\n"


def total(text):
    return difference([("one", parse(text, "one"))])["m"].total


def test_created_timestamps_and_scientific_notation():
    """M-01: `_created` gauges are no counters, 6.491797e+06 is a count; K = 1, acceptance 0.801."""
    text = page("6.491797e+06", "6.491797e+06", "5.2e+06")
    for name in NAMES[:3]:
        text += f'vllm:spec_decode_{name}_created{{engine="0",model_name="m"}} 1.7769e+09\n'
    counts = total(text)
    assert (counts.drafts, counts.accepted) == (6491797, 5200000)
    assert k_measured(counts) == 1
    assert counts.acceptance_rate == pytest.approx(0.801, abs=5e-4)


def test_accepted_and_emitted_stand_side_by_side():
    """M-02: accepted 2.5349, emitted 3.5349, acceptance 0.3621 under distinct names."""
    found = summarise(difference([("one", parse(page(4816, 33712, 12208), "one"))])["m"])
    assert found["mu_accepted"]["value"] == pytest.approx(2.5349, abs=5e-5)
    assert found["mean_emitted"]["value"] == pytest.approx(3.5349, abs=5e-5)
    assert found["acceptance_rate"] == pytest.approx(0.3621, abs=5e-5)
    assert found["num_speculative_tokens_measured"] == 7


def test_engines_are_summed_before_ratios():
    """M-03: drafts 22, 15, 29, 20 of four engines make 86, and the rate is of the totals."""
    drafts, accepted = (22, 15, 29, 20), (40, 3, 50, 10)
    text = "".join(page(d, 3 * d, a, engine=str(i)) for i, (d, a) in enumerate(zip(drafts, accepted, strict=True)))
    counts = total(text)
    assert counts.drafts == 86
    assert counts.acceptance_rate == 103 / 258 != np.mean([a / d / 3 for d, a in zip(drafts, accepted, strict=True)])


def test_difference_of_two_scrapes_and_reset():
    """M-04: after minus before; a fallen counter is a restart with no negative count; one file is since the start."""
    before, after = page(100, 300, 150, (70, 50, 30)), page(187, 559, 317, (140, 105, 72))
    counts = difference([("a", parse(before, "a")), ("b", parse(after, "b"))])["m"].total
    assert counts == CycleCounts(87, 259, 167, (70, 55, 42))
    reset = difference([("b", parse(after, "b")), ("a", parse(before, "a"))])["m"]
    assert reset.total == CycleCounts(100, 300, 150, (70, 50, 30))
    assert any("counter reset" in n for n in reset.notes)
    alone = difference([("a", parse(before, "a"))])["m"]
    assert any("since the server's start" in n for n in alone.notes)


def test_restart_that_overtook_the_old_counts_is_seen_by_its_birth():
    """M-04: a server that restarted and counted beyond its old values has another creation time."""
    born = 'vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} {}\n'
    before = page(10, 30, 12, (6, 4, 2)) + born.format(1.0)
    after = page(20, 60, 24, (12, 8, 4)) + born.format(2.0)
    assert difference([("a", parse(before, "a")), ("b", parse(after, "b"))])["m"].total.drafts == 20


def test_per_position_counters_are_not_accepted_tokens():
    """M-05, S-28: accepted 167 of 259 is 0.645 and never 1.29; rates per draft and conditional ones are right."""
    counts = total(page(87, 259, 167, (70, 55, 42)))
    assert counts.acceptance_rate == pytest.approx(0.6448, abs=5e-5)
    assert counts.mean_emitted == pytest.approx(2.9195, abs=5e-5)
    assert counts.marginal == pytest.approx([0.805, 0.632, 0.483], abs=5e-4)
    assert counts.conditional[1] == 55 / 70
    found = summarise(Reading("x", [counts]))
    assert any("not every cycle" in n for n in found["notes"])


@pytest.mark.parametrize(
    "counters",
    [(87, 259, 167, (70, 55, 41)), (87, 259, 167, (55, 70, 42)), (60, 259, 167, (70, 55, 42)), (87, 150, 167, None)],
)
def test_contradicting_counters_give_no_number(counters):
    """M-05: wrong sum, rising positions, more first acceptances than drafts, more accepted than drafted."""
    with pytest.raises(SpecqError, match="inconsistent"):
        total(page(*counters))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no vllm:spec_decode_num_drafts"),
        ("sglang:spec_accept_length 2.1\n", "SGLang exports"),
        ("llamacpp:tokens_predicted_total 5\n", "llama.cpp"),
        (page("NaN", 3, 1), "no count"),
        (page(-1, 3, 1), "no count"),
        (page("1e300", 3, 1), "no count"),
        (page(5, 3, 1) * 2, "twice"),
        ("vllm:spec_decode_num_drafts_total{} 3\n", "lacks"),
        (page(5, 15, 3, (3,)).replace('position="0"', 'position="x"'), "no position"),
        (page(5, 15, 3, (3,)).replace('position="0"', 'position="2"'), "gaps"),
        ("a{b 1", "no Prometheus text"),
    ],
)
def test_unusable_text_is_refused_with_its_reason(text, message):
    with pytest.raises(SpecqError, match=message):
        total(text)


def test_reads_what_the_reference_client_writes():
    """Text of prometheus_client's own exposition, built as vLLM builds its counters."""
    registry = CollectorRegistry()
    for name, value in zip(NAMES, (87, 259, 167), strict=False):
        Counter(f"vllm:spec_decode_{name}", "x", ["model_name", "engine"], registry=registry).labels("m", "0").inc(
            value
        )
    per = Counter(f"vllm:spec_decode_{NAMES[3]}", "x", ["model_name", "engine", "position"], registry=registry)
    for at, value in enumerate((70, 55, 42)):
        per.labels("m", "0", str(at)).inc(value)
    found = parse(generate_latest(registry).decode(), "client")
    assert list(found) == [Engine("m", "0")]
    assert total(generate_latest(registry).decode()) == CycleCounts(87, 259, 167, (70, 55, 42))


def test_several_models_want_a_choice(tmp_path):
    path = tmp_path / "two.prom"
    path.write_text(page(5, 15, 3, model="a") + page(7, 21, 4, model="b"))
    with pytest.raises(SpecqError, match="--model: a, b"):
        read([path])
    assert read([path], "b").total.drafts == 7
    with pytest.raises(SpecqError, match="no counters of model"):
        read([path], "c")


def _stretches(rng, clusters, spread):
    """Counts of `clusters` stretches of 400 cycles at K = 3 whose acceptance differs with standard deviation `spread`."""
    out = []
    for _ in range(clusters):
        alpha = np.clip(0.6 + spread * rng.standard_normal(), 0.01, 0.99)
        out.append(CycleCounts.of_cycles((rng.random((400, 3)) < alpha).tolist()))
    return out


def test_interval_is_widened_by_the_scatter_between_stretches():
    """The pooled interval misses the truth where stretches differ; the clustered one covers it in 95 of 100."""
    rng = np.random.default_rng(0)
    truth = 0.6 + 0.6**2 + 0.6**3 + 0.1**2 * (1 + 3 * 0.6)  # E of a + a^2 + a^3 for a of mean .6 and sd .1
    inside = narrow = 0
    for _ in range(60):
        found = summarise(Reading("x", _stretches(rng, 12, 0.1)))
        lo, hi = found["mu_accepted"]["ci95"]
        inside += lo <= truth <= hi
        lo, hi = found["mu_if_cycles_were_independent"]["ci95"]
        narrow += lo <= truth <= hi
        assert found["overdispersion"] > 1
    assert inside >= 53  # 95 % of 60 less three standard errors
    assert narrow <= 40


def test_too_few_stretches_give_no_interval():
    found = summarise(Reading("x", _stretches(np.random.default_rng(1), 2, 0.0)))
    assert found["mu_accepted"]["ci95"] == [None, None]
    assert any("too narrow" in n for n in found["notes"])


@pytest.mark.parametrize("accepted", [0, 7, 15, 30])
def test_stretches_that_agree_leave_the_sampling_error(accepted):
    """Without positions: at least as wide as the widest that 40 cycles of K = 3 allow, all accepted or none in each.

    At the ends 0 and K a share's 95 % interval reaches 0.0881 inwards with 40 trials (Clopper-Pearson), and Wilson's nearly.
    """
    pages = [(str(n), parse(page(10 * n, 30 * n, accepted * n), "x")) for n in range(5)]
    found = summarise(difference(pages)["m"])
    mu = accepted / 10
    lo, hi = found["mu_accepted"]["ci95"]
    worst = np.sqrt(mu * (3 - mu) / 40)
    assert found["mu_accepted"]["se"] >= worst and found["mu_accepted"]["se"] > 0
    assert lo <= max(0, mu - 1.9599 * worst) and hi >= min(3, mu + 1.9599 * worst) and 0 <= lo <= mu <= hi <= 3
    if mu in (0, 3):
        assert abs(lo - hi) == pytest.approx(3 * 0.0881, rel=0.02)
    assert any("all its drafts or none" in n for n in found["notes"])
    assert not shift(found, found)["significant"]


def test_no_interval_has_a_width_of_zero():
    """With positions too: every draft of every cycle was accepted, or none was, which is no certainty."""
    for per, s in (((40, 40), 1.0), ((40, 0), 0.5), ((0, 0), 0.0)):
        found = summarise(Reading("x", [CycleCounts(40, 80, sum(per), per)] * 4))
        for block in (found["mu_accepted"], found["mean_emitted"], *found["marginal_survival"]):
            assert block["se"] > 0 and block["ci95"][0] < block["ci95"][1]
        assert found["mu_accepted"]["value"] == 2 * s


def test_wilsons_interval():
    """Newcombe (1998), Table I, method 3: 81/263 gives 0.2553 to 0.3662, 15/148 0.0624 to 0.1605, 0/20 0 to 0.1611."""
    for r, n, lo, hi in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(r, n)
        assert (found.lo, found.hi) == pytest.approx((lo, hi), abs=5e-5)


def test_the_unit_of_the_scatter_is_told(tmp_path):
    """M-03 as one scrape: the interval is of four engines, and the table says so; of two engines there is none."""
    accepted = (40, 3, 50, 10)
    engines = [
        page(d, 3 * d, a, engine=str(i)) for i, (d, a) in enumerate(zip((22, 15, 29, 20), accepted, strict=True))
    ]
    (tmp_path / "one.prom").write_text("".join(engines))
    done = CliRunner().invoke(app, ["import-metrics", str(tmp_path / "one.prom")], terminal_width=200)
    assert "the scatter of 4 engines, cut at K = 3" in done.output
    (tmp_path / "two.prom").write_text("".join(engines[:2]))
    done = CliRunner().invoke(app, ["import-metrics", str(tmp_path / "two.prom")], terminal_width=200)
    assert "no interval" in done.output and "scatter of" not in done.output
    idle = "".join(page(0, 0, 0, engine=str(i)) for i in range(2, 6))
    (tmp_path / "idle.prom").write_text("".join(engines[:2]) + idle)
    done = CliRunner().invoke(app, ["import-metrics", str(tmp_path / "idle.prom")], terminal_width=200)
    assert "no interval" in done.output and "scatter of" not in done.output
    for n in range(4):
        (tmp_path / f"{n}.prom").write_text(page(100 * n, 300 * n, 150 * n))
    files = [str(tmp_path / f"{n}.prom") for n in range(4)]
    done = CliRunner().invoke(app, ["import-metrics", *files], terminal_width=200)
    assert "the scatter of 3 scrape intervals of one engine each" in done.output


def test_independent_standard_error_is_that_of_the_histogram():
    counts = CycleCounts(10, 30, 12, (6, 4, 2))
    per_cycle = np.array([3, 3, 2, 2, 1, 1, 0, 0, 0, 0])
    assert independent_se(counts) == pytest.approx(per_cycle.std() / np.sqrt(10))


def test_shift_between_two_servers():
    rng = np.random.default_rng(2)
    a, b = (summarise(Reading("x", _stretches(rng, 20, 0.02))) for _ in range(2))
    assert not shift(a, b)["significant"]
    c = summarise(Reading("y", [CycleCounts(400, 1200, 300, (150, 100, 50)) for _ in range(20)]))
    assert shift(a, c)["significant"] and shift(a, c)["value"] < 0


def test_k_is_chosen_among_the_measured_ones():
    """T-01: alpha 0.7 and c = 0.3 make K = 2; at c = 0.05 the speed still rises at 5, which stays the largest K."""
    survival = [0.7**k for k in range(1, 6)]
    found = choose_k(survival, 0.3)
    assert found["num_speculative_tokens"] == 2
    assert found["speedup"]["2"] == pytest.approx(1.369, abs=5e-4)
    assert choose_k(survival, 0.05)["num_speculative_tokens"] == 5
    assert choose_k([0.3, 0.09], 0.5)["num_speculative_tokens"] == 0


def test_benchmark_result(tmp_path):
    path = tmp_path / "bench.json"
    result = {"spec_decode_num_drafts": 87, "spec_decode_draft_tokens": 259, "spec_decode_accepted_tokens": 167}
    path.write_text(json.dumps(result | {"spec_decode_per_position_acceptance_rates": [70 / 87, 55 / 87, 42 / 87]}))
    assert read([path]).total == CycleCounts(87, 259, 167, (70, 55, 42))


def test_histograms_per_request_are_clusters(tmp_path):
    path = tmp_path / "requests.jsonl"
    rows = [{"metrics": {"speculative_decoding": {"acceptance_histogram": [4, 2, 2, 2]}}} for _ in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    reading = read([path])
    assert reading.clusters == [CycleCounts(10, 30, 12, (6, 4, 2))] * 5
    assert reading.unit == "request"


def test_files_of_several_kinds_are_not_pooled(tmp_path):
    """Two requests and a benchmark run are no three clusters, nor a log line among them: their scatter is of unlike things."""
    requests, bench, log, scrape = (tmp_path / n for n in ("requests.json", "bench.json", "log", "scrape.prom"))
    requests.write_text(json.dumps([{"acceptance_histogram": [4, 2, 2, 2]}] * 2))
    bench.write_text(
        '{"spec_decode_num_drafts": 87, "spec_decode_draft_tokens": 259, "spec_decode_accepted_tokens": 167}'
    )
    log.write_text(
        "SpecDecoding metrics: Mean acceptance length: 2.00, Accepted: 10 tokens, Drafted: 20 tokens,"
        " Per-position acceptance rate: 0.700, 0.300"
    )
    scrape.write_text(page(22, 66, 40))
    for paths in ([requests, bench], [bench, log], [log, requests], [scrape, bench], [requests, bench, log, scrape]):
        with pytest.raises(SpecqError, match="give files of one kind"):
            read(paths)
    assert [len(read([p, p]).clusters) for p in (requests, bench, log)] == [4, 2, 2]


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=400))
def test_log_lines_give_their_counts_back(cycles):
    """A line written as vLLM writes it gives back drafts and accepted, and positions within what rounding hides."""
    counts = CycleCounts.of_cycles(cycles)
    line = (
        f"INFO SpecDecoding metrics: Mean acceptance length: {counts.mean_emitted:.2f}, Accepted throughput: 1.00 tokens/s,"
        f" Drafted throughput: 2.00 tokens/s, Accepted: {counts.accepted} tokens, Drafted: {counts.drafted} tokens,"
        f" Per-position acceptance rate: {', '.join(f'{s:.3f}' for s in counts.marginal)}, Avg Draft acceptance rate: 1.0%"
    )
    reading = other_reading(f"noise\n{line}\n", "log")
    back = reading.total
    assert (back.drafts, back.drafted, back.accepted) == (counts.drafts, counts.drafted, counts.accepted)
    assert back.per_position == counts.per_position  # 400 drafts are too few for three digits to hide one
    assert not reading.exact


def test_a_log_line_of_absurd_counts_ends_in_a_sentence():
    line = (
        "SpecDecoding metrics: Mean acceptance length: 1.50, Accepted: 999999999999999999 tokens, Drafted: 999999999999999999"
        " tokens, Per-position acceptance rate: 0.100, 0.050"
    )
    with pytest.raises(SpecqError, match="inconsistent"):
        other_reading(line, "log")


def test_a_restart_with_another_k_is_a_restart():
    """Other positions mean another server, though every counter is larger than before and no birth is told (M-04)."""
    before, after = page(22, 88, 44, (22, 22, 0, 0)), page(87, 259, 167, (70, 55, 42))
    made = difference([("a", parse(before, "a")), ("b", parse(after, "b"))])["m"]
    assert made.total == CycleCounts(87, 259, 167, (70, 55, 42))
    assert any("counter reset" in n for n in made.notes)


def test_cycles_of_several_k_keep_their_depths_apart():
    """S_k is a share of the cycles that drafted k tokens: by hand, engines of K = 2 and K = 4 with 100 drafts each."""
    text = page(100, 200, 100, (60, 40)) + page(100, 400, 100, (50, 30, 15, 5), engine="1")
    found = summarise(difference([("one", parse(text, "one"))])["m"])
    assert [s["value"] for s in found["marginal_survival"]] == [0.55, 0.35, 0.15, 0.05]
    assert found["conditional_survival"] == pytest.approx([0.55, 70 / 110, 0.5, 5 / 15])
    assert found["num_speculative_tokens_measured"] == 4
    assert any("K = 2, 4" in n for n in found["notes"])
    assert not any("not every cycle" in n for n in found["notes"])


def test_command_prints_and_writes_strict_json(tmp_path):
    for n, text in enumerate((page(100, 300, 150, (70, 50, 30)), page(187, 559, 317, (140, 105, 72)))):
        (tmp_path / f"{n}.prom").write_text(text)
    files = [str(tmp_path / "0.prom"), str(tmp_path / "1.prom")]
    done = CliRunner().invoke(app, ["import-metrics", *files, "--draft-cost", "0.1", "--out", str(tmp_path / "o")])
    assert done.exit_code == 0
    assert re.search(r"0\.6448", done.output)
    found = json.loads((tmp_path / "o" / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert found["choice"]["largest_measured"] == 3


def test_an_out_that_is_no_directory_ends_in_a_sentence(tmp_path):
    """A file that is there stays what it is; where no directory can be made the reason is told, before a server is asked."""
    files = [tmp_path / f"{n}.prom" for n in (1, 2)]
    for n, path in enumerate(files):
        path.write_text(page(100 + n, 300 + 3 * n, 150 + n))
    before = files[1].read_text()
    for out, why in (
        (files[1], "it is a file"),
        (files[1] / "x", "Not a directory"),
        (Path("/proc/zz"), "No such file"),
    ):
        done = CliRunner().invoke(app, ["import-metrics", str(files[0]), "--out", str(out)])
        assert isinstance(done.exception, SpecqError)
        assert f"cannot write to the directory {out}: {why}" in str(done.exception)
    assert files[1].read_text() == before


def test_a_model_is_chosen_where_there_are_models(tmp_path):
    """--model names a series of Prometheus text; other files have none, and silence would let one believe it was obeyed."""
    result = {"spec_decode_num_drafts": 87, "spec_decode_draft_tokens": 259, "spec_decode_accepted_tokens": 167}
    (tmp_path / "bench.json").write_text(json.dumps(result))
    with pytest.raises(SpecqError, match="--model chooses"):
        read([tmp_path / "bench.json"], "m")
    found = summarise(read([tmp_path / "bench.json"]))
    assert found["num_speculative_tokens_measured"] == 3 and not any("marginal" in n for n in found["notes"])


LINES = st.one_of(
    st.text(max_size=60),
    st.builds("vllm:spec_decode_{}{} {}".format, st.sampled_from(NAMES),
              st.sampled_from(["", "_total", "_created", '_total{engine="0",position="0"}', "_total{"]),
              st.sampled_from(["1", "1e999", "NaN", "-3", "0.5", "", "x"])),
    st.builds("SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, Drafted: {} tokens, "
              "Per-position acceptance rate: {}".format, st.floats(1, 9), st.integers(0, 99), st.integers(0, 99),
              st.sampled_from(["", "0.5", "0.9, 0.2", "0.1, 0.9", "1.000, 1.000, 7"])),
    st.builds(json.dumps, st.dictionaries(st.sampled_from(["acceptance_histogram", "spec_decode_num_drafts", "a"]),
              st.recursive(st.integers(-2, 9) | st.none() | st.floats(), lambda x: st.lists(x, max_size=4)), max_size=3)),
)  # fmt: skip


@given(st.lists(LINES, max_size=8).map("\n".join))
def test_any_text_gives_an_answer_or_one_sentence(text):
    """No text gives anything but a summary in strict JSON or a SpecqError."""
    try:
        reading = other_reading(text, "f") or next(iter(difference([("f", parse(text, "f"))]).values()))
        json.dumps(summarise(reading), allow_nan=False)
    except SpecqError as error:
        assert str(error)
