"""Cost models: what the roofline counts, tables, noise, calibration, and what `--cost` accepts."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specq import pairs
from specq.config import DRAWS
from specq.cost import Operating, cycle_time_draws, cycle_times
from specq.cost.base import FreeDraft, Scaled
from specq.cost.gpus import Efficiency, get_gpu, gpus, parse_gpus
from specq.cost.roofline import Roofline
from specq.cost.spec import build, parse_cost
from specq.cost.table import TableCost, Timing, monotone, read_timings
from specq.errors import SpecqError
from specq.kv import get_format
from specq.shape import ModelShape
from specq.tune import speed_curve

AT = Operating(1, 1024, "bf16", "bf16")
LLAMA_70B, LLAMA_1B = (
    ModelShape.of_registered(s.shape)
    for s in (pairs.find("llama70b-1b", None, None).target, pairs.find("llama70b-1b", None, None).draft)
)
PERFECT = Efficiency(1.0, 1.0, float("inf"), 1.0, 0.0, 0.0, 0.0, "perfect")


def perfect(name="h200", gpus=1, target=LLAMA_70B, **efficiency):
    """A roofline without losses, so that every term can be checked alone."""
    return Roofline(replace(get_gpu(name), efficiency=replace(PERFECT, **efficiency)), target, LLAMA_1B, gpus)


def timing(kind="target", batch=2, context=64, new=1, fmt="bf16", seconds=1.0, repeats=None):
    return Timing(
        kind=kind, batch=batch, context=context, new_tokens=new, kv_format=fmt, seconds=seconds, repeats=repeats
    )


# ---------------------------------------------------------------- roofline


def test_roofline_counts_bytes_and_operations():
    """Batch 1: the weights' bytes, without the input embeddings. The K/V of 32 x 32k tokens: 10.74 GB each, half in FP8,
    scales included per token and head. Many new tokens: two operations per weight."""
    gpu, r = get_gpu("h200"), perfect()
    read = 2 * (70553706496 - 128256 * 8192)
    assert r.step_time("target", 1, 1, 1, "bf16") == pytest.approx(read / (gpu.bandwidth * 1e9), rel=1e-4)
    kv = [r.step_time("target", 32, 32768, 1, f) - r.step_time("target", 32, 1, 1, f) for f in ("bf16", "fp8", "int8")]
    assert kv[0] == pytest.approx(32 * 10.737e9 / 4.8e12, rel=1e-3)
    assert kv[1] / kv[0] == pytest.approx(0.5) and kv[2] / kv[0] == pytest.approx(0.5 + 8 / 512)
    product, cache = 32 * 512 * 2 * read / 2 / 989e12, 32 * 513 * 80 * 2 * 8 * 128 * 2 / 4.8e12
    assert r.step_time("target", 32, 1, 512, "bf16") == pytest.approx(product + cache)
    scores = perfect(attention=0.5).step_time("target", 32, 1, 512, "bf16") - product - cache
    assert scores == pytest.approx(32 * 512 * 4 * 64 * 128 * 80 * 513 / 989e12 / 0.5)
    tied = perfect().step_time("draft", 1, 0, 1, "bf16")
    assert tied == pytest.approx(2 * 1235814400 / 4.8e12, rel=1e-3)  # a tied table is the LM head and is read


def test_products_bound_by_arithmetic_still_read_the_cache():
    """Attention runs after the products: 64 x 8 new tokens bind those by arithmetic, and FP8 saves half the cache's time all
    the same, with few new tokens and with many."""
    r = perfect(attention=0.4)
    t = r.terms("target", 64, 8192, 8, "bf16")
    assert t.products > t.weights
    for new in (1, 8, 1024):
        saved = r.step_time("target", 64, 8192, new, "bf16") - r.step_time("target", 64, 8192, new, "fp8")
        assert saved == pytest.approx(64 * 80 * 2 * 8 * 128 * (8192 + new) / 4.8e12, rel=1e-9)


def test_tensor_parallel_divides_and_communicates():
    """8 GPUs: an eighth of weights and KV each; two all-reduces of 2 x 7/8 of the hidden states per layer, one gather."""
    one, eight = perfect(), perfect(gpus=8)
    batch, context = 16, 8192
    reduced = 2 * 80 * 2 * 7 / 8 * batch * 8192 * 2 / 450e9
    gathered = 7 / 8 * batch * 128256 * 2 / 450e9
    alone = one.step_time("target", batch, context, 1, "bf16")
    assert eight.step_time("target", batch, context, 1, "bf16") == pytest.approx(alone / 8 + reduced + gathered)
    slow = perfect(gpus=8, reduce_seconds=1e-3)
    extra = slow.step_time("target", 1, 1, 1, "bf16") - eight.step_time("target", 1, 1, 1, "bf16")
    assert extra == pytest.approx(161e-3)


def test_replicated_heads_are_read_by_every_gpu():
    """16 GPUs for 8 KV heads: each reads a whole head, an eighth of the cache and not a sixteenth."""
    eight, sixteen = perfect(gpus=8, link=1e9), perfect(gpus=16, link=1e9)
    kv = [
        r.step_time("target", 64, 32768, 1, "bf16") - r.step_time("target", 64, 1, 1, "bf16") for r in (eight, sixteen)
    ]
    assert kv[1] == pytest.approx(kv[0], rel=1e-3)


def test_a_draft_that_cannot_be_divided_runs_on_one_gpu():
    """14 heads over 8 GPUs: the draft's step is that of one GPU, and the report says so; a target like that is refused."""
    odd = replace(LLAMA_1B, heads=14, kv_heads=2)
    r = Roofline(get_gpu("h100"), LLAMA_70B, odd, 8)
    alone = Roofline(get_gpu("h100"), LLAMA_70B, odd)
    assert r.step_time("draft", 4, 100, 1, "bf16") == alone.step_time("draft", 4, 100, 1, "bf16")
    assert "runs on one" in r.details["note"]
    with pytest.raises(SpecqError, match="14 heads with 2 KV heads cannot be divided over 8"):
        Roofline(get_gpu("h100"), odd, odd, 8)


def test_windows_cap_what_is_read():
    """Beyond its window a layer costs nothing more, in bytes and in operations."""
    r = perfect(target=replace(LLAMA_70B, layers=((4096, 80),)))
    assert r.step_time("target", 8, 8000, 1, "bf16") == r.step_time("target", 8, 100_000, 1, "bf16")


def test_launch_time_is_charged_per_layer():
    """layer_seconds for every layer, which is what makes a small draft dearer than its bytes."""
    extra = perfect(layer_seconds=1e-5).step_time("draft", 1, 1, 1, "bf16") - perfect().step_time(
        "draft", 1, 1, 1, "bf16"
    )
    assert extra == pytest.approx(16e-5)


def test_a_time_per_step_is_charged_once():
    """step_seconds for every step, whatever the model and the batch."""
    for kind, batch in (("draft", 1), ("target", 64)):
        slow, quick = (perfect(step_seconds=x).step_time(kind, batch, 9, 1, "bf16") for x in (3e-4, 0.0))
        assert slow - quick == pytest.approx(3e-4)


# ---------------------------------------------------------------- accelerators


def test_every_accelerator_of_the_list_has_its_figures_and_source():
    """All ten, with figures in the range of their kind and a document behind them; only the A100 lacks FP8."""
    wanted = {"a100", "h100", "h200", "h20", "b200", "b300", "mi300x", "l40s", "rtx4090", "rtx5090"}
    found = gpus()
    assert set(found) == wanted
    for g in found.values():
        assert 500 < g.bandwidth <= 8000 and 100 < g.bf16 <= 2500 and 24 <= g.memory <= 288 and 30 < g.link <= 900
        assert len(g.source) > 10 and "assumed" in g.efficiency.source
    assert [g.name for g in found.values() if not g.fp8] == ["a100"]


def test_an_accelerator_of_your_own(tmp_path):
    """A TOML file with the same keys, efficiencies included; what is wrong in it is named."""
    good = 'bandwidth = 1000\nbf16 = 100\nmemory = 48\nlink = 50\nfp8 = true\nsource = "mine"\n'
    path = tmp_path / "mine.toml"
    path.write_text(good + "[efficiency]\nbandwidth = 0.5\n")
    count, gpu = parse_gpus(f"4x{path}")
    assert (count, gpu.name, gpu.bandwidth, gpu.efficiency.bandwidth, gpu.efficiency.matrix) == (
        4,
        "mine",
        1000,
        0.5,
        0.6,
    )
    assert gpu.efficiency.source == "given in mine.toml"
    cost = build(parse_cost(f"roofline:4x{path}"), LLAMA_70B, LLAMA_1B)
    assert cost.source == "roofline:4xmine" and parse_cost(f"roofline:4x{path}").files == (str(path),)
    for text, why in (
        (good.replace("link = 50\n", ""), "'link' is missing"),
        (good + "speed = 3\n", "unknown key 'speed'"),
        (good.replace("1000", "-1"), "bandwidth = -1 makes no sense"),
        (good.replace("1000", "0"), "bandwidth must be above 0"),
        (good.replace("true", "1"), "fp8 = 1 makes no sense"),
        (good + "[efficiency]\nbandwith = 0.5\n", "unknown key 'bandwith'"),
        ("bandwidth =", "is no TOML"),
    ):
        path.write_text(text)
        with pytest.raises(SpecqError, match=why):
            get_gpu(str(path))
    with pytest.raises(SpecqError, match="cannot read"):
        get_gpu(str(tmp_path / "none.toml"))
    with pytest.raises(SpecqError, match="h100.*h200"):
        get_gpu("h1000")


def test_what_cost_accepts(tmp_path):
    """measured, roofline:GPU, roofline:NxGPU, roofline:NxGPU@TIMINGS, a file; anything else says what is accepted."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps([timing().model_dump()]))
    assert parse_cost("measured").kind == "measured"
    spec = parse_cost("roofline:8xh100")
    assert (spec.gpus, spec.gpu.name, spec.server.name) == (8, "h100", "8 x h100")
    assert parse_cost(f"roofline:h100@{path}").files == (str(path),)
    assert parse_cost(str(path)).kind == "file" and parse_cost(str(path)).server is None
    for bad, why in (
        ("nothing", "neither measured"),
        ("roofline:h100@none", "no timings file none"),
        ("roofline:", "unknown"),
    ):
        with pytest.raises(SpecqError, match=why):
            parse_cost(bad)


# ---------------------------------------------------------------- tables


def test_table_interpolates_and_refuses_what_it_lacks():
    """Linear in new tokens (flat beyond), in batch and in context; a missing format, batch or context is named."""
    t = TableCost([timing(new=1, seconds=1.0), timing(new=5, seconds=3.0)], "file:t", {})
    assert [t.step_time("target", 2, 64, n, "bf16") for n in (1, 3, 5, 9)] == [1.0, 2.0, 3.0, 3.0]
    with pytest.raises(SpecqError, match="no target timing for fp8_e4m3"):
        t.step_time("target", 2, 64, 1, "fp8_e4m3")
    grid = [timing(batch=b, context=c, seconds=b + 10 * c) for b in (1, 3) for c in (10, 20)]
    more = TableCost(grid, "x", {})
    assert more.step_time("target", 2, 15, 1, "bf16") == pytest.approx(2 + 150)
    with pytest.raises(SpecqError, match="batch 4, context 10; it has batch 1 context 10, batch 1 context 20, batch 3"):
        more.step_time("target", 4, 10, 1, "bf16")
    with pytest.raises(SpecqError, match="batch 2, context 15"):
        TableCost(grid[:3], "x", {}).step_time("target", 2, 15, 1, "bf16")


def test_monotone_leaves_rising_times_alone():
    """Rising columns stay; a dip is split evenly between its neighbours; the result never falls."""
    rising = np.array([[1.0], [2.0], [5.0]])
    assert (monotone(rising) == rising).all()
    assert monotone(np.array([[1.0], [3.0], [2.0], [4.0]])).ravel().tolist() == [1.0, 2.5, 2.5, 4.0]
    noise = np.random.default_rng(0).normal(size=(9, 50)).cumsum(0)
    assert (np.diff(monotone(noise), axis=0) >= 0).all()


def test_timing_noise_reaches_the_decision():
    """Repeats widen the speedup's interval as their median's spread says; without them the table counts as exact."""
    rng = np.random.default_rng(0)
    noise = 1 + 0.05 * rng.standard_normal((2, 25))
    exact = TableCost([timing(seconds=1.0), timing("draft", seconds=0.2)], "m", {})
    noisy = TableCost(
        [timing(repeats=noise[0].tolist()), timing("draft", seconds=0.2, repeats=(0.2 * noise[1]).tolist())], "m", {}
    )
    assert cycle_time_draws(noisy, AT, 2).shape == (DRAWS, 3) and cycle_time_draws(exact, AT, 2).shape == (1, 3)
    assert noisy.step_time("target", 1, 1, 1, "bf16") == pytest.approx(np.median(noise[0]))
    spread = cycle_time_draws(noisy, AT, 0)[:, 0].std()
    assert spread == pytest.approx(1.2533 * 0.05 / 5, rel=0.5)  # a median's standard error
    emitted = np.cumsum(0.7 ** np.arange(3))
    same = np.repeat(emitted[None], DRAWS, 0)
    narrow, wide = (speed_curve(emitted, same, c, AT).interval(2) for c in (exact, noisy))
    assert narrow[0] == narrow[1] and wide[0] < wide[1]


def test_scaled_costs_touch_the_draft_only():
    """A what-if on c multiplies the draft's steps in value and draws, and nothing else."""
    base = TableCost([timing(seconds=1.0), timing("draft", seconds=0.2)], "m", {}, fixed=0.1)
    assert cycle_times(Scaled(base, 3.0), AT, 2).tolist() == pytest.approx([1.0, 1.7, 2.3])
    assert cycle_time_draws(Scaled(base, 3.0), AT, 2)[0].tolist() == pytest.approx([1.0, 1.7, 2.3])


def test_timings_files_are_read_or_refused(tmp_path):
    """A bare list or {records, fixed}; aliases of formats are understood; wrong fields are named, with no traceback."""
    record = {"kind": "target", "batch": 1, "context": 8, "new_tokens": 1, "kv_format": "fp8", "seconds": 0.5}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"records": [record], "fixed": 0.25}))
    cost = read_timings(str(path))
    assert cost.fixed == 0.25 and cost.step_time("target", 1, 8, 1, get_format("fp8").name) == 0.5
    path.write_text(json.dumps([record]))
    assert read_timings(str(path)).fixed == 0
    for bad, why in (
        ([record | {"seconds": -1}], "seconds"),
        ([record | {"extra": 1}], "extra"),
        ([record | {"repeats": [1.0]}], "repeats"),
        ([record | {"repeats": [1.0, -1.0]}], "repeats"),
        ([], "records"),
        ("{", "is damaged: Expecting"),
    ):
        path.write_text(bad if isinstance(bad, str) else json.dumps(bad))
        with pytest.raises(SpecqError, match=why):
            read_timings(str(path))


def test_steps_that_waited_for_launches_are_named():
    """On a GPU whose kernels run faster than Python launches them; a step that computes on behind its launches says nothing,
    nor one on a CPU, nor a file."""
    records = [Timing(kind=k, batch=1, context=1024, new_tokens=n, kv_format="bf16", seconds=1.0)
               for k, n in (("target", 1), ("target", 2), ("draft", 1))]  # fmt: skip

    def told(**details):
        return TableCost(records, "measured", details).caveats([AT], 1)

    (said,) = told(launching_share=0.97)
    assert "97 % of a step" in said and "specq validate" in said
    assert told(launching_share=0.4) == told(launching_share=None) == told() == []


# ---------------------------------------------------------------- what a table stretches


def at(batch, context, target="bf16", draft="bf16"):
    return Operating(batch, context, target, draft)


def test_a_table_of_one_point_says_where_else_it_is_used():
    """One point serves all batches and contexts, by the rule; the sentence names it and every other that it stands for."""
    table = TableCost([timing(kind, 32, 4192, n) for kind, n in (("draft", 1), ("target", 1), ("target", 5))], "t", {})
    assert table.caveats([at(32, 4192)], 4) == []
    (said,) = table.caveats([at(1, 512), at(32, 4192), at(64, 131072), at(1, 512)], 4)
    assert "step times of t are of batch 32, context 4192 alone" in said
    assert "stand here for batch 1, context 512 and batch 64, context 131072 as well" in said
    two = TableCost([timing(k, batch=b, new=n) for k in ("draft", "target") for b in (1, 9) for n in (1, 5)], "t", {})
    assert two.caveats([at(4, 64)], 4) == []  # between two points of its own


def test_a_draft_timed_at_one_point_is_named_unless_it_costs_nothing():
    table = TableCost([timing("draft"), *(timing(batch=b, new=n) for b in (2, 9) for n in (1, 5))], "t", {})
    assert len(table.caveats([at(9, 64)], 4)) == 1
    assert len(Scaled(table, 2.0).caveats([at(9, 64)], 4)) == 1
    assert FreeDraft(table).caveats([at(9, 64)], 4) == []


@pytest.mark.parametrize(
    ("new", "k_max", "says"),
    [
        ((1, 5), 4, None),
        ((1, 5), 8, "with bf16 for K = 0 and 4 only: between them it is interpolated, beyond K = 4 that of K = 4 is taken,"
         " which flatters K = 5 to 8"),
        ((1, 2, 3), 3, "for K = 0, 1 and 2 only: beyond K = 2 that of K = 2 is taken, which flatters K = 3"),
        ((1,), 1, "for K = 0 only: beyond K = 0"),
    ],
)  # fmt: skip
def test_k_beyond_the_timed_new_tokens_is_said(new, k_max, says):
    found = TableCost([timing("draft"), *(timing(new=n) for n in new)], "t", {}).caveats([at(2, 64)], k_max)
    assert found == [] if says is None else says in found[0] and len(found) == 1


def test_formats_that_are_timed_alike_share_a_sentence():
    table = TableCost([timing("draft"), *(timing(new=n, fmt=f) for f in ("bf16", "fp8_e4m3") for n in (1, 5))], "t", {})
    (said,) = table.caveats([at(2, 64), at(2, 64, "fp8_e4m3")], 8)
    assert "with bf16 and fp8_e4m3 for" in said


def test_a_formula_has_no_caveats():
    assert perfect().caveats([at(1, 1), at(999, 10**6)], 64) == []
