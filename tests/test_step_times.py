"""Step times of a pair's shape: the whole command on a tiny shape with the kernels interpreted and a clock of its own."""

import json
import re
import shutil
from pathlib import Path

import pytest
import specq_kernels.bench
from specq_kernels.codec import INTERPRETED

from specq import pairs
from specq.cost.gpus import Efficiency, get_gpu
from specq.cost.roofline import Roofline
from specq.cost.table import TableCost, Timing, read_file
from specq.errors import SpecqError
from specq.pairs import Shape, Side
from specq.shape import ModelShape
from studies import step_times, step_times_page
from studies.common import curves

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs the kernels in Triton's interpreter")

ROOT = Path(__file__).parents[1]
SHAPES = {
    "target": Shape(3, 128, 256, 4, 2, 64, 512, False, positions=4096),
    "draft": Shape(2, 64, 128, 2, 2, 64, 512, True, positions=4096),
}
MACHINE = {
    "pair": "toy", "gpus": 1, "share_of": 2, "gpu": "NVIDIA H200", "torch": "2", "triton": "3", "cuda": "13", "nccl": "2",
    "attention": {"target": "triton", "draft": "triton"}, "command": "python studies/step_times.py --pair toy --share 2",
}  # fmt: skip


class Clock:
    """Runs the first two calls and says that it took 100 microseconds; stops like Ctrl-C after `patience` measurements."""

    def __init__(self, patience: int = 10**9) -> None:
        self.left = patience

    def __call__(self, calls, repeats):
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        for call in calls[:2]:
            assert bool(call().isfinite().all())
        return [90.0, 100.0, 120.0]


@pytest.fixture
def toy(monkeypatch):
    """A pair so small that a CPU measures it, at a few points."""
    pair = pairs.Pair("toy", "", *(Side(role, True, s) for role, s in SHAPES.items()))
    monkeypatch.setattr(step_times.pairs, "find", lambda *names: pair)
    monkeypatch.setattr(step_times, "describe", lambda *given: dict(MACHINE))
    settings = {"DEVICE": "cpu", "BATCHES": (1, 3), "CONTEXTS": (20, 40), "NEW": (1, 2)}
    for name, value in settings.items():
        monkeypatch.setattr(step_times, name, value)
    monkeypatch.setattr(step_times, "TIMED", {"target": (("bf16", "fp8_e4m3"), (1, 2)), "draft": (("bf16",), (1, 2))})
    return monkeypatch


def timed(monkeypatch, out, patience=10**9, share_of=2):
    monkeypatch.setattr(specq_kernels.bench, "graph_times", Clock(patience))
    step_times.measure("toy", out, share_of)
    return read_file(str(out / "timings.json"))


def test_a_share_is_measured_resumed_and_never_mixed(toy, tmp_path):
    """Every point once: layers x the layer's time + the head's. Stopped within a group, the groups before it are kept and
    the next run adds the rest to the same file as an undisturbed run's; another machine's is refused."""
    whole = timed(toy, tmp_path / "a")
    assert whole.share_of == 2 and len(whole.records) == (2 + 1) * 2 * 2 * 2
    assert {(r.kind, r.seconds) for r in whole.records} == {("target", 4e-4), ("draft", 3e-4)}
    with pytest.raises(KeyboardInterrupt):
        timed(
            toy, tmp_path / "b", patience=14
        )  # the LM head of 1, 2, 3 and 6 tokens, two groups of 4, and half of the third
    kept = read_file(str(tmp_path / "b" / "timings.json")).records
    assert kept == whole.records[:8]
    assert timed(toy, tmp_path / "b") == whole
    assert timed(toy, tmp_path / "b", patience=0) == whole  # nothing is left to time
    toy.setattr(step_times, "describe", lambda *given: MACHINE | {"torch": "3"})
    with pytest.raises(SpecqError, match=r"measured with torch = 2, here it is 3: give another --out"):
        timed(toy, tmp_path / "b")


def test_what_a_share_holds(monkeypatch):
    """Over 2: half of the heads, KV heads, MLP columns and vocabulary; all shares together are the model's layer."""
    whole = pairs.find("llama70b-1b", None, None).target.shape
    small = Shape(1, 64, 96, 8, 4, 16, 128, False)
    monkeypatch.setattr(step_times, "DEVICE", "cpu")
    halves, one = step_times.Share(small, 2, 1), step_times.Share(small, 1, 1)
    assert (halves.heads, halves.kv_heads) == (4, 2)
    for name in ("qkv", "out", "up", "down"):
        assert 2 * halves.layers[0][name].numel() == one.layers[0][name].numel()
    layer = sum(t.numel() for t in one.layers[0].values())
    assert layer == small.parameters - 2 * 128 * 64 - 64
    assert 2 * halves.head.numel() == one.head.numel() == 128 * 64
    with pytest.raises(SpecqError, match=r"the target's kv_heads \(8\) cannot be divided over 16"):
        step_times.check_divides({"target": whole}, 16)


def synthetic(folder, share_of, efficiency):
    """Timings of the 70B/1B shape that an H200 of these factors takes, at every point that fits two."""
    pair = pairs.find("llama70b-1b", None, None)
    registered = {"target": pair.target.shape, "draft": pair.draft.shape}
    roofline = Roofline(get_gpu("h200"), *map(ModelShape.of_registered, registered.values()), 2)
    records = []
    for role, fmt, context in step_times.groups():
        for batch in step_times.fitting(registered, 2, (role, fmt, context)):
            for n in step_times.TIMED[role][1]:
                terms = roofline.terms(role, batch, context, n, fmt)
                seconds = (terms.alone if share_of else terms.seconds)(efficiency)
                at = {"kind": role, "batch": batch, "context": context, "new_tokens": n, "kv_format": fmt}
                records.append(at | {"seconds": float(seconds)})
    folder.mkdir()
    (folder / "timings.json").write_text(step_times.timings_text(records, share_of))
    sizes = [
        {"kv_format": f, "batch": 8, "context": 8192, "measured": 1e9, "capacity": 1e9} for f in step_times.FORMATS
    ]
    machine = MACHINE | {"share_of": share_of, "gpus": 1 if share_of else 2, "date": "today", "memory": sizes}
    machine["command"] = "the command"
    (folder / "machine.json").write_text(json.dumps(machine))
    return records, roofline


def test_the_page_of_a_share_says_what_was_not_measured(tmp_path):
    """From times of known factors: errors compare share with share and vanish when calibrated; communication is named as
    assumed; what does not fit is named; a study's configuration reads the file relative to its folder."""
    truth = Efficiency(0.7, 0.5, 0.3, 0.6, 20e-6, 10e-6, 1e-4, "truth")
    folder = tmp_path / "llama70b-1b"
    records, roofline = synthetic(folder, 2, truth)
    step_times_page.page("llama70b-1b", folder)
    text = " ".join((folder / "README.md").read_text().split())
    for says in (
        "No step over 2 GPUs was measured",
        "Communication here is not measured",
        "10 microseconds and its bytes over 0.60 of the 450 GB/s of the data sheet: assumed latency and assumed share",
        "one GPU's share (1/2) of a step, without communication",
        "bf16 64 x 8192; bf16 16, 32, 64 x 32768; fp8_e4m3 32, 64 x 32768",
        "bandwidth x 0.70, matrix rate x 0.50 in products and x 0.30 in attention",
        f"The roofline beside all {len(records)} points",
        "The times hardly tell from the other factors: link, reduce_seconds",
    ):
        assert says in text, says
    points = dict(re.findall(r"\| (draft, \d new|\d new[^|]*|all) \| (\d+) \|", text))
    assert int(points.pop("all")) == len(records) == sum(map(int, points.values())) and "draft, 2 new" in points
    last = re.findall(r"\| (all|speedup at K = 8) \| \d+ \|[^|]*\| [+-](\d\.\d) %, (\d\.\d) %", text)
    assert [name for name, *_ in last] == ["all", "speedup at K = 8"]
    assert all(float(x) <= 0.3 for _, *errors in last for x in errors)  # the factors' small pull towards the assumed
    rows = (folder / "roofline.csv").read_text().splitlines()
    assert len(rows) == 1 + len(records) and all(abs(float(r.split(",")[-1])) < 0.01 for r in rows[1:])
    kept = json.loads((folder / "calibrated.json").read_text())
    assert kept["link"] == 0.6 and "link and reduce_seconds assumed, not measured" in kept["source"]
    assert "Not measured yet" not in text
    assert (folder / "speed.png").stat().st_size > 20_000
    entry = {"pair": "llama70b-1b", "cost": "roofline:2xh200@../llama70b-1b/timings.json"}
    system = curves.System.of(entry, tmp_path / "llama70b-1b")
    first = Timing(**records[0])
    link = roofline.terms("target", 1, 2048, 1, "bf16").communication(get_gpu("h200").efficiency)
    assert system.cost.step_time("target", 1, 2048, 1, "bf16") == pytest.approx(first.seconds + link, rel=2e-3)


def test_the_page_of_a_stopped_run_names_what_is_missing(tmp_path):
    """A page from what there is: missing groups are named, and no curve is drawn from half a point."""
    folder = tmp_path / "x"
    records, _ = synthetic(folder, 2, Efficiency())
    kept = [r for r in records if r["kind"] == "target" and r["kv_format"] == "bf16"]
    (folder / "timings.json").write_text(step_times.timings_text(kept, 2))
    step_times_page.page("llama70b-1b", folder)
    text = (folder / "README.md").read_text()
    assert "int8_per_token_head at 32768; draft bf16 at 2048" in " ".join(text.split())
    assert "K = " not in text.partition("| alpha 0.9 |")[2]


def test_the_page_of_whole_steps_adds_nothing(tmp_path):
    """Tensor-parallel times, all-reduces in them: the same best K as from the table itself, and no word of shares."""
    records, _ = synthetic(tmp_path / "x", None, Efficiency(0.7, 0.5, 0.3, 0.4, 20e-6, 15e-6, 1e-4, "truth"))
    step_times_page.page("llama70b-1b", tmp_path / "x")
    text = " ".join((tmp_path / "x" / "README.md").read_text().split())
    assert "share" not in text and "2 x NVIDIA H200, tensor parallel" in text
    table = TableCost([Timing(**r) for r in records], "t", {})
    curve = step_times_page.gains(table, "fp8_e4m3", 8, 8192, 0.8)
    assert "| 8 x 8192 | fp8_e4m3 |" in text and f"K = {curves.best_k(curve)}, {curve.max():.2f}" in text
    assert curve[0] == 1.0


def test_communication_is_the_whole_step_less_the_share(tmp_path):
    """From a link of known rate and latency: microseconds an all-reduce as in the closed form, for target and draft."""
    truth = Efficiency(0.7, 0.5, 0.3, 0.4, 20e-6, 15e-6, 1e-4, "truth")
    _, roofline = synthetic(tmp_path / "x", None, truth)
    synthetic(tmp_path / "share", 2, truth)
    (tmp_path / "x" / "share.json").write_text((tmp_path / "share" / "timings.json").read_text())
    (tmp_path / "x" / "share-machine.json").write_text((tmp_path / "share" / "machine.json").read_text())
    step_times_page.page("llama70b-1b", tmp_path / "x")
    text = (tmp_path / "x" / "README.md").read_text()
    for tokens, batch, new in ((1, 1, 1), (64, 64, 1), (576, 64, 9)):
        terms = roofline.terms("target", batch, 2048, new, "bf16")
        each = 1e6 * terms.communication(truth) / 160
        assert f"| {tokens} | {each:.0f}, {each:.0f} to {each:.0f} (" in text
    (tmp_path / "x" / "share.json").write_text((tmp_path / "x" / "timings.json").read_text())
    with pytest.raises(SpecqError, match="one GPU's share of the 2 GPUs"):
        step_times_page.page("llama70b-1b", tmp_path / "x")


def test_the_engines_cycles_stand_beside_ones_own(tmp_path):
    """An engine that takes 1 ms more than specq's own steps a cycle, and twice as long with FP8 at K = 4."""
    records, _ = synthetic(tmp_path / "x", None, Efficiency())
    times = {(r["kind"], r["kv_format"], r["new_tokens"]): r["seconds"] for r in records
             if (r["batch"], r["context"]) == (32, 2048)}  # fmt: skip
    cells = []
    for fmt, k in (("bf16", 0), ("bf16", 4), ("fp8_e4m3", 4)):
        own = times["target", fmt, k + 1] + k * times["draft", "bf16", 1]
        took = 2 * own if fmt == "fp8_e4m3" else own + 1e-3
        cells.append({
            "name": f"{fmt}-k{k}", "status": "ok", "target_kv_dtype": fmt, "num_speculative_tokens": k,
            "attention_backends_logged": ["FLASH_ATTN"], "asked_marginal_survival": [0.6, 0.4, 0.2, 0.1][:k],
            "speed": {"cycle_seconds_repeats": [took], "steady_steps": 62},
            "speedup_measured": {"steady": 1.25, "throughput": 1.0, "latency": 1.1},
        })  # fmt: skip
    cells[0].pop("speedup_measured")  # as where plain decoding did not finish
    int8 = {"target_kv_dtype": "int8_per_token_head", "num_speculative_tokens": 0}
    cells.append(int8 | {"name": "int8-k0", "status": "pending", "error": "out of time"})
    cells.append(
        int8
        | {"num_speculative_tokens": 2, "name": "int8-k2", "status": "ok", "speed": {"cycle_seconds_repeats": None}}
    )
    engine = {"vllm": "0.24.0", "versions": {"torch": "2"}, "device": "H200", "dates": ["today"], "timing_mode": "graphs",
              "tensor_parallel_size": 2}  # fmt: skip
    made = {
        "engine": engine,
        "workload": {"requests_in_flight": 32, "context": 2048, "passes": 1, "output_tokens": 9, "prompts": 32},
        "cells": cells,
    }
    (tmp_path / "x" / "vllm.json").write_text(json.dumps(made))
    step_times_page.page("llama70b-1b", tmp_path / "x")
    text = (tmp_path / "x" / "README.md").read_text()
    assert f"| fp8_e4m3 | 4 | FLASH_ATTN | {2e3 * own:.1f} (62) | {1e3 * own:.1f} | -50 % | 2.300 | 1.25 |" in text
    ratio = 2 * own / (times["target", "bf16", 5] + 4 * times["draft", "bf16", 1] + 1e-3)
    assert f"fp8_e4m3 at K = 4: a cycle takes {ratio:.2f} times BF16's" in text
    assert "Not measured: int8-k0 (out of time)." in text and "Not measured: int8-k2 (too few steady steps)." in text
    assert "Not made: batches other than 32, contexts other than 2,048, K other than 0, 2, 4." in text


def test_the_kept_page_is_written_from_the_kept_files(tmp_path):
    """studies/results/llama70b-1b: the page follows from the files beside it, but for last digits of fitted figures."""
    kept = ROOT / "studies" / "results" / "llama70b-1b"
    shutil.copytree(kept, tmp_path / "x", ignore=shutil.ignore_patterns("*.png", "README.md"))
    step_times_page.page("llama70b-1b", tmp_path / "x")
    number = re.compile(r"\d+(?:\.\d+)?")
    for name in ("README.md", "roofline.csv"):
        made, there = ((folder / name).read_text() for folder in (tmp_path / "x", kept))
        assert number.sub("#", made) == number.sub("#", there), name
        for mine, theirs in zip(number.findall(made), number.findall(there), strict=True):
            last_place = 10.0 ** -len(theirs.partition(".")[2])
            assert abs(float(mine) - float(theirs)) < 1.5 * last_place, (name, mine, theirs)
