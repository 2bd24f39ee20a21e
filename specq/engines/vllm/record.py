"""validation.json from what a sweep has so far."""

from typing import TYPE_CHECKING

import numpy as np

from specq import __version__, files
from specq.cost import CostModel, FreeDraft, Operating, cycle_times
from specq.cost.table import TableCost, Timing
from specq.engines.vllm import agreement, speed
from specq.engines.vllm.plan import Cell, margin
from specq.engines.vllm.protocol import CellResult
from specq.engines.vllm.runner import Outcome
from specq.errors import SpecqError
from specq.finished import Finished
from specq.from_server import own_command
from specq.tune import speed_curve
from specq.vllm_options import CPU_VERIFIES_WRONGLY, LATEST_LOOKED_UP_BY_V2, OLDEST, draft_kv_is_free, parse_version

if TYPE_CHECKING:
    from specq.engines.vllm.validate import Validation

SCHEMA_VERSION = 1


def measured_counters(result: CellResult, k: int, lookup: bool) -> tuple[dict | None, list[str]]:
    """The counters' own rates, and what does not fit between them and the steps seen. A `lookup` need not draft in every step,
    nor K tokens."""
    c = result.counters
    if c is None or not c.drafts:
        return None, []
    cycles = sum(len(r.steps) - 1 for r in result.requests)
    warnings = []
    if c.drafts > cycles or (c.drafts != cycles and not lookup):
        warnings.append(f"vLLM counted {c.drafts} drafts where {cycles} steps gave tokens: some steps drafted nothing")
    if c.drafted != k * c.drafts and not lookup:
        warnings.append(f"not every cycle drafted {k} tokens: {c.drafted} in {c.drafts} drafts")
    if sum(c.per_position) != c.accepted:
        warnings.append("vLLM's counters are inconsistent: per-position counts do not sum to the accepted ones")
    block = c.model_dump() | {
        "mu_accepted": c.accepted / c.drafts,
        "mean_emitted": 1 + c.accepted / c.drafts,
        "marginal_survival": [n / c.drafts for n in c.per_position],
        "note": "whole cycles, the ones that EOS or the length limit cut included; no interval: see `agreement`"
        + (
            f"; only the {c.drafts} of {cycles} cycles in which lookup found something, `agreement` has all"
            if lookup
            else ""
        ),
    }
    return block, warnings


def validation_json(v: "Validation") -> dict:
    """The JSON object of validation.json from what is there so far."""
    blocks = {c.name: _cell_block(v, c) for c in v.cells}
    _add_speedups(v, blocks)
    results = [o.result for o in v.outcomes.values() if o.result]
    warnings = _warnings(v)
    cycles = {
        (c.fmt.name, c.k): block["speed"]["cycle_seconds_repeats"]
        for c in v.cells
        if (block := blocks[c.name])["status"] == "ok" and block["speed"]["cycle_seconds_repeats"] and _is_main(v, c)
    }
    timings = None if v.work.probe else speed.timings(cycles, v.work.batch, v.context)
    return {
        "schema_version": SCHEMA_VERSION,
        "specq": __version__,
        "command": own_command(),
        "study": str(v.found.folder),
        "synthetic": v.work.synthetic,
        "engine": {
            "vllm": v.work.version,
            "versions": results[0].versions if results else None,
            "device": results[0].device if results else None,
            "timing_mode": results[0].timing_mode if results else None,
            "dates": sorted({r.date[:10] for r in results if r.date}),
            "tensor_parallel_size": v.work.tensor_parallel,
        },
        "workload": {
            "target": v.work.models[0],
            "draft": v.work.models[1],
            "prompts": len(v.work.prompts),
            "documents": len(set(v.work.documents)),
            "output_tokens": v.work.output_tokens,
            "passes": v.work.passes,
            "requests_in_flight": v.work.batch,
            "context": v.context,
            "sampling": v.found.study["sampling"],
        },
        "complete": all(c.name in v.outcomes and v.outcomes[c.name].status == "ok" for c in v.cells),
        "cells": list(blocks.values()),
        "formats": _format_blocks(v, blocks, timings),
        "timings": timings,
        "timings_note": "cycle times are measured; how much of one a draft step takes is a convention (speed.py)"
        if timings
        else None,
        "warnings": warnings,
    }


def _is_main(v: "Validation", cell: Cell) -> bool:
    """Whether a cell belongs to the grid: the study's drafting and the backend that the format takes by itself."""
    return cell.backend is None and (not cell.k or cell.drafting == v.found.drafting)


def _cell_block(v: "Validation", cell: Cell) -> dict:
    outcome = v.outcomes.get(cell.name, Outcome("pending", error="not run yet"))
    request, warnings = v.requests[cell.name], []
    block = {
        "name": cell.name,
        "target_kv_dtype": cell.fmt.name,
        "draft_kv_dtype": cell.draft_fmt(v.work.version).name if cell.k and not v.work.lookup else None,
        "vllm_kv_cache_dtype": cell.fmt.vllm,
        "num_speculative_tokens": cell.k,
        "draft_sampling": cell.drafting if cell.k else None,
        "query_rounded_to_fp8": cell.fmt.rounds_query,
        "attention_backend_asked": request.engine.get("attention_backend"),
        "attention_backends_logged": list(outcome.backends),
        "status": outcome.status,
        "error": outcome.error,
        "wall_seconds": outcome.seconds,
    }
    if outcome.result is None:
        return block
    counters, warnings = measured_counters(outcome.result, cell.k, v.work.lookup is not None)
    block |= {"speed": speed.speed(outcome.result, v.work.batch), "counters": counters}
    if v.work.synthetic and cell.k:
        block["asked_marginal_survival"] = request.engine["speculative_config"]["synthetic_acceptance_rates"]
    elif cell.k:
        block["agreement"] = v.agreements.get(cell.name)
        block["study_mu_accepted"] = _study_mu(v, cell)
    return block | {"warnings": warnings}


def _study_mu(v: "Validation", cell: Cell) -> dict | None:
    """mu(K) with its interval on the study's own texts, where the study has that arm, K and drafting."""
    arm = v.found.study["arms"].get(f"{cell.fmt.name}+{cell.draft_fmt(v.work.version).name}")
    if arm is None or cell.drafting != v.found.drafting:
        return None
    return arm["mu_accepted"].get(str(cell.k))


def _add_speedups(v: "Validation", blocks: dict[str, dict]) -> None:
    """Speed over plain decoding at the same format and backend, measured; and as the study's cost model predicts it. None
    where no such cell ran."""
    plain = {(c.fmt.name, c.backend): blocks[c.name] for c in v.cells if not c.k}
    for cell in v.cells:
        block, base = blocks[cell.name], plain.get((cell.fmt.name, cell.backend))
        if block["status"] != "ok" or base is None or base["status"] != "ok":
            continue
        own, other = block["speed"], base["speed"]
        block["speedup_measured"] = {
            "throughput": own["tokens_per_second"] / other["tokens_per_second"],
            "latency": _over(other["ms_per_output_token"], own["ms_per_output_token"]),
            "steady": _steady_speedup(v, cell, block, other),
        }
        block["speedup_predicted"] = _predicted(v, cell)


def _steady_speedup(v: "Validation", cell: Cell, block: dict, plain: dict) -> float | None:
    """What a cost model predicts: emitted per cycle (as asked, where acceptance is synthetic) over the ratio of a steady
    cycle's time to a plain step's, prefill and ragged ends apart. None where steady steps are too few."""
    cycle, step = block["speed"]["cycle_seconds_repeats"], plain["cycle_seconds_repeats"]
    if not cycle or not step:
        return None
    if v.work.synthetic and cell.k:
        emitted = 1 + sum(v.work.survival[cell.fmt.name, cell.k])
    elif cell.k and block["agreement"]:
        emitted = block["agreement"]["emitted"]["measured"]["value"]
    elif cell.k:
        return None  # the replay is still to come
    else:
        emitted = 1.0
    return float(emitted * np.median(step) / np.median(cycle))


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _predicted(v: "Validation", cell: Cell) -> dict | None:
    analysis, arm = v.found.material.main, f"{cell.fmt.name}+{cell.draft_fmt(v.work.version).name}"
    if v.cost is None or arm not in analysis.arms or cell.k > analysis.k_max or not _is_main(v, cell):
        return None
    try:
        times = cycle_times(v.cost, Operating(v.work.batch, v.context, cell.fmt.name, "bf16"), cell.k)
    except SpecqError as error:
        return {"value": None, "cost": v.cost.source, "why": str(error)}
    return {"value": float(analysis.emitted_curve(arm)[cell.k] * times[0] / times[-1]), "cost": v.cost.source}


def _format_blocks(v: "Validation", blocks: dict[str, dict], timings: dict | None) -> dict[str, dict]:
    """Per format: the K truly best, the regret of the study's K and of the K that the study's acceptance gives with this
    engine's own step times; what a counter-based comparison would take."""
    out = {}
    for fmt in dict.fromkeys(c.fmt for c in v.cells):
        mine = [c for c in v.cells if c.fmt == fmt and _is_main(v, c) and blocks[c.name]["status"] == "ok"]
        if not mine:
            continue
        throughput = {c.k: blocks[c.name]["speed"]["tokens_per_second_repeats"] for c in mine}
        out[fmt.name] = speed.regret(throughput, recommended_k(v.found, fmt.name))
        if (k := _retuned_k(v, mine[0], timings, max(throughput))) is not None:
            retuned = speed.regret(throughput, k)
            out[fmt.name]["retuned"] = {"recommended_k": k, "regret": retuned["regret"]}
        if fmt.name != "bf16" and not v.work.synthetic:
            needed = {str(c.k): _serving_tokens(v, c) for c in mine if c.k}
            out[fmt.name]["serving_tokens_for_the_replays_error"] = {k: x for k, x in needed.items() if x}
    return out


def _retuned_k(v: "Validation", cell: Cell, timings: dict | None, k_max: int) -> int | None:
    """The K, up to `k_max`, that the study's acceptance gives with step times of this sweep; None where either is missing."""
    analysis, arm = v.found.material.main, f"{cell.fmt.name}+{cell.draft_fmt(v.work.version).name}"
    records = [Timing(**r) for r in (timings or {"records": []})["records"]]
    if arm not in analysis.arms or cell.fmt.name not in {r.kv_format for r in records if r.kind == "target"}:
        return None
    cost: CostModel = TableCost(records, "this sweep", {}, timings["fixed"])
    cost = FreeDraft(cost) if v.work.lookup else cost
    at, ks = Operating(v.work.batch, v.context, cell.fmt.name, "bf16"), slice(min(k_max, analysis.k_max) + 1)
    return speed_curve(analysis.emitted_curve(arm)[ks], analysis.emitted_draws(arm)[:, ks], cost, at).best


def recommended_k(found: Finished, fmt: str) -> int | None:
    """The K that the study recommends for a format; for BF16, unless it has its own, what its baseline would take. None for a
    format that the study does not have."""
    directory = found.study["directories"].get(fmt)
    if directory is None and fmt == "bf16":
        return next(iter(found.study["decisions"].values()))["recommended_for_baseline"]
    if directory is None:
        return None
    rec = files.read_json(found.folder / directory / "recommendation.json")
    return int(rec["recommended_num_speculative_tokens"])


def _serving_tokens(v: "Validation", cell: Cell) -> dict | None:
    """What two servers' counters, one in BF16, would take to be as sure of the shift at a cell's K as the study's replay."""
    base = next((c for c in v.cells if c.fmt.name == "bf16" and c.k == cell.k and _is_main(v, c)), None)
    arm = f"{cell.fmt.name}+{cell.draft_fmt(v.work.version).name}"
    shift = v.found.study["shifts"].get(arm, {}).get(str(cell.k))
    both = [_one_pass_error(v, c) for c in (base, cell) if c]
    if not shift or not shift["se"] or len(both) < 2 or None in both:
        return None
    tokens = agreement.serving_tokens_needed(*both, shift["se"])
    return {"tokens": tokens, "replays_error": shift["se"]} if tokens else None


def _one_pass_error(v: "Validation", cell: Cell) -> tuple[int, float] | None:
    """`counters_error` of the first pass alone: further passes repeat its documents, which traffic does not."""
    result = v.outcomes[cell.name].result if cell.name in v.outcomes else None
    logs = agreement.counted(result.passes[0].requests) if result else []
    if not logs:
        return None
    documents = [v.requests[cell.name].documents[r.prompt] for r in logs]
    return agreement.counters_error(documents, agreement.observe(logs, cell.k), v.found.config.seed)


def _warnings(v: "Validation") -> list[str]:
    out = []
    config = v.found.config
    if config.verify == "strict":
        out.append("the study verifies strictly; vLLM does not, and neither does the replay here")
    if v.work.lookup and parse_version(v.work.version) > OLDEST:
        out.append(LATEST_LOOKED_UP_BY_V2 + ", and so did this sweep")
    if not v.work.synthetic and not v.work.lookup and not draft_kv_is_free(v.work.version):
        out.append(f"vLLM {v.work.version} cannot set the draft's KV format: it is the target's in every cell")
    if not v.work.synthetic and config.calibrate:
        out.append("the study calibrated static scales; vLLM uses the checkpoint's or 1.0, and so does the replay here")
    if v.work.synthetic and config.draft_sampling == "probabilistic":
        out.append(
            "with synthetic acceptance vLLM drafts greedily whatever draft_sample_method says; that is what is timed"
        )
    if 0 < v.work.transform.temperature < 0.01 and not v.work.transform.greedy:
        out.append("vLLM raises a temperature below 0.01 to 0.01")
    on_cpu = any(o.result is not None and o.result.device == "cpu" for o in v.outcomes.values())
    if on_cpu and not v.work.transform.greedy and parse_version(v.work.version) in CPU_VERIFIES_WRONGLY:
        out.append(
            f"vLLM {v.work.version} on a CPU verifies with a temperature that it never set: above temperature 0 its acceptance"
            " and its text are wrong, and the disagreement here is its own"
        )
    cut = [c.k for c in v.cells if c.k and v.work.positions and v.work.longest + margin(c.k) > v.work.positions]
    if cut:
        out.append(
            f"texts of {v.work.longest} tokens come close to the models' {v.work.positions} positions: there vLLM stops"
            f" drafting for the whole batch, and at K = {max(cut)} acceptance is lower for that reason alone"
        )
    if v.cost is None:
        out.append(f"the study's cost, {config.cost}, cannot be had here: no speedup is predicted (--cost gives one)")
    else:
        points = [Operating(v.work.batch, v.context, c.fmt.name, "bf16") for c in v.cells if _is_main(v, c)]
        out += v.cost.caveats(points, max(c.k for c in v.cells))
    if v.work.probe:
        out.append("timed with the probe, which waits for the device in every step: step times are not a server's")
    if v.work.eager:
        out.append("timed in eager mode: step times are not those of a server with CUDA graphs")
    return out
