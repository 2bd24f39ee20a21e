"""The whole check against a real vLLM, on one GPU machine: study, sweep, probe, curves, page. Needs this repository alone.

    python -m studies.vllm_check --out results --stop-after 500            again and again until it says "complete"
    python -m studies.vllm_check --out results --page studies/results/vllm

Every part is kept in OUT and taken from there by the next call: the study (200 prompts of distinct documents); the cells BF16,
FP8, INT8 per token and head x K = 0, 2, 4, 8 with probabilistic drafting, each format at the K that the study recommends, K = 4
with greedy drafting, FP8 on TRITON_ATTN at K = 4; and one cell with the probe. `--page DIR` writes what is kept of it:
validation.json, probe.json, a plot, README.md.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specq.engines.vllm.command import regret_sentence, validate_command
from specq.engines.vllm.record import recommended_k
from specq.engines.vllm.validate import Limits
from specq.finished import load
from specq.kv import get_format
from specq.progress import Reporter
from studies.common.results import wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KS = [0, 2, 4, 8]
DTYPES = ["bf16", "fp8", "int8"]
EXTRA = ["bf16:4:greedy", "fp8:4:greedy", "int8:4:greedy", "fp8:4@TRITON_ATTN"]


def study(out: Path, args: argparse.Namespace) -> Path:
    """The finished study, run where it is not there."""
    folder = out / "study"
    if not (folder / "study.json").is_file():
        command = [sys.executable, "-m", "specq", "study", "--pair", args.pair, "--dtype", "fp8", "--dtype", "int8",
                   "--num-prompts", str(args.prompts), "--k-max", "8", "--draft-transform", "temperature", "--device",
                   args.device, "--batch", f"{args.batch}", "--out", str(folder)]  # fmt: skip
        subprocess.run(command, check=True)
    return folder


def recommended(folder: Path) -> list[str]:
    """The cell of every format at its recommended K."""
    found = load(folder)
    ks = {fmt: recommended_k(found, get_format(fmt).name) for fmt in DTYPES}
    return [f"{fmt}:{k}" for fmt, k in ks.items() if k not in KS]


def sweep(folder: Path, out: Path, args: argparse.Namespace, left: float | None, **changes: object) -> dict:
    """One `specq validate` into `out`; with `left` seconds, no further cell is started after them."""
    options = dict(
        dtypes=DTYPES, ks=KS, extra=[*recommended(folder), *EXTRA], batch=args.batch, num_prompts=None, passes=args.passes,
        synthetic=False, pair=None, context=None, cost=None, probe=False, eager=args.eager, tensor_parallel=1,
        memory_share=args.memory_share, limits=Limits(args.time_limit, left, args.at_once), device=args.device, out=out,
        quiet=True,
    )  # fmt: skip
    return validate_command(folder, **options | changes)


def page(folder: Path, made: dict, probed: dict | None) -> None:
    """What is kept: validation.json without its paths, the probe's cell, curves.png, README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    made = made | {"study": Path(made["study"]).name}
    made["workload"] = made["workload"] | {k: Path(made["workload"][k]).name for k in ("target", "draft")}
    (folder / "validation.json").write_text(json.dumps(made, indent=1) + "\n")
    if probed:
        (folder / "probe.json").write_text(json.dumps({k: probed[k] for k in ("engine", "cells")}, indent=1) + "\n")
    curves(made, folder / "curves.png")
    (folder / "README.md").write_text(text(made, probed))


def curves(made: dict, path: Path) -> None:
    """Emitted per cycle and speedup against K, measured with intervals and predicted, a colour per format."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    cells = sorted(grid(made), key=lambda c: c["num_speculative_tokens"])
    for number, fmt in enumerate(dict.fromkeys(c["target_kv_dtype"] for c in made["cells"])):
        mine, colour = [c for c in cells if c["target_kv_dtype"] == fmt], f"C{number}"
        if agreed := [c for c in mine if c.get("agreement")]:
            _emitted(left, agreed, fmt, colour, shift=0.08 * (number - 1))
        if fast := [c for c in mine if steady(c)]:
            _speeds(right, fast, fmt, colour)
    left.set(xlabel="num_speculative_tokens", ylabel="emitted per cycle (accepted + 1)")
    right.set(xlabel="num_speculative_tokens", ylabel="speedup of steady steps, same format")
    for axis in (left, right):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _emitted(axis: "Axes", cells: list[dict], fmt: str, colour: str, shift: float) -> None:
    """Emitted per cycle with intervals, a little beside their K, and the replay's line."""
    at = [c["num_speculative_tokens"] + shift for c in cells]
    measured = [c["agreement"]["emitted"]["measured"] for c in cells]
    values = [m["value"] for m in measured]
    around = np.array([[v - m["ci95"][0], m["ci95"][1] - v] for v, m in zip(values, measured, strict=True)]).T
    axis.errorbar(at, values, around, fmt="o", capsize=3, color=colour, label=f"{fmt}, vLLM")
    told = [c["agreement"]["emitted"]["predicted"]["value"] for c in cells]
    axis.plot(at, told, "--", color=colour, label=f"{fmt}, replay")


def _speeds(axis: "Axes", cells: list[dict], fmt: str, colour: str) -> None:
    """Measured speedup of steady steps and, where there is one, the predicted."""
    ks = [c["num_speculative_tokens"] for c in cells]
    axis.plot(ks, [steady(c) for c in cells], "o-", color=colour, label=f"{fmt}, vLLM")
    if said := [(k, value(c)) for k, c in zip(ks, cells, strict=True) if value(c)]:
        axis.plot(*zip(*said, strict=True), "--", color=colour, label=f"{fmt}, predicted")


def grid(made: dict) -> list[dict]:
    """The cells of the grid that worked: the study's drafting, no backend asked for beyond the format's own."""
    return [c for c in made["cells"] if c["status"] == "ok" and c["name"].split("-")[2:] in ([], ["probabilistic"])]


def steady(cell: dict) -> float | None:
    """The measured speedup of steady steps of a cell, where there is one."""
    return (cell.get("speedup_measured") or {}).get("steady")


def value(cell: dict) -> float | None:
    """The predicted speedup of a cell, where there is one."""
    return (cell.get("speedup_predicted") or {}).get("value")


def text(made: dict, probed: dict | None) -> str:
    """README.md of the page."""
    engine, work = made["engine"], made["workload"]
    out = [
        "# vLLM beside the replay: what was measured",
        "",
        f"{engine['device']}, vLLM {engine['vllm']}, torch {(engine['versions'] or {}).get('torch')},"
        f" {', '.join(engine['dates']) or 'undated'}, {engine['timing_mode']}; {work['prompts']} prompts of"
        f" {work['documents']} documents, {work['output_tokens']} tokens each, {work['passes']} passes,"
        f" {work['requests_in_flight']} requests in flight. Made by `python -m studies.vllm_check"
        f" --batch {work['requests_in_flight']} --out DIR --page DIR`"
        + ("" if made["complete"] else ", **not complete**: what is pending has not run")
        + ".",
        "",
        "| cell | backends | emitted, vLLM | emitted, replay | difference | S_k, vLLM - replay | joint p | tokens/s | speedup |"
        " steady | predicted |",
        "|" + 11 * " --- |",
    ]
    for c in made["cells"]:
        if c["status"] != "ok":
            why = "" if c["status"] == "pending" else f": {c['error']}"
            out.append(f"| {c['name']} | | {c['status']}{why} | | | | | | | | |")
            continue
        a, gain = c.get("agreement"), c.get("speedup_measured")
        row = [c["name"], ", ".join(c["attention_backends_logged"])]
        if a:
            e, p = a["emitted"], a["joint_test"]["p_value"]
            row += [f"{e['measured']['value']:.4f}", f"{e['predicted']['value']:.4f}", interval(e["difference"])]
            gaps = [s["difference"]["value"] for s in a["marginal_survival"]]
            row.append(f"{min(gaps):+.4f} to {max(gaps):+.4f}")
            row.append("" if p is None else f"{p:.3f}")
        else:
            row += ["1", "", "", "", ""]
        row.append(f"{c['speed']['tokens_per_second']:,.0f}")
        row += [f"{x:.3f}" if x else "" for x in ((gain or {}).get("throughput"), steady(c), value(c))]
        out.append("| " + " | ".join(row) + " |")
    out.append("")
    out.append(
        "Intervals are 95 %, clustered by document and paired on the same tokens; S_k: the smallest and the largest difference"
        " over k = 1..K. The draft's cache has the format named in validation.json; the replay rounds queries to FP8 where vLLM"
        " does, for per-tensor FP8. Speedup is that of tokens per second over"
        " plain decoding, prefill and ragged ends included; steady is emitted per cycle times a plain step's time over a"
        " cycle's, of steps in which all requests decode: what a cost model predicts." + predicted_by(made)
    )
    out += ["", "![emitted and speedup against K](curves.png)", ""]
    for name, f in made["formats"].items():
        need = f.get("serving_tokens_for_the_replays_error") or {}
        tokens = ", ".join(f"{x['tokens']:.1e} at K = {k} (error {x['replays_error']:.5f})" for k, x in need.items())
        counters = (
            f"; counters of two servers need so many tokens to be as sure as the replay: {tokens}" if need else ""
        )
        out.append(f"- {name}: {regret_sentence(f)}{counters}")
    for c in (probed or {}).get("cells", []):
        alpha = (c.get("agreement") or {}).get("probe_alpha")
        if alpha and alpha["positions"]:
            out.append(
                f"- probe, {c['name']} ({probed['engine']['timing_mode']}, passes: {probed['workload']['passes']}): alpha"
                f" minus the replay's over {alpha['positions']:,} positions:"
                f" {alpha['mean_difference']:+.5f} on average, {alpha['rms_difference']:.5f} root mean square"
            )
    out += [f"- {w}" for w in made["warnings"]]
    return "\n".join(map(wrapped, out)) + "\n"


def predicted_by(made: dict) -> str:
    """By whose step times the predicted speedups were made."""
    costs = {c["speedup_predicted"]["cost"] for c in made["cells"] if value(c)}
    own = ": the study's own steps, which no engine schedules"
    return "".join(
        f" Predicted is the study's acceptance with step times `{c}`{own if c == 'measured' else ''}."
        for c in sorted(costs)
    )


def interval(block: dict) -> str:
    """A difference with its interval."""
    lo, hi = block["ci95"]
    return f"{block['value']:+.4f} [{lo:+.4f}, {hi:+.4f}]"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where everything is kept between calls")
    parser.add_argument("--page", type=Path, help="write the page of what is there into this directory")
    parser.add_argument("--pair", default="tiny")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="requests in flight")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="of the study and the replay")
    parser.add_argument("--time-limit", type=float, default=400.0, help="seconds per cell")
    parser.add_argument("--stop-after", type=float, help="seconds after which no further cell is started")
    parser.add_argument("--at-once", type=int, default=1, help="cells that run at once, each on a GPU of its own")
    parser.add_argument("--memory-share", type=float, default=0.5)
    parser.add_argument("--eager", action="store_true", help="starts faster; the speeds mean nothing then")
    args = parser.parse_args()
    began = time.monotonic()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder = study(out, args)

    def left() -> float | None:
        return None if args.stop_after is None else max(0.0, args.stop_after - (time.monotonic() - began))

    made = sweep(folder, out / "validation", args, left())
    probed = sweep(
        folder, out / "probed", args, left(), dtypes=["bf16"], ks=[4], extra=[], probe=True, passes=1, eager=True,
    )  # fmt: skip
    if args.page:
        page(args.page, made, probed)
    Reporter().note("complete" if made["complete"] and probed["complete"] else "not complete: call it again")


if __name__ == "__main__":
    main()
