"""study.json: everything about a study that a reader or another program may want to know, as one JSON object."""

import datetime
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specq import __version__
from specq.analysis import BASE, NULL, Analysis, summarise
from specq.conclude import decision_block
from specq.config import DRAWS, RunConfig
from specq.coupling import shared_tokens, widening
from specq.from_server import own_command
from specq.kv import get_format
from specq.kv.checkpoint_scales import ignored_scales
from specq.models.loaded import LoadedModel
from specq.models.quantization import kv_cache_format, weight_quantization
from specq.prompts import Prompt, PromptReport
from specq.rules import Rule
from specq.stats import significant

if TYPE_CHECKING:
    from specq.study import Study

SKIPPED_LISTED = 1000  # skipped records listed one by one; all are counted


def summarise_study(study: "Study") -> dict:
    """The JSON object of study.json."""
    config, facts, models, main = study.config, study.facts, study.models, study.main
    replay, report = main.replay, study.prompt_report
    formats = {n: get_format(n) for n in config.dtypes}
    return {
        "schema_version": 1,
        "configuration": config.model_dump(mode="json"),
        "directories": study.directories,
        "environment": environment(models.target),
        "pair": {
            "name": study.pair.name,
            "target": describe(facts.target, models.target, config),
            "draft": describe(facts.draft, models.draft, config)
            if models.has_draft_model
            else {"source": facts.draft} | asdict(models.draft),
            "vocabulary": asdict(models.vocabulary),
        },
        "sampling": asdict(facts.transform),
        "rule": Rule(config.draft_sampling, config.verify).name,
        "query_rounded_to_fp8": {n: study.setting.round_query(f) for n, f in formats.items()},
        "prompts": prompt_block(report, study.prompts),
        "tokens": {
            "scored": int(main.analysis.lengths.sum()),
            "per_text_median": float(np.median(main.analysis.lengths)),
            "ended_by_eos": sum(t.ended for t in main.texts),
        },
        "scales": facts.scale_sources,
        "native_fp8": facts.native_fp8,
        "saturated_per_layer": {
            f"{s.kind} text:{p.role}:{p.format.name}": c
            for s in (main, *study.own.values())
            for p, c in s.replay.saturated.items()
            if any(c)
        },
        "key_outliers": [asdict(o) for o in facts.outliers],
        "text": main.kind,
        "arms": {n: summarise(main.analysis, n, main.columns[n]) for n in main.analysis.arms},
        "null_arm": {str(k): main.analysis.shift(NULL, k).as_dict() for k in range(1, config.k_max + 1)},
        "shifts": _shifts(main.analysis),
        "arms_own_text": {
            n: {k: v for k, v in summarise(s.analysis, n, s.columns[n]).items() if "baseline" not in k}
            for s in study.own.values()
            for n in s.analysis.arms
        },
        "shifts_own_text": {name: block for a in study.material.paired.values() for name, block in _shifts(a).items()},
        "null_arm_own_text": {
            str(k): a.shift(NULL, k).as_dict()
            for a in [*study.material.paired.values()][:1]
            for k in range(1, config.k_max + 1)
        },
        "own_text_coupling": _coupling(study),
        "text_sampled_from_target": dict(
            zip(("sum_b_minus_a_mean", "se", "z"), main.analysis.excess(BASE), strict=True)
        ),
        "decisions": {name: decision_block(found) for name, found in study.conclusions.items()},
        "cost": {"source": study.cost.source, "fixed_seconds": study.cost.fixed, "details": study.cost.details},
        "bootstrap": {
            "draws": DRAWS,
            "unit": "document",
            "documents": main.analysis.resampler.documents,
            "seed": config.seed,
        },
        "seconds_per_pass": {f"{p.role}:{p.format.name}:splits{p.order.splits}": s for p, s in replay.seconds.items()},
        "timings_seconds": study.timings,
        "peak_memory_gb": peak_memory(models.target),
        "warnings": facts.warnings[None],
        "warnings_by_format": {n: w for n, w in facts.warnings.items() if n is not None},
    }


def prompt_block(report: PromptReport, prompts: Sequence[Prompt]) -> dict:
    """The JSON block of the prompt file: what was used of it, what was not, and why."""
    return {
        "source": Path(report.source).name,
        "records": report.records,
        "kept": len(prompts),
        "truncated": sum(p.truncated for p in prompts),
        "responses_truncated": report.responses_truncated,
        "too_short": report.too_short,
        "not_drawn": report.not_drawn,
        "shapes": dict(report.shapes),
        "skipped_records": len(report.skipped),
        "skipped": [{"line": n, "reason": why} for n, why in sorted(report.skipped)[:SKIPPED_LISTED]],
        "tokens_per_prompt_mean": float(np.mean([len(p.tokens) for p in prompts])),
    }


def _coupling(study: "Study") -> dict:
    """Per arm with own text: where its texts part from the baseline's, and how that widens the interval."""
    config, main, out = study.config, study.main, {}
    rule, k = Rule(config.draft_sampling, config.verify), config.current_k or config.k_max
    for own in study.own.values():
        arm = own.analysis.base
        out[arm] = {
            "k": k,
            "shared_tokens_median": float(np.median(shared_tokens(own.texts, main.texts))),
            "beginnings": widening(
                (main.texts, main.columns[BASE]), (own.texts, own.columns[arm]), main.columns.get(arm), rule, k,
                seed=config.seed, draws=DRAWS,
            ),
        }  # fmt: skip
    return out


def _shifts(a: Analysis) -> dict:
    """Shift of mu against the baseline for every other arm and K; beyond the null arm's own shift under minus_null."""
    out: dict[str, dict] = {}
    for name in a.arms:
        if name in (BASE, NULL):
            continue
        out[name] = {}
        for k in range(1, a.k_max + 1):
            beyond = a.shift_minus_null(name, k, NULL)
            shift = a.shift(name, k)
            out[name][str(k)] = shift.as_dict() | {
                "minus_null": beyond.as_dict(),
                "significant": significant(shift, beyond),
                "whole_cycles": a.shift_of_whole_cycles(name, k).as_dict(),
            }
    return out


def describe(name: str, model: LoadedModel, config: RunConfig) -> dict:
    """The JSON block of one model."""
    formats = {n: get_format(n) for n in dict.fromkeys(("bf16", *config.dtypes))}
    checkpoint = model.checkpoint  # None where the weights are random
    return {
        "attention": model.backend._asdict(),  # what attention and stores ran through, and why not the kernels
        "source": name,
        "parameters": model.parameters,
        "shape": model.shape.as_dict(),
        "checkpoint_dtype": model.checkpoint_dtype,
        "stored_dtype": checkpoint and checkpoint.stored_dtype,
        "weight_quantization": checkpoint and weight_quantization(checkpoint),
        "kv_cache_scheme": checkpoint and kv_cache_format(checkpoint),
        "kv_scales_ignored": ignored_scales(checkpoint) if checkpoint else [],
        "generation_config": model.sampling_defaults,
        "eos_token_ids": sorted(model.eos_ids),
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "geometry": asdict(model.geometry),
        "kv_bytes_per_token": {
            n: dict(zip(("codes", "scales"), model.geometry.kv_bytes_per_token(f), strict=True))
            for n, f in formats.items()
        },
        "kv_scale_sources": [s.source for s in model.scales],
    }


def environment(model: LoadedModel) -> dict:
    """Machine, versions, date and command: what makes a result citable."""
    import scipy
    import torch
    import transformers

    return {
        "specq": __version__,
        "command": own_command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device_name(model),
        "processes": model.processes,
    }


def peak_memory(model: LoadedModel) -> dict[str, float]:
    """Largest memory so far in GB: of this process, and of the tensors on the fullest of its GPUs where it has any."""
    import torch

    out = {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    if model.device.type == "cuda":
        out["gpu"] = max(torch.cuda.max_memory_allocated(d) for d in model.devices) / 1e9
    return out


def _device_name(model: LoadedModel) -> str:
    import torch

    if model.device.type != "cuda":
        return _cpu_name()
    names = [torch.cuda.get_device_name(d) for d in model.devices] * model.processes
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
