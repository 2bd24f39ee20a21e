"""The page of the context study and its plots, written from context.json alone."""

from pathlib import Path

import numpy as np

from studies.common.command import read_results
from studies.common.results import machine_line, markdown

ABOUT = """# Context length, KL, and what acceptance does not say

The embedded pair (8,192 positions) continues the same {documents} documents behind their first 256 to 8,000 tokens; every
format scores the same continuations of 96 tokens. Shifts are of accepted tokens per cycle at K = {k} against the BF16 target,
the draft's cache in BF16; 95 % intervals, paired by document. With {documents} documents intervals are wide.
"""
HEALTH = """## High acceptance is not health

{about}: the same target, to the bit, while its cache is BF16. In `int8_per_tensor` its keys lose their resolution. A draft
with its own BF16 cache notices: acceptance falls. A draft that reads the same corrupted cache (`{worst}`: self-speculation,
or a server whose draft inherits the target's format) makes the same errors, and acceptance stays perfect while the text is
another model's. Acceptance compares draft and target, never the target with what it should be: look at KL and top-1
agreement beside it, which study.json has for every arm.

![acceptance and health](health.png)
"""
STYLES = {"fp8_e4m3": ("#D55E00", "s"), "int8_per_token_head": ("#0072B2", "o"), "int8_per_tensor": ("#AA4499", "^")}


def text(results: dict) -> str:
    """README.md of the page."""
    out = [ABOUT.format(**results), "Made by `make context`: " + machine_line(results["environment"]) + "\n"]
    out += [f"Not made: {n['about']} ({n['why']}).\n" for n in results["not_made"]]
    out += ["![shift, KL and alpha against context](context.png)\n"]
    for series in results["series"]:
        out += [f"## {series['name'].capitalize()}\n", markdown(_points(series)), markdown(_parts(series))]
        out += [_growth(series)]
    arms = results["health"]["arms"]
    out += [HEALTH.format(about=results["health"]["about"].capitalize(), worst=arms[-1]["arm"]), markdown(_arms(arms))]
    return "\n".join(out).rstrip() + "\n"


def _points(series: dict) -> dict:
    shifts = ("mu_shift", "alpha_shift")
    rows = [
        [
            p["context"],
            fmt,
            p["mu"],
            p["alpha"]["value"],
            *(f[c] for c in shifts),
            f["kl"],
            f["top1_agreement"]["value"],
        ]
        for p in series["points"]
        for fmt, f in p["formats"].items()
    ]
    return {
        "caption": "",
        "columns": [
            "context",
            "format",
            "mu, BF16",
            "alpha, BF16",
            "shift of mu",
            "shift of alpha",
            "KL, nats",
            "top-1",
        ],
        "formats": [",d", "", ".3f", ".3f", "+.4f", "+.5f", ".6f", ".2%"],
        "rows": rows,
    }


def _parts(series: dict) -> dict:
    parts = list(next(iter(series["points"][0]["formats"].values()))["alpha_shift_by_part"])
    rows = [
        [p["context"], fmt, *(f["alpha_shift_by_part"][part] for part in parts)]
        for p in series["points"]
        for fmt, f in p["formats"].items()
    ]
    return {
        "caption": "Early and late in the continuation, shift of alpha:",
        "columns": ["context", "format", *parts],
        "formats": [",d", "", *["+.5f"] * len(parts)],
        "rows": rows,
    }


def _growth(series: dict) -> str:
    """What grows, shrinks, or is not resolved between the shortest and the longest context, in sentences."""
    g = series["growth"]
    out = [f"From {g['from']:,} to {g['to']:,} tokens, paired by document:\n"]
    lo, hi = g["alpha_bf16"]["ci95"]
    out.append(f"- alpha of the BF16 pair moves by {g['alpha_bf16']['value']:+.4f} [{lo:+.4f}, {hi:+.4f}];")
    for fmt, change in g["formats"].items():
        mu, kl = change["mu_shift"], change["kl"]
        how = _direction(-mu["ci95"][1], -mu["ci95"][0])
        less = _direction(*kl["ci95"])
        out.append(
            f"- {fmt}: the loss of mu {how}, {mu['value']:+.4f} [{mu['ci95'][0]:+.4f}, {mu['ci95'][1]:+.4f}]; KL {less},"
            f" {kl['value']:+.6f} [{kl['ci95'][0]:+.6f}, {kl['ci95'][1]:+.6f}]."
        )
    return "\n".join(out) + "\n"


def _direction(low: float, high: float) -> str:
    return "grows" if low > 0 else "shrinks" if high < 0 else "does not change resolvably"


def _arms(arms: list[dict]) -> dict:
    return {
        "caption": "",
        "columns": [
            "arm (target+draft cache)",
            "mu, K = 5",
            "alpha",
            "KL from BF16, nats",
            "top-1 agreement with BF16",
        ],
        "formats": ["", ".3f", ".4f", ".5f", ".1%"],
        "rows": [[a["arm"], a["mu"], a["alpha"]["value"], a["kl"], a["top1_agreement"]["value"]] for a in arms],
    }


def write_page(folder: Path) -> None:
    """Write README.md, context.png and health.png beside context.json."""
    results = read_results(folder, "context")
    (folder / "README.md").write_text(text(results))
    _plot_context(results, folder / "context.png")
    _plot_health(results["health"]["arms"], folder / "health.png")


def _plot_context(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from specq.report.style import RC

    rows = (("mu_shift", "shift of mu, K = 5"), ("kl", "KL from BF16, nats"))
    with plt.rc_context(RC):
        size = {"figsize": (7.8, 5.2), "sharex": True, "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(2, len(results["series"]), **size)
        for column, series in enumerate(results["series"]):
            contexts = np.array([p["context"] for p in series["points"]], dtype=float)
            for line, (key, label) in enumerate(rows):
                ax = axes[line][column]
                for i, fmt in enumerate(series["points"][0]["formats"]):
                    found = [p["formats"][fmt][key] for p in series["points"]]
                    value = np.array([f["value"] for f in found])
                    low, high = np.array([f["ci95"] for f in found], dtype=float).T
                    color, marker = STYLES[fmt]
                    ax.errorbar(contexts * 1.06 ** i, value, yerr=[np.maximum(value - low, 0), np.maximum(high - value, 0)],
                                color=color, marker=marker, markersize=4.5, lw=1, capsize=2, label=fmt)  # fmt: skip
                ax.set_xscale("log", base=2)
                if key == "kl":
                    ax.set_yscale("log")
                else:
                    ax.axhline(0, color="#8A8A8A", lw=0.8)
                ax.set_ylabel(label if column == 0 else "")
                if line == 0:
                    ax.set_title(series["name"])
                    ax.legend()
                else:
                    ax.set_xticks(contexts, [f"{c:,.0f}" for c in contexts])
                    ax.set_xlabel("context, tokens")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _plot_health(arms: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from specq.report.style import RC

    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(7.8, 3.2), layout="constrained")
        at = np.arange(len(arms))
        for shift, key, label, color in ((-0.2, "alpha", "acceptance (alpha)", "#D55E00"),
                                         (0.2, "top1_agreement", "top-1 agreement with BF16", "#0072B2")):  # fmt: skip
            axes.barh(at + shift, [a[key]["value"] for a in arms], 0.38, color=color, label=label)
        axes.set_yticks(at, [a["arm"] for a in arms])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02)
        axes.legend(loc="lower left")
        axes.set_title("Target and draft are one model; arm = target's cache + draft's cache")
        figure.savefig(path, dpi=120)
        plt.close(figure)
