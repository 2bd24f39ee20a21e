"""study.json: everything about a study that a reader or another program may want to know, as one JSON object."""

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specq import __version__, analysis, pairs
from specq.acceptance import Rule
from specq.config import DRAWS, StudyConfig
from specq.cost import CostModel
from specq.kv import get_format
from specq.models import LoadedModel
from specq.prompts import Prompt, PromptReport
from specq.recommendation import BASE, NULL, StudyFacts
from specq.replay import ReplayResult
from specq.texts import Text
from specq.tune import Curve

if TYPE_CHECKING:
    from specq.study import Models, Study


def summarise_study(
    study: "Study", pair: pairs.Pair, models: "Models", scored: list[Prompt], report: PromptReport, texts: list[Text],
    replay: ReplayResult, own: dict, own_analyses: dict, paired: dict, facts: StudyFacts, cost: CostModel,
) -> dict:  # fmt: skip
    """The JSON object of study.json, timings excepted."""
    main, config, ks = study.analysis, study.config, range(1, study.config.k_max + 1)

    def shifts(a: analysis.Analysis, names: Sequence[str]) -> dict:
        return {
            name: {
                str(k): a.shift(name, k).as_dict()
                | {"minus_null": (m := a.shift_minus_null(name, k, NULL)).as_dict(), "significant": m.excludes_zero}
                for k in ks
            }
            for name in names
        }

    tested = [n for n in main.arms if n not in (BASE, NULL)]
    return {
        "schema_version": 1,
        "configuration": config.model_dump(mode="json"),
        "directories": study.directories,
        "environment": environment(models.target),
        "pair": {
            "name": pair.name,
            "target": _describe(facts.target, models.target, config),
            "draft": _describe(facts.draft, models.draft, config),
            "vocabulary": asdict(models.vocabulary),
        },
        "sampling": asdict(facts.transform),
        "rule": Rule(config.draft_sampling, config.verify).name,
        "prompts": {
            "source": report.source,
            "records": report.records,
            "kept": len(scored),
            "scored": len(texts),
            "truncated": report.truncated,
            "too_short": report.too_short,
            "skipped": [{"line": n, "reason": why} for n, why in report.skipped],
            "tokens_per_prompt_mean": float(np.mean([len(p.tokens) for p in scored])),
        },
        "tokens": {"scored": int(main.lengths.sum()), "ended_by_eos": sum(t.ended for t in texts)},
        "scales": facts.scale_sources,
        "saturated_per_layer": {
            f"{p.role}:{p.format.name}:{i}": c for i, (p, c) in enumerate(replay.saturated.items()) if any(c)
        },
        "arms": {n: analysis.summarise(main, n, study.columns[n]) for n in main.arms},
        "null_arm": {str(k): main.shift(NULL, k).as_dict() for k in ks},
        "shifts": shifts(main, tested),
        "arms_own_text": {
            n: {
                k: v
                for k, v in analysis.summarise(own_analyses[f], n, own[f][1].arms[n].columns).items()
                if "baseline" not in k
            }
            for f in own_analyses
            for n in own_analyses[f].arms
        },
        "shifts_own_text": {
            n: s for f, a in paired.items() for n, s in shifts(a, [x for x in a.arms if x not in (BASE, NULL)]).items()
        },
        "text_sampled_from_target": dict(zip(("sum_b_minus_a_mean", "se", "z"), main.excess(BASE), strict=True)),
        "decisions": {
            name: {
                "sentence": d.sentence,
                "recommended": d.recommended,
                "recommended_for_baseline": d.baseline_recommended,
                "curves": [_curve(x, d.base_curves[point]) for point, x in d.curves.items()],
            }
            for name, d in study.decisions.items()
        },
        "cost": {"source": cost.source, "fixed_seconds": cost.fixed, "details": cost.details},
        "bootstrap": {"draws": DRAWS, "unit": "document", "documents": main.documents.count, "seed": config.seed},
        "seconds_per_pass": {f"{p.role}:{p.format.name}:splits{p.order.splits}": s for p, s in replay.seconds.items()},
        "warnings": facts.warnings,
    }


def _curve(curve: Curve, base: Curve) -> dict:
    """Speedup over plain decoding at the same format for K = 0..k_max, the format's and BF16's, at one point."""
    ks = range(len(curve.point))
    return {
        "batch": curve.at.batch,
        "context": curve.at.context,
        "recommended": curve.best,
        "speedup": curve.point.tolist(),
        "speedup_ci95": [curve.interval(k) for k in ks],
        "speedup_bf16": base.point.tolist(),
        "speedup_bf16_ci95": [base.interval(k) for k in ks],
        "cycle_seconds": curve.times.tolist(),
        "cycle_seconds_bf16": base.times.tolist(),
    }


def _describe(name: str, model: LoadedModel, config: StudyConfig) -> dict:
    formats = {n: get_format(n) for n in dict.fromkeys(("bf16", *config.dtypes))}
    return {
        "source": name,
        "parameters": model.parameters,
        "checkpoint_dtype": model.checkpoint_dtype,
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "geometry": asdict(model.geometry),
        "kv_bytes_per_token": {
            n: dict(zip(("codes", "scales"), model.geometry.kv_bytes_per_token(f), strict=True))
            for n, f in formats.items()
        },
        "kv_scale_sources": [s.source for s in model.scales],
    }


def environment(model: LoadedModel) -> dict:
    """Machine, versions, date and the command: what makes a result citable."""
    import scipy
    import torch
    import transformers

    return {
        "specq": __version__,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _cpu_name(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
