"""How specq's plots look: one palette and a few helpers on matplotlib's axes.

Blue circles are the baseline, orange squares the format under test, grey the null arm, in every plot. Intervals are 95 %.
"""

from typing import TYPE_CHECKING

import numpy as np

from specq.report.view import FormatView, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart with any common colour vision, and in print by marker and dash as well.
BLUE, ORANGE, GREEN, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#8A8A8A", "#222222"
BASELINE = {"color": BLUE, "marker": "o", "markersize": 4.5}
FORMAT = {"color": ORANGE, "marker": "s", "markersize": 4.5}
DRAFT_TOO = {"color": PURPLE, "marker": "^", "markersize": 4.5}
NULL_ARM = {"color": GREY, "marker": "v", "markersize": 4.5}
RC = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.labelsize": 9.5, "axes.titlesize": 10, "legend.fontsize": 8.5,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#777777", "figure.facecolor": "white", "legend.framealpha": 0.9,
    "legend.edgecolor": "#dddddd", "axes.formatter.useoffset": False, "text.parse_math": False, "text.usetex": False,
}  # fmt: skip
WIDTH, DPI, TITLE_CHARACTERS = 7.8, 160, 92  # inches, dots per inch, characters of a bold title across the width


def k_axis(axes: "Axes", first: int, last: int, label: str = "K = num_speculative_tokens", ticks: int = 17) -> None:
    """Whole numbers from `first` to `last` on the x axis, at most `ticks` of them labelled."""
    axes.set_xticks(range(first, last + 1, -(-(last + 1 - first) // ticks)))
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_xlabel(label)


def mark_k(axes: "Axes", view: FormatView) -> None:
    """Vertical lines at the current and the recommended K, named in the legend."""
    if view.current == view.recommended:
        said = "now" if view.withheld else "now and recommended"
        axes.axvline(view.current, color=BLACK, lw=1.0, ls=":", label=f"{said}: K = {view.current}")
        return
    axes.axvline(view.current, color=BLACK, lw=1.0, ls=":", label=f"now: K = {view.current}")
    axes.axvline(view.recommended, color=GREEN, lw=1.4, ls="--", label=f"recommended: K = {view.recommended}")


def with_intervals(axes: "Axes", entries: dict[int, dict], shift: float, style: dict, label: str) -> None:
    """Values against K with error bars, moved sideways by `shift` so that two arms do not hide one another."""
    k, value, low, high = series(entries)
    bars = np.array([np.maximum(value - low, 0), np.maximum(high - value, 0)])
    name = f"{label}, 95 % interval" if np.isfinite(bars).any() else label
    axes.errorbar(k + shift, value, yerr=bars, ls="none", elinewidth=1.2, capsize=1.5, label=name, **style)


def percent_axis(axes: "Axes") -> None:
    """A logarithmic y axis with shares as plain percentages."""
    from matplotlib.ticker import NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend_outside(axes: "Axes", columns: int = 1, title: str | None = None) -> None:
    """The axes' legend below all axes of its (sub)figure, where it hides no data; lines that mark a K come last."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: "K = " in labels[i])
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title, title_fontsize=8.5)


def outline(color: str, filled: bool) -> dict:
    """How a histogram is drawn: a filled area for what is compared with, a line for what is compared."""
    return {"color": color, "fill": filled, "alpha": 0.4 if filled else 1.0, "lw": 0 if filled else 1.5}
