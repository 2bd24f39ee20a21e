"""The plots that a decision can be taken from: the break-even line, and how the decision moves when its inputs do.

They draw one format's decision block (study.json's `decisions`, or decision.json of `specq tune --out`).
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specq.report.style import BASELINE, BLACK, DPI, FORMAT, GREEN, ORANGE, RC, TITLE_CHARACTERS, WIDTH, legend_outside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*X"
DECIDED = {"markersize": 9, "markeredgecolor": BLACK, "markeredgewidth": 1.6}


def write_decision_plots(folder: Path, block: dict, recommendation: dict) -> dict[str, Path]:
    """Draw `break_even.png` (not for BF16 itself) and `sensitivity.png` into `folder`; returns their paths by name."""
    draws: dict[str, Callable[[Figure], str]] = {
        "break_even": lambda f: draw_break_even(f, block, recommendation),
        "sensitivity": lambda f: draw_sensitivity(f, block, recommendation),
    }
    if recommendation["target_kv_dtype"] == "bf16":
        del draws["break_even"]
    return draw_all(folder, draws)


def draw_all(folder: Path, draws: "dict[str, Callable[[Figure], str]]") -> dict[str, Path]:
    """Save every figure as NAME.png; each function fills a figure and returns its title."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.png" for name in draws}
    for name, draw in draws.items():
        with matplotlib.rc_context(RC):
            figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
            FigureCanvasAgg(figure)
            title = "\n".join(textwrap.wrap(draw(figure), TITLE_CHARACTERS))
            figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, fontweight="bold")
            figure.savefig(paths[name], dpi=DPI)
    return paths


def draw_break_even(figure: "Figure", block: dict, recommendation: dict) -> str:
    """Emitted ratio against cycle-time ratio, format over BF16: above the line the format is faster.

    Filled: each at its best K, which is what is decided by. Hollow: both at the K in use now, where that is another.
    """
    from matplotlib import colormaps

    figure.set_figheight(4.8)
    axes = figure.subplots()
    curves, name = block["curves"], recommendation["target_kv_dtype"]
    batches, contexts = (sorted({c[key] for c in curves}) for key in ("batch", "context"))
    shades = colormaps["viridis"](np.linspace(0.0, 0.85, len(batches)))
    k = curves[0]["break_even"]["k"]
    best, now = [at_best(c) for c in curves], [at_current(c) for c in curves]
    ends = [x * np.array(c["over_bf16_ci95"], dtype=float) for (x, _), c in zip(best, curves, strict=True)]
    low, high = _limits(np.concatenate([*best, *ends, *(p for p in now if p)]))
    axes.plot([low, high], [low, high], color=BLACK, lw=1.2, label="break-even: emitted ratio = cycle-time ratio")
    axes.fill_between([low, high], [low, high], high, color=GREEN, alpha=0.10, lw=0)
    axes.fill_between([low, high], low, [low, high], color=ORANGE, alpha=0.10, lw=0)
    for x, y, text, side in ((0.02, 0.96, f"{name} is faster", "left"), (0.98, 0.04, f"{name} is slower", "right")):
        axes.text(
            x, y, text, transform=axes.transAxes, ha=side, va="top" if side == "left" else "bottom", color="#444444"
        )
    for i, curve in reversed(list(enumerate(curves))):  # the point decided for comes first in the list and lies on top
        shade, marker = shades[batches.index(curve["batch"])], MARKERS[contexts.index(curve["context"]) % len(MARKERS)]
        if now[i]:
            axes.plot(*now[i], color=shade, marker=marker, markersize=6, ls="none", markerfacecolor="none")
        x, y = best[i]
        look = {"color": shade, "marker": marker, "ls": "none", "capsize": 2, "elinewidth": 1.1}
        look |= DECIDED if i == 0 else {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.errorbar(x, y, yerr=np.abs(ends[i][:, None] - y), **look)
    grey = {"color": "#555555", "marker": "o", "ls": "none"}
    axes.plot([], [], **grey, label="filled: each at its best K, 95 % interval")
    if any(now):
        axes.plot([], [], **grey, markerfacecolor="none", label=f"hollow: both at K = {k}")
    if len(curves) > 1:
        axes.plot([], [], **grey | {"color": "white"} | DECIDED, label="as decided")
    for i, batch in enumerate(batches):
        axes.plot([], [], color=shades[i], lw=5, label=f"batch {batch}")
    for i, context in enumerate(contexts):
        axes.plot([], [], **grey | {"marker": MARKERS[i % len(MARKERS)]}, label=f"context {context:,}")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel(f"cycle-time ratio, {name} / BF16 (left: cheaper cycles)")
    axes.set_ylabel("emitted ratio\n(up: more tokens per cycle)")
    legend_outside(axes, 3)
    first = curves[0]
    where = f"batch {first['batch']}, context {first['context']:,}"
    parts = f"{_percent(best[0][1])} tokens per cycle, {_percent(best[0][0])} time per cycle"
    mine, base = first["recommended"], first["recommended_bf16"]
    ks = f"both at K = {mine}" if mine == base else f"K = {mine} against BF16's {base}"
    source = recommendation["cost"]["source"]
    return f"{name} at {where}: {_percent(first['over_bf16'])} speed, {ks}: {parts} (cost: {source})"


def at_best(curve: dict) -> tuple[float, float]:
    """(cycle-time ratio, emitted ratio), the format at its best K over BF16 at its own; speed is the second over the first."""
    k, base = curve["recommended"], curve["recommended_bf16"]
    mine, theirs = curve["cycle_seconds"][k], curve["cycle_seconds_bf16"][base]
    return mine / theirs, curve["over_bf16"] * mine / theirs


def at_current(curve: dict) -> tuple[float, float] | None:
    """The same with both at the K in use now; None where that is the best of both."""
    found = curve["break_even"]
    if curve["recommended"] == curve["recommended_bf16"] == found["k"]:
        return None
    return found["cycle_time_ratio"], found["emitted_ratio"]


def _percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}\N{NO-BREAK SPACE}%"


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Equal limits of both axes around 1 and all values; unknown interval ends do not count."""
    low, high = min(1.0, np.nanmin(values)), max(1.0, np.nanmax(values))
    margin = max(0.15 * (high - low), 0.004)
    return low - margin, high + margin


def draw_sensitivity(figure: "Figure", block: dict, recommendation: dict) -> str:
    """Tokens per second over BF16 (top) and the best K (bottom) against acceptance, draft cost and batch size."""
    figure.set_figheight(5.4)
    found, name = block["sensitivity"], recommendation["target_kv_dtype"]
    at = found["at"]
    top, bottom = figure.subplots(2, 3, sharex="col", sharey="row", height_ratios=[1.15, 1])
    columns = (
        ("alpha", 100.0, 0.0, "format's acceptance rates moved by\n(percentage points, every position)"),
        ("draft_cost", 1.0, 1.0, "draft's step times, factor\n(c: draft against target)"),
        ("batch", 1.0, float(at["batch"]), f"batch size\n(context {at['context']:,})"),
    )
    for over, best, (key, scale, here, label) in zip(top, bottom, columns, strict=True):
        _sensitivity_column(over, best, found[key], scale, here, label, key != "alpha")
    ks = [e[k] for key, *_ in columns for e in found[key] for k in ("recommended", "recommended_bf16")]
    bottom[0].set_ylim(-0.6, max(2, *ks) + 0.8)
    bottom[0].yaxis.get_major_locator().set_params(integer=True)
    top[0].set_ylabel("tokens per second over\nBF16, each at its best K")
    bottom[0].set_ylabel("best K")
    handles = [*top[0].get_legend_handles_labels()[0], *bottom[0].get_legend_handles_labels()[0]]
    names = [name if h.get_label() == "format" else h.get_label() for h in handles]
    figure.legend(handles, names, loc="outside lower center", ncols=5)
    return _sensitivity_title(found, name, recommendation)


def _sensitivity_column(
    over: "Axes", best: "Axes", entries: list[dict], scale: float, here: float, label: str, logarithmic: bool
) -> None:
    x = scale * np.array([e["x"] for e in entries])
    value = np.array([e["over_bf16"] for e in entries], dtype=float)
    low, high = np.array([e["ci95"] for e in entries], dtype=float).reshape(-1, 2).T
    over.fill_between(x, low, high, color=ORANGE, alpha=0.25, lw=0, label="95 % interval")
    over.plot(x, value, color=ORANGE, lw=1.4, marker="s", markersize=3)
    over.axhline(1, color=BLACK, lw=1.0, label="break-even")
    best.step(
        x, [e["recommended_bf16"] for e in entries], where="mid", lw=1.2, **BASELINE | {"markersize": 4}, label="BF16"
    )
    style = FORMAT | {"markersize": 3}
    best.step(x, [e["recommended"] for e in entries], where="mid", lw=1.2, ls="--", **style, label="format")
    for axes in (over, best):
        axes.axvline(here, color=BLACK, lw=1.0, ls=":", label="as decided" if axes is over else None)
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    best.set_xlabel(label)


def _sensitivity_title(found: dict, name: str, recommendation: dict) -> str:
    """Where the decision would turn: the acceptance change at which tokens per second cross BF16's."""
    source, where = (
        recommendation["cost"]["source"],
        f"batch\N{NO-BREAK SPACE}{found['at']['batch']}, context\N{NO-BREAK SPACE}{found['at']['context']:,}",
    )
    if name == "bf16":
        return f"How the best K moves, at {where} (cost: {source})"
    turn = crossing([e["x"] for e in found["alpha"]], [e["over_bf16"] for e in found["alpha"]])
    if turn is None:
        always = "faster" if found["alpha"][0]["over_bf16"] > 1 else "slower"
        said = f"stays {always} than BF16 over the whole range of acceptance"
    else:
        verb = "lose" if turn < 0 else "gain"
        said = f"breaks even with BF16 if its acceptance rates {verb} {abs(100 * turn):.1f} points"
    return f"{name} {said}, at {where} (cost: {source})"


def crossing(x: list[float], value: list[float]) -> float | None:
    """Where a curve crosses 1, by linear interpolation, nearest to x = 0; None where it does not."""
    found = []
    for x0, x1, v0, v1 in zip(x, x[1:], value, value[1:], strict=False):
        if (v0 - 1) * (v1 - 1) <= 0 and v0 != v1:
            found.append(x0 + (x1 - x0) * (1 - v0) / (v1 - v0))
    return min(found, key=abs) if found else None
