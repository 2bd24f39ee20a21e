"""The page of the context study and its plots, written from context.json alone."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from studies.common.command import read_results
from studies.common.results import machine_line, markdown

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.axes import Axes

ABOUT = """# Context length, KL, and what acceptance does not say

The embedded pair (8,192 positions) continues the same {documents} documents behind their first tokens, as many as `context`
says; every format scores the same continuations of 96 tokens. Shifts are of accepted tokens per cycle at K = {k} against the
BF16 target, the draft's cache in BF16; 95 % intervals, paired by document. With {documents} documents intervals are wide. The
null arm is BF16 again in another order of arithmetic: what rounding alone does.
"""
HEALTH = """## High acceptance is not health

{about}: with a BF16 cache the same target, to the bit. In `int8_per_tensor` its keys lose their resolution. A draft with
its own BF16 cache notices: acceptance falls. A draft that reads the same corrupted cache (`{worst}`: self-speculation through
one format) makes the same errors, and acceptance stays perfect while the text is another model's. Acceptance compares draft
and target, never the target with what it should be: look at KL and top-1 agreement beside it, which study.json has for every
arm. Cycles that the texts' ends cut are counted whole.

![acceptance and health](health.png)
"""
APART = 1.15  # between the formats' points of one context, sideways in the plot
SHIFTS = (0.005, 0.01, 0.03, 0.1, 0.3)  # ticks of a shift of mu, either sign
STYLES = {"fp8_e4m3": ("#D55E00", "s"), "int8_per_token_head": ("#0072B2", "o"), "int8_per_tensor": ("#AA4499", "^")}


def text(results: dict) -> str:
    """README.md of the page."""
    out = [ABOUT.format(**results), "Made by `make context`: " + machine_line(results["environment"]) + "\n"]
    out += [f"Not made: {n['name']}, {n['about']} ({n['why']}).\n" for n in results["not_made"]]
    out += _not_stressed(results["series"])
    out += ["![shift of mu and KL against context](context.png)\n"]
    out += [
        "Shifts: linear up to 0.01, logarithmic beyond. An interval of KL at the edge goes on; the tables have it. Points of"
        f" the second format stand {APART - 1:.0%} to the right of their context, so that none hides another.\n"
    ]
    for series in results["series"]:
        out += [f"## {series['name'].capitalize()}\n", markdown(_points(series)), markdown(_parts(series))]
        out += [_growth(series)]
    arms = results["health"]["arms"]
    out += [HEALTH.format(about=results["health"]["about"].capitalize(), worst=arms[-1]["arm"]), markdown(_arms(arms))]
    return "\n".join(out).rstrip() + "\n"


def _not_stressed(series: list[dict]) -> list[str]:
    """The contexts of one series at which another was not made."""
    have = [{p["context"] for p in s["points"]} for s in series]
    gone = [(s["name"], sorted(set.union(*have) - mine)) for s, mine in zip(series, have, strict=True)]
    return [
        f"Not made: {name} at {', '.join(f'{c:,}' for c in contexts)} tokens.\n" for name, contexts in gone if contexts
    ]


def _points(series: dict) -> dict:
    told = ("mu_shift", "alpha_shift", "kl", "top1_agreement")
    rows = []
    for p in series["points"]:
        rows += [
            [p["context"], fmt, p["mu"], p["alpha"]["value"], *(f[c] for c in told)] for fmt, f in p["formats"].items()
        ]
        rows.append([p["context"], "null arm", p["mu"], p["alpha"]["value"], p["null_shift"], "", "", ""])
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
        "formats": [",d", "", ".3f", ".3f", "+.4f", "+.5f", ".6f", ".1%"],
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
        "rows": [[a["arm"], a["mu"], a["alpha"], a["kl"], a["top1_agreement"]] for a in arms],
    }


def write_page(folder: Path) -> None:
    """Write README.md, context.png and health.png beside context.json."""
    results = read_results(folder, "context")
    (folder / "README.md").write_text(text(results))
    _plot_context(results, folder / "context.png")
    _plot_health(results["health"]["arms"], folder / "health.png")


def _plot_context(results: dict, path: Path) -> None:
    plt, rc = _pyplot()
    from matplotlib.ticker import FixedLocator, NullLocator

    with plt.rc_context(rc):
        size = {"figsize": (7.8, 5.4), "sharex": True, "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(2, len(results["series"]), **size)
        shown = {}
        contexts = sorted(
            {p["context"] for series in results["series"] for p in series["points"]}
        )  # the axes are shared
        for column, series in zip(axes.T, results["series"], strict=True):
            column[0].set_title(series["name"])
            for ax, key in zip(column, ("mu_shift", "kl"), strict=True):
                for i, fmt in enumerate(series["points"][0]["formats"]):
                    shown[fmt] = _against_context(ax, series["points"], fmt, key, APART**i)
            column[0].axhline(0, color="#8A8A8A", lw=0.8)
            column[0].set_yscale("symlog", linthresh=0.01, linscale=1)
            column[0].set_ylim(*_all_of([f["mu_shift"] for p in series["points"] for f in p["formats"].values()]))
            column[0].yaxis.set_major_locator(FixedLocator([s * v for v in SHIFTS for s in (-1, 1)] + [0]))
            column[0].yaxis.set_minor_locator(NullLocator())
            column[0].yaxis.set_major_formatter(lambda y, _: f"{y:+g}" if y else "0")
            column[1].set_yscale("log")
            column[1].set_ylim(*_around([f["kl"] for p in series["points"] for f in p["formats"].values()]))
            column[1].yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            column[1].set_xscale("log", base=2)
            column[1].set_xticks(contexts, [f"{c:,}" for c in contexts])
            column[1].set_xlabel("context, tokens")
        axes[0][0].set_ylabel("shift of mu, K = 5")
        axes[1][0].set_ylabel("KL from BF16, nats")
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _around(found: list[dict]) -> tuple[float, float]:
    """Limits of a logarithmic axis by the values: an interval that nearly reaches 0 must not flatten all others."""
    return min(f["value"] for f in found) / 5, max(f["ci95"][1] for f in found) * 1.5


def _all_of(found: list[dict]) -> tuple[float, float]:
    """Limits of a symmetric logarithmic axis that hold every interval."""
    return 1.4 * min(f["ci95"][0] for f in found), 1.4 * max(f["ci95"][1] for f in found)


def _against_context(ax: "Axes", points: list[dict], fmt: str, key: str, apart: float) -> object:
    """One format's values with their intervals, moved sideways by a factor so that two do not hide one another."""
    found = [p["formats"][fmt][key] for p in points]
    value = np.array([f["value"] for f in found])
    low, high = np.array([f["ci95"] for f in found], dtype=float).T
    bars = [np.maximum(value - low, 0), np.maximum(high - value, 0)]
    color, marker = STYLES[fmt]
    at = [p["context"] * apart for p in points]
    how = {
        "color": color,
        "marker": marker,
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "zorder": 3,
    }
    return ax.errorbar(at, value, yerr=bars, lw=1, capsize=2, ecolor=(color, 0.5), **how)


def _plot_health(arms: list[dict], path: Path) -> None:
    plt, rc = _pyplot()
    with plt.rc_context(rc):
        figure, axes = plt.subplots(figsize=(7.8, 3.6), layout="constrained")
        at = np.arange(len(arms))
        for shift, key, label, color in (
            (-0.2, "alpha", "acceptance (alpha)", "#D55E00"),
            (0.2, "top1_agreement", "top-1 agreement with BF16", "#0072B2"),
        ):
            axes.barh(at + shift, [a[key]["value"] for a in arms], 0.38, color=color, label=label)
        axes.set_yticks(at, [a["arm"] for a in arms])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.02)
        figure.legend(loc="outside lower center", ncols=2)
        axes.set_title("Target and draft are one model; arm = target's cache + draft's cache")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _pyplot() -> tuple["ModuleType", dict]:
    """matplotlib without a display, and how specq's plots look."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from specq.report.style import RC

    return plt, RC
