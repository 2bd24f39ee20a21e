"""The plots of one KV format, drawn with matplotlib's object interface: no global state, no display.

Each `draw_*` function fills a figure and returns its title, which says in words what is seen.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specq.analysis import BASE
from specq.report.decision_plots import draw_all, write_decision_plots
from specq.report.position_plots import draw_context, draw_ratios
from specq.report.style import (
    BASELINE,
    BLACK,
    DRAFT_TOO,
    FORMAT,
    GREY,
    ORANGE,
    k_axis,
    legend_outside,
    mark_k,
    with_intervals,
)  # fmt: skip
from specq.report.view import FormatView, interval, number, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_plots(
    folder: Path, study: dict, recommendation: dict, positions: Mapping[str, np.ndarray]
) -> dict[str, Path]:
    """Draw all plots into `folder`; returns their paths by name."""
    view = FormatView(study, recommendation)
    drawn: dict[str, Callable[[Figure], str]] = {
        "acceptance_curve": lambda f: draw_acceptance(f, view),
        "mu_shift": lambda f: draw_shift(f, view),
        "speedup_vs_k": lambda f: draw_speedup(f, view),
        "ratio_histogram": lambda f: draw_ratios(f, view, positions),
        "context": lambda f: draw_context(f, view, positions),
    }
    return draw_all(folder, drawn) | write_decision_plots(folder, view.decision, recommendation)


def draw_acceptance(figure: "Figure", view: FormatView) -> str:
    """Mean accepted per cycle by K, and marginal and conditional survival at one K."""
    figure.set_figheight(4.4)
    left, right = (part.subplots() for part in figure.subfigures(1, 2, width_ratios=[3, 2]))
    k = view.shown_k
    for arm, label, style, shift in ((BASE, "BF16", BASELINE, -0.13), (view.arm, view.label, FORMAT, 0.13)):
        if view.is_baseline and style is FORMAT:
            continue
        with_intervals(left, view.mu(arm), shift, style, label)
        marginal, conditional = view.survival(arm)
        steps = np.arange(1, k + 1) + shift * k / 8
        right.plot(steps, marginal, ls="-", lw=1.1, label=f"{label} marginal S_k", **style)
        hollow = style | {"markerfacecolor": "white"}
        right.plot(steps, conditional, ls="--", lw=1.1, label=f"{label} conditional", **hollow)
    mark_k(left, view)
    k_axis(left, min(1, view.current, view.recommended), view.k_max)
    left.set_ylim(bottom=max(0.0, left.get_ylim()[0]))
    left.set_ylabel("mu: mean accepted tokens per cycle")
    legend_outside(left)
    k_axis(right, 1, k, f"k: draft position in a cycle with K = {k}", 10)
    right.set_ylim(0, 1.04)
    right.set_ylabel("marginal S_k, conditional S_k/S_(k-1)")
    legend_outside(right)
    base, mine = (number(view.mu(arm)[k]["value"], 3, sign=False) for arm in (BASE, view.arm))
    text = f"Accepted tokens per cycle at K = {k}: {base} with a BF16 cache"
    return text if view.is_baseline else f"{text}, {mine} with {view.label}"


def draw_shift(figure: "Figure", view: FormatView) -> str:
    """Shift of mu against the baseline by K, the null arm's band, and the shift on own text in a panel of its own."""
    own = view.own_shift
    if own:
        axes, side = figure.subplots(1, 2, width_ratios=[6, 1])
        _own_shift(side, own)
    else:
        axes = figure.subplots()
    k, value, low, high = series(view.null_shifts())
    axes.axhline(0, color=BLACK, lw=0.6)
    # an edge keeps the band in sight where it is thinner than the line of zero
    axes.fill_between(k, low, high, color=GREY, alpha=0.45, lw=3, label="null arm, 95 % band")
    axes.plot(k, value, color=GREY, lw=3)
    if not view.is_baseline:
        text = "own text" if view.own_text_only else f"{view.recommendation['mu_shift']['text']} text"
        with_intervals(axes, view.shifts(view.arm), -0.13, FORMAT, f"{view.arm} ({text})")
        with_intervals(axes, view.shifts(view.inherited_arm), 0.13, DRAFT_TOO, f"{view.inherited_arm} ({text})")
    mark_k(axes, view)
    k_axis(axes, min(1, view.current, view.recommended), view.k_max)
    axes.set_ylabel("shift of mu against BF16\n(accepted tokens per cycle)")
    legend_outside(axes, 2)
    return _shift_title(view)


def _own_shift(axes: "Axes", own: dict) -> None:
    with_intervals(axes, {own["k"]: own}, 0.0, FORMAT | {"marker": "D"}, "own text")
    axes.axhline(0, color=BLACK, lw=0.9)
    axes.set_xlim(own["k"] - 0.5, own["k"] + 0.5)
    axes.set_xticks([])
    axes.set_xlabel(f"own text\nat K = {own['k']}\n(own scale)")


def _shift_title(view: FormatView) -> str:
    if view.is_baseline:
        return "BF16 is the baseline: all that can differ is the order of arithmetic (null arm)"
    at = view.shift
    if at["ci95"][0] is None:
        return (
            f"{view.label} shifts accepted tokens per cycle by {number(at['value'])} at K = {view.shown_k}; no interval"
        )
    said = f"{number(at['value'])} {interval(at['ci95'])} at K = {view.shown_k}".replace(" ", "\N{NO-BREAK SPACE}")
    if at["significant"]:
        return f"{view.label} changes accepted tokens per cycle beyond the noise floor: {said}"
    return f"{view.label}: no change of accepted tokens per cycle is resolved: {said}"


def draw_speedup(figure: "Figure", view: FormatView) -> str:
    """Speedup over plain decoding by K at the decided operating point, and for every other batch and context."""
    first, curves = view.curves[0], view.curves
    contexts = list(dict.fromkeys(c["context"] for c in curves))[:3]
    if len(curves) > 1:
        figure.set_figheight(6.4)
        grid = figure.add_gridspec(2, len(contexts), height_ratios=[3.3, 2.4])
        axes = figure.add_subplot(grid[0, :])
        _other_points([figure.add_subplot(grid[1, i]) for i in range(len(contexts))], view, contexts)
    else:
        axes = figure.subplots()
    _speedup_band(axes, first, "speedup_bf16", BASELINE, "BF16 over plain BF16 decoding")
    if not view.is_baseline:
        _speedup_band(axes, first, "speedup", FORMAT, f"{view.label} over plain {view.label} decoding")
        over_bf16 = np.array(first["speedup"]) * first["cycle_seconds_bf16"][0] / first["cycle_seconds"][0]
        axes.plot(over_bf16, color=ORANGE, lw=1.1, ls="-.", label=f"{view.label} over plain BF16 decoding")
    axes.axhline(1, color=BLACK, lw=0.9)
    mark_k(axes, view)
    k_axis(axes, 0, view.k_max)
    axes.set_ylabel("speedup over plain decoding (x)")
    axes.set_title(f"batch {first['batch']}, context {first['context']} tokens; bands: 95 %", loc="left", fontsize=9.5)
    legend_outside(axes, 2)
    now, best = first["speedup"][view.current], first["speedup"][view.recommended]
    text = f"{view.label} at K = {view.recommended}: {best:.2f}x plain decoding"
    if view.current != view.recommended:
        text += f"; now, at K = {view.current}, {now:.2f}x"
    return f"{text} (cost: {view.study['cost']['source']})"


def _speedup_band(axes: "Axes", curve: dict, key: str, style: dict, label: str) -> None:
    low, high = np.array(curve[f"{key}_ci95"], dtype=float).T
    axes.fill_between(range(len(low)), low, high, color=style["color"], alpha=0.18, lw=0)
    axes.plot(curve[key], lw=1.4, label=label, **style)


def _other_points(panels: "list[Axes]", view: FormatView, contexts: list[int]) -> None:
    """One panel per context, one line per batch (thinner on top, so that equal ones both show), a dot at each one's K."""
    from matplotlib import colormaps

    batches = sorted({c["batch"] for c in view.curves})
    shades = colormaps["viridis"](np.linspace(0.05, 0.85, len(batches)))
    for axes, context in zip(panels, contexts, strict=True):
        for curve in (c for c in view.curves if c["context"] == context):
            at, order = curve["recommended"], batches.index(curve["batch"])
            shade, width = shades[order], 1.2 + 3.0 * (1 - (order + 1) / len(batches))
            axes.plot(curve["speedup"], color=shade, lw=width, zorder=2 + order / 100, label=f"batch {curve['batch']}")
            axes.plot(at, curve["speedup"][at], color=shade, marker="o", markersize=5, ls="none")
        axes.axhline(1, color=BLACK, lw=0.8)
        axes.set_title(f"{view.label}, context {context}", loc="left", fontsize=9)
        axes.sharey(panels[0])
        k_axis(axes, 0, view.k_max, "K (dot: recommended)", 24 // len(contexts))
    panels[0].set_ylabel("speedup (x)")
    panels[-1].legend(loc="best", fontsize=7.5, ncols=-(-len(batches) // 5))
