"""Pairs end to end on a GPU through the kernels, beside the CPU reference on the same texts.

    python studies/gpu_check.py --out DIR             measure (a CUDA GPU): DIR/gpu.json
    python studies/gpu_check.py --page DIR            DIR/README.md from DIR/gpu.json and, where it is, DIR/scoring.json

Texts are sampled once, on the CPU, and scored there and on the GPU, computing in float32 (what is left is the order of sums,
fp16 products of 8-bit codes, and codes that rounding tips over) and in the checkpoint's bf16 (as a study on a GPU does).
Rollouts on the GPU are tested against their own replay, and greedy ones in float32 against the CPU's token for token.
"""

import argparse
import json
import time
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from specq.agreement import ERROR, LEVEL, compare, joint
from specq.config import RolloutConfig
from specq.inputs import Models, calibrate, choose_prompts, load_models, prompt_source
from specq.kv import get_format
from specq.progress import Reporter
from specq.prompts import Text, read_records
from specq.replay import Arm, ReplayResult, Setting, score_texts
from specq.rollout import roll_out
from specq.rules import Rule, Transform
from specq.summary import environment
from specq.texts import sample_texts

FORMATS = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "int8_per_channel")
# Largest mean |difference| of alpha by computing dtype, and largest difference of mean alpha. A relative error e upstream
# tips a code over with probability e / step, and then by a step: rounding makes sqrt(e * step) of it. A step of e4m3 is about
# four times one of INT8 with a scale per row, so that FP8 has twice the tolerance.
TOLERANCE = {"float32": (2e-3, 5e-4), "bfloat16": (8e-3, 2e-3)}


def within(found: dict, dtype: str, fmt: str) -> bool:
    """Whether one row's differences are in tolerance."""
    mean, of_mean = TOLERANCE[dtype]
    mean *= 2 if fmt.startswith("fp8") else 1
    return found["mean_difference"] <= mean and abs(found["alpha_gpu"] - found["alpha_cpu"]) <= of_mean


def _on_gpu(models: Models, dtype: torch.dtype) -> Models:
    models = deepcopy(models)
    for model in models.by_role.values():
        model.model.to("cuda", dtype)
        model.compute_dtype = dtype
    return models


def check(pair: str, prompts: int, prompt_tokens: int, output_tokens: int) -> dict:
    """Everything about one pair."""
    config = RolloutConfig(pair=pair, num_prompts=prompts, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    quiet = Reporter(quiet=True)
    _, cpu = load_models(config, quiet)
    chosen, spare = choose_prompts(config, cpu, *read_records(prompt_source(config)), quiet)
    formats, bf16 = [get_format(n) for n in FORMATS], get_format("bf16")
    scales = calibrate(config, cpu, formats, chosen, spare, quiet)
    setting = Setting(Transform(), Transform(), Rule(), cpu.vocabulary, 0, scales, depth=4)
    arms = [Arm.of(f, bf16) for f in formats]
    texts = sample_texts(
        cpu.target, chosen, bf16, transform=setting.transform, vocabulary=cpu.vocabulary.size, max_tokens=output_tokens,
        seed=0, arm="bf16",
    )  # fmt: skip
    reference = score_texts(cpu.target, cpu.draft, texts, arms, setting)
    found = {"positions": sum(t.positions for t in texts), "scored": {}, "rollouts": {}}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        gpu = _on_gpu(cpu, dtype)
        found.setdefault("attention", {r: m.backend._asdict() for r, m in gpu.by_role.items()})
        got = score_texts(gpu.target, gpu.draft, texts, arms, setting)
        found["scored"][name] = {a.name: _differences(reference, got, a.name) for a in arms}
        if name == "float32":
            found["greedy"] = _greedy(cpu, gpu, chosen, setting, output_tokens)
        else:
            found["rollouts"] = _rollouts(gpu, chosen, arms, setting, output_tokens)
    return found | {"environment": {k: v for k, v in environment(gpu.target).items() if k != "command"}}


def _differences(reference: ReplayResult, got: ReplayResult, arm: str) -> dict:
    a, b = (r.arms[arm].columns for r in (reference, got))
    gap = np.abs(a["alpha"] - b["alpha"])
    return {
        "alpha_cpu": float(a["alpha"].mean()),
        "alpha_gpu": float(b["alpha"].mean()),
        "mean_difference": float(gap.mean()),
        "largest_difference": float(gap.max()),
        "mean_difference_logp": float(np.abs(a["logp"] - b["logp"]).mean()),
        "same_drafted_token": float((a["draft_token"] == b["draft_token"]).mean()),
    }


def _greedy(cpu: Models, gpu: Models, prompts: list, setting: Setting, tokens: int) -> dict:
    how = replace(setting, transform=Transform(0.0), draft_transform=Transform(0.0))
    out = {}
    for fmt in map(get_format, ("bf16", "int8_per_token_head")):
        made = [
            roll_out(m.target, m.draft, prompts, Arm.of(fmt, get_format("bf16")), how, k=4, max_tokens=tokens)
            for m in (cpu, gpu)
        ]
        same = [_common(a, b) for a, b in zip(made[0].texts, made[1].texts, strict=True)]
        out[fmt.name] = {
            "texts": len(same),
            "equal": sum(n is None for n in same),
            "parted_at": [n for n in same if n is not None],
        }
    return out


def _common(a: Text, b: Text) -> int | None:
    """None where two responses are equal, else the first position at which they differ."""
    pairs = enumerate(zip(a.response, b.response, strict=False))
    first = next((i for i, (x, y) in pairs if x != y), min(len(a.response), len(b.response)))
    return None if a.response == b.response else first


def _rollouts(gpu: Models, prompts: list, arms: list[Arm], setting: Setting, tokens: int) -> dict:
    out, all_of = {}, []
    for arm in arms:
        made = roll_out(gpu.target, gpu.draft, prompts, arm, setting, k=4, max_tokens=tokens)
        agreement = compare(made, score_texts(gpu.target, gpu.draft, made.texts, [arm], setting), setting.rule)
        all_of.append(agreement)
        emitted = sum(t.positions for t in made.texts)
        out[arm.name] = {
            "emitted_per_cycle": emitted / int(made.ends.sum()), "cycles_replayed": agreement.ends_expected,
            "cycles": agreement.ends, "p_value": agreement.p_value, "kv_bytes_per_token": made.kv_bytes["target"],
            "tokens_per_second": emitted / (made.seconds["draft"] + made.seconds["verify"]),
        }  # fmt: skip
    return {"arms": out, "joint": asdict(joint(all_of))}


def page(made: dict) -> str:
    """The page of gpu.json."""
    some = next(iter(made["pairs"].values()))["environment"]
    lines = [
        "# Pairs on a GPU against the CPU",
        "",
        f"{some['device']}, torch {some['torch']}, transformers {some['transformers']}; `studies/gpu_check.py`.",
        "Texts sampled on the CPU in float32, scored there and on the GPU; alpha is the acceptance probability of a position.",
    ]
    for name, pair in made["pairs"].items():
        attention = ", ".join(f"{r}: {b['name']}" for r, b in pair["attention"].items())
        lines += ["", f"## {name}", "", f"`{pair['command']}`, {pair['environment']['date']}:"]
        lines += [f"{pair['positions']} positions; attention by {attention}.", ""]
        lines += [
            "| computes in | KV cache | mean alpha, CPU | GPU | mean difference of alpha | of log p |"
            " largest difference of alpha | within |"
        ]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for dtype, arms in pair["scored"].items():
            for arm, d in arms.items():
                lines.append(
                    f"| {dtype} | {arm.split('+')[0]} | {d['alpha_cpu']:.5f} | {d['alpha_gpu']:.5f} |"
                    f" {d['mean_difference']:.1e} | {d['mean_difference_logp']:.1e} | {d['largest_difference']:.1e} |"
                    f" {'yes' if within(d, dtype, arm) else 'NO'} |"
                )
        for fmt, g in pair["greedy"].items():
            lines += [
                "",
                f"Greedy rollouts in float32, {fmt}: {g['equal']} of {g['texts']} texts equal token for token.",
            ]
            if g["parted_at"]:
                lines[-1] += f" The others part at {', '.join(map(str, g['parted_at']))}."
        lines += [
            "",
            "| rollout, K = 4, T = 1 | emitted per cycle | cycles | as replayed | p | KV bytes per token | tokens/s |",
        ]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for arm, r in pair["rollouts"]["arms"].items():
            lines.append(
                f"| {arm} | {r['emitted_per_cycle']:.3f} | {r['cycles']:.0f} | {r['cycles_replayed']:.1f} |"
                f" {r['p_value']:.2f} | {r['kv_bytes_per_token']:.0f} | {r['tokens_per_second']:.0f} |"
            )
        lines += ["", _together(pair["rollouts"]["joint"])]
    lines += ["", "Within: mean |difference| of alpha and difference of its mean at most " + ", ".join(
        f"{a} and {b} ({dtype})" for dtype, (a, b) in TOLERANCE.items()
    ) + "; twice the first for FP8, whose steps are coarser."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _together(joint: dict) -> str:
    """The rollouts' test against their replay over all formats."""
    return (
        f"All rollouts against their replay together: p = {joint['p_value']:.2f}, power {joint['power']:.2f} at level"
        f" {LEVEL:g} against errors of {100 * ERROR:g} % in every count."
    )


def scoring(made: dict) -> str:
    """What `specq bench scoring` found, for the page."""
    lines = [
        "",
        f"## Scoring throughput, {made['pair']} with random weights",
        "",
        f"{made['gpu']}, torch {made['torch']}, {_scoring_made(made)}: {made['tokens']:,} tokens in {made['texts']} texts,",
        f"half of each its prompt; bf16 matrix product {made['matrix_tflops']:.0f} TFLOP/s in the same run. Operations are",
        "those of matrix products and causal attention of target and draft; the share of target passes alone is beside it.",
        "",
        "| arms | seconds | tokens/s | share of the matrix rate | target passes alone | peak memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in made["runs"]:
        passes = ", ".join(f"{100 * x:.0f} %" for x in run["share_of_target_passes"].values())
        lines.append(
            f"| {', '.join(run['arms'])} | {run['seconds']:.2f} | {run['tokens_per_second']:,.0f} |"
            f" {100 * run['share_of_matrix_rate']:.0f} % | {passes} | {run['peak_gb']:.1f} GB |"
        )
    return "\n".join(lines) + "\n"


def _scoring_made(made: dict) -> str:
    """How and when; results from before the bench kept that were committed on the day that is named."""
    if e := made.get("environment"):
        return f"transformers {e['transformers']}, specq {e['specq']}, {e['date']}, `{e['command']}`"
    default = ":".join(["specq bench scoring", made["pair"], str(made["tokens"]), str(made["texts"])])
    return (
        "kept on 2026-11-30 with specq 0.1.0 (its file has no date, transformers version or command;"
        f" `{default}` times the same)"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--pair", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--page", type=Path, metavar="DIR")
    args = parser.parse_args()
    if not (args.out or args.page):
        parser.error("give --out DIR to measure, or --page DIR to write the page of what was measured")
    if args.page:
        text = page(json.loads((args.page / "gpu.json").read_text()))
        if (args.page / "scoring.json").is_file():
            text += scoring(json.loads((args.page / "scoring.json").read_text()))
        (args.page / "README.md").write_text(text)
        return
    made = {"tolerance": TOLERANCE, "pairs": {}}
    if (args.out / "gpu.json").is_file():  # pairs of an earlier run stay
        made = json.loads((args.out / "gpu.json").read_text())
    for pair in args.pair or ["tiny", "gemma270m-ngram"]:
        began = time.perf_counter()
        command = f"python studies/gpu_check.py --pair {pair} --prompts {args.prompts} --out DIR"
        made["pairs"][pair] = {"command": command} | check(pair, args.prompts, 128, 96)
        print(f"{pair}: {time.perf_counter() - began:.0f} s", flush=True)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu.json").write_text(json.dumps(made, indent=1) + "\n")
    print(page(made))


if __name__ == "__main__":
    main()
