"""vLLM itself: its config classes, and its engine on a CPU or GPU. `make test-vllm` runs these in an environment that has it.

At temperature 0: above it vLLM 0.32 on a CPU verifies wrongly (docs/vllm.md).
"""

import platform
from pathlib import Path

import numpy as np
import pytest
from test_study import small_study, strict_json

from specq.engines.vllm.command import validate_command
from specq.engines.vllm.validate import Limits, installed_version
from specq.kv import FORMATS, get_format
from specq.vllm_options import vllm_block

PROMPTS, TOKENS, KS = 24, 48, (0, 2, 4)


def engine_args(words):
    """EngineArgs as `vllm serve` would parse them; raises SystemExit for arguments it does not know."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", *words]))


def speculative(args):
    """The SpeculativeConfig that vLLM makes of these arguments, models read, and the schedule that its scheduler would use."""
    from vllm.config import ParallelConfig
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    made = args.create_speculative_config(args.create_model_config(), ParallelConfig())
    lookup = None
    if schedule := made.num_speculative_tokens_per_batch_size:
        lookup = build_dynamic_sd_schedule_lookup(schedule, 64, made.num_speculative_tokens)
    return made, lookup


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of the embedded pair, greedy, with a schedule whose K falls with the batch."""
    options = {"num_prompts": PROMPTS, "prompt_tokens": 96, "output_tokens": TOKENS, "k_max": 4, "temperature": 0.0,
               "batch": (1, 8, 64, 256)}  # fmt: skip
    return small_study(tmp_path_factory.mktemp("vllm"), None, ("fp8", "int8"), **options)[1]


@pytest.fixture(scope="module")
def source(study):
    return strict_json(study / "study.json")["pair"]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_config_classes_accept_the_recommendation_as_written(study, dtype):
    """recommendation.json's own arguments, word for word, and its speculative_config with the K it names."""
    rec = strict_json(next(study.glob(f"{dtype.split('_')[0]}*")) / "recommendation.json")
    args = engine_args(rec["vllm"]["serve_args"])
    assert args.kv_cache_dtype == rec["vllm_kv_cache_dtype"] == get_format(dtype).vllm
    made, lookup = speculative(args)
    assert made.num_speculative_tokens == max(k for _, _, k in rec["recommended_schedule"])
    assert len(made.draft_model_config.model) > 0 and made.method == "draft_model"
    if lookup:
        for first, last, k in rec["recommended_schedule"]:
            assert all(lookup[n] == k for n in range(first, min(last, 64) + 1))


@pytest.mark.parametrize("fmt", [f.name for f in FORMATS if f.vllm])
@pytest.mark.parametrize("schedule", [[[1, 64, 3]], [[1, 8, 3], [9, 64, 0]], [[1, 64, 0]]])
@pytest.mark.parametrize("drafting", ["probabilistic", "greedy"])
def test_config_classes_accept_whatever_specq_writes(source, fmt, schedule, drafting):
    """Every KV format that vLLM has, fixed and scheduled K, no speculation, both draft methods: all of it is legal."""
    from vllm.config.cache import CacheConfig

    block = vllm_block(
        version=installed_version(), target=source["target"]["source"], draft=source["draft"]["source"],
        fmt=get_format(fmt), draft_fmt=get_format("bf16"), schedule=schedule, draft_sampling=drafting,
        survival=[0.5, 0.3, 0.2],
    )  # fmt: skip
    args = engine_args(block.serve_args)
    assert args.kv_cache_dtype == get_format(fmt).vllm
    CacheConfig(cache_dtype=args.kv_cache_dtype)
    if block.speculative_config is not None:
        made, lookup = speculative(args)
        assert made.num_speculative_tokens == 3 and made.draft_sample_method == drafting
        assert made.kv_cache_dtype == "bfloat16"  # the draft's own, which 0.32 can set
        if len(schedule) > 1:
            assert [lookup[n] for n in (1, 8, 9, 64)] == [3, 3, 0, 0]


def test_synthetic_rates_are_accepted(source):
    """Marginal S_1..S_K are what `synthetic_acceptance_rates` takes."""
    block = vllm_block(
        version="0.24", target=source["target"]["source"], draft=source["draft"]["source"], fmt=get_format("bf16"),
        draft_fmt=get_format("bf16"), schedule=[[1, 64, 3]], draft_sampling="greedy", survival=[0.5, 0.51, 1e-9],
    )  # fmt: skip
    args = engine_args([source["target"]["source"]])
    args.speculative_config = block.speculative_config | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": block.synthetic_acceptance_rates,
    }
    assert speculative(args)[0].synthetic_acceptance_rates == [0.5, 0.5, 1e-9]


def sweep(study, out, **changes):
    """`specq validate`, a cell in a process of its own; one process each, so that vLLM is imported once per cell."""
    options = dict(
        dtypes=["bf16"], ks=list(KS), extra=[], batch=8, num_prompts=None, passes=1, synthetic=False, pair=None,
        context=None, cost=None, probe=False, eager=True, tensor_parallel=1, memory_share=0.2, limits=Limits(300.0),
        device=None, out=out, quiet=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        return validate_command(study, **options | changes)


@pytest.fixture(scope="module")
def swept(study, tmp_path_factory):
    """(cells by name, folder) of K = 0, 2, 4 with both draft methods."""
    out = tmp_path_factory.mktemp("sweep")
    made = sweep(study, out, extra=[f"bf16:{k}:greedy" for k in KS if k])
    assert made["complete"], [c["error"] for c in made["cells"]]
    return {c["name"]: c for c in made["cells"]}, out


DRAFTED = [f"bf16-k{k}-{drafting}" for k in KS if k for drafting in ("probabilistic", "greedy")]


@pytest.mark.parametrize("name", DRAFTED)
def test_cycles_are_those_that_the_replay_of_its_tokens_says(swept, name):
    """The joint test finds nothing, emitted and every S_k lie within the interval's reach."""
    agreed = swept[0][name]["agreement"]
    assert agreed["documents"] == agreed["requests"] == PROMPTS
    assert agreed["positions"] == PROMPTS * (TOKENS - 2)  # less prefill's token and the last
    assert agreed["joint_test"]["p_value"] is None or agreed["joint_test"]["p_value"] > 1e-3
    for block in [agreed["emitted"], *agreed["marginal_survival"]]:
        assert abs(block["difference"]["value"]) < max(4 * block["difference"]["se"], 1e-9)


@pytest.mark.parametrize("name", DRAFTED)
def test_its_counters_are_the_steps_it_took(swept, name):
    """Whole cycles of K drafts each, and as many accepted as the tokens show beyond one per cycle."""
    from specq.engines.vllm.protocol import CellRequest, read_result

    cells, out = swept
    cell, folder = cells[name], out / "cells"
    k, counters = cell["num_speculative_tokens"], cell["counters"]
    request = CellRequest.model_validate_json((folder / f"{name}.request.json").read_text())
    result = read_result((folder / f"{name}.result.json").read_text(), request)
    cycles = [len(step) for r in result.requests for step in r.steps[1:]]
    cut = sum(len(r.steps[-1]) < k + 1 for r in result.requests)  # the length limit may cut a request's last cycle
    assert cell["warnings"] == [] and counters["drafts"] == len(cycles) and counters["drafted"] == k * len(cycles)
    seen = sum(cycles) - len(cycles)
    assert seen <= counters["accepted"] <= seen + k * cut and counters["accepted"] == sum(counters["per_position"])


def test_draft_methods_coincide_at_temperature_zero(swept):
    """Argmax of the draft either way: the very same steps and counters."""
    cells, out = swept
    for k in KS[1:]:
        one, other = (strict_json(out / "cells" / f"bf16-k{k}-{m}.result.json") for m in ("probabilistic", "greedy"))
        assert one["counters"] == other["counters"]
        steps = [[r["steps"] for r in result["passes"][0]["requests"]] for result in (one, other)]
        assert steps[0] == steps[1]
    assert cells["bf16-k0"]["counters"] is None


def test_speculation_leaves_the_text_as_it_is(swept):
    """Greedy text is the same for every K, but where rounding of another batch shape decides between two tokens."""
    texts = {}
    for name in ("bf16-k0", *DRAFTED):
        result = strict_json(swept[1] / "cells" / f"{name}.result.json")
        texts[name] = [sum(r["steps"], []) for r in result["passes"][0]["requests"]]
    for name in DRAFTED:
        same = np.mean([a == b for a, b in zip(texts["bf16-k0"], texts[name], strict=True)])
        assert same >= 0.75, name


def test_ngram_lookup_proposes_what_the_replay_says(tmp_path):
    """vLLM's method "ngram" on the V1 runner: the text tells every cycle, so the joint test is exact but where rounding decides
    between two tokens, and no more cycles drafted than there were steps."""
    options = {"num_prompts": PROMPTS, "prompt_tokens": 96, "output_tokens": TOKENS, "k_max": 4, "temperature": 0.0,
               "draft": "ngram", "batch": (8,)}  # fmt: skip
    study = small_study(tmp_path, None, ("fp8",), **options)[1]
    made = sweep(study, tmp_path / "sweep", ks=[4])
    cell = next(c for c in made["cells"] if c["num_speculative_tokens"])
    assert cell["status"] == "ok" and cell["warnings"] == [], cell
    agreed, counters = cell["agreement"], cell["counters"]
    assert 0 < counters["accepted"] < counters["drafted"] and counters["drafts"] <= agreed["cycles"] + PROMPTS
    assert agreed["joint_test"]["exact"] or agreed["joint_test"]["p_value"] > 1e-3
    gap = agreed["emitted"]["difference"]
    assert abs(gap["value"]) < max(4 * gap["se"], 1e-9)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX-512 is a matter of x86")
def test_fp8_cache_runs_with_avx512_and_is_refused_clearly_without(study, tmp_path):
    """vLLM's CPU kernels read FP8 with AVX-512 alone; elsewhere the cell says so in a line and the sweep goes on."""
    made = sweep(study, tmp_path, dtypes=["fp8"], ks=[2])
    cells = {c["name"]: c for c in made["cells"]}
    if "avx512" in Path("/proc/cpuinfo").read_text():
        cell = cells["fp8_e4m3-k2-probabilistic"]
        assert cell["status"] == "ok", cell["error"]
        assert cell["draft_kv_dtype"] == "bf16" and cell["agreement"]["joint_test"]["p_value"] > 1e-3
    else:
        assert all(c["status"] == "failed" and "AVX" in c["error"].upper() for c in cells.values())


def test_probe_inside_the_engine(study, tmp_path):
    """log p, log q, ratio and alpha of every drafted token: what it marks accepted is what the counters say, and its alpha is
    the replay's but where rounding decides between two tokens."""
    made = sweep(study, tmp_path, ks=[4], probe=True)
    cell = next(c for c in made["cells"] if c["num_speculative_tokens"])
    assert cell["status"] == "ok", cell["error"]
    alpha = cell["agreement"]["probe_alpha"]
    assert alpha["positions"] > 500 and abs(alpha["mean_difference"]) < 0.01 and alpha["means"]["probe"] > 0.3
