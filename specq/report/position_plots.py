"""The two plots made from positions.parquet: what drafted tokens look like, and how acceptance goes with context."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import t as student

from specq.analysis import BASE, NULL
from specq.report.style import (
    BASELINE,
    BLACK,
    BLUE,
    FORMAT,
    GREY,
    NULL_ARM,
    ORANGE,
    legend_outside,
    outline,
    percent_axis,
)  # fmt: skip
from specq.report.view import FormatView, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns = Mapping[str, np.ndarray]
Sums = tuple[np.ndarray, np.ndarray]

CONTEXT_BINS, SMALLEST_BIN = 8, 20  # positions of the baseline that a bin holds at least
UNCHANGED = 1e-4  # |change of alpha| below this counts as unchanged


def draw_ratios(figure: "Figure", view: FormatView, positions: Columns) -> str:
    """Ratios of drafted tokens, and the change of alpha per position against the baseline."""
    figure.set_figheight(4.2)
    left, right = (part.subplots() for part in figure.subfigures(1, 2))
    means = []
    for arm, label, color in ((BASE, "BF16", BLUE), (view.arm, view.label, ORANGE)):
        if view.is_baseline and color == ORANGE:
            continue
        ratio = np.asarray(positions["ratio"][view.rows(positions, arm)], dtype=float)
        _ratio_outline(left, ratio, color, f"{label}: {100 * (ratio >= 1).mean():.1f} % are exactly 1")
        means.append(f"{number(float(ratio.mean()), 3, sign=False)} with {label}")
    percent_axis(left)
    left.set_xlabel(_ratio_name(view))
    left.set_ylabel("share of drafted tokens per bin")
    left.set_xticks([0, 0.25, 0.5, 0.75, 1.06], ["0", "0.25", "0.5", "0.75", "exactly 1"])
    left.set_xlim(-0.03, 1.14)
    legend_outside(left)
    _alpha_changes(right, view, positions)
    return f"Drafted tokens are accepted with mean probability {', '.join(means)}"


def _ratio_outline(axes: "Axes", ratio: np.ndarray, color: str, label: str) -> None:
    """Bins of 0.05 below 1, and what is exactly 1 in a bin of its own beyond the axis' end."""
    floor = 0.5 / len(ratio)
    counts, edges = np.histogram(ratio[ratio < 1], bins=np.linspace(0, 1, 21))
    how = outline(color, filled=color == BLUE)
    axes.stairs(np.maximum(counts / len(ratio), floor), edges, baseline=floor, label=label, **how)
    axes.stairs([max((ratio >= 1).mean(), floor)], [1.02, 1.10], baseline=floor, **how)


def _ratio_name(view: FormatView) -> str:
    config = view.study["configuration"]
    if config["verify"] == "strict":
        return "p of the drafted token (strict verification)"
    if config["draft_sampling"] == "greedy":
        return "p of the drafted token (greedy draft)"
    return "ratio min(1, p/q) of the drafted token"


def _alpha_changes(axes: "Axes", view: FormatView, positions: Columns) -> None:
    """Histogram of the change of alpha at the same position; the null arm shows what arithmetic alone does."""
    edges = np.geomspace(UNCHANGED, 1, 13)
    edges = np.concatenate([-edges[::-1], edges])
    paired = [] if view.is_baseline or view.own_text_only else [(view.arm, view.label, ORANGE)]
    base = view.rows(positions, BASE)
    alpha = positions[view.alpha_column]
    for arm, label, color in [(NULL, "null arm", GREY), *paired]:
        change = np.clip(alpha[view.rows(positions, arm)].astype(float) - alpha[base], -1, 1)
        shares, floor = np.histogram(change, edges)[0] / len(change), 0.5 / len(change)
        name = f"{label}: {100 * shares[len(shares) // 2]:.1f} % unchanged"
        how = outline(color, filled=color == GREY)
        axes.stairs(np.maximum(shares, floor), edges, baseline=floor, label=name, **how)
    axes.set_xscale("symlog", linthresh=UNCHANGED, linscale=0.4)
    axes.set_xticks([-1, -1e-2, 0, 1e-2, 1], ["−1", "−0.01", "0", "0.01", "1"])
    axes.set_xticks([-1e-1, -1e-3, 1e-3, 1e-1], minor=True)
    percent_axis(axes)
    axes.set_xlabel(f"change of alpha at a position, same text\n(log scale; unchanged: within {UNCHANGED:g})")
    axes.set_ylabel("share of positions per bin")
    legend_outside(axes, title="no change by position: the texts differ" if view.own_text_only else None)


def draw_context(figure: "Figure", view: FormatView, positions: Columns) -> str:
    """Alpha by context length for both arms and, below, its difference with prompt-clustered intervals."""
    figure.set_figheight(5.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    other, label, style = (NULL, "null arm", NULL_ARM) if view.is_baseline else (view.arm, view.label, FORMAT)
    base, mine = (view.rows(positions, arm) for arm in (BASE, other))
    edges = context_edges(positions["context_len"][base])
    before, after = (sums_by_prompt(positions, rows, edges, view.alpha_column) for rows in (base, mine))
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    bars = {"capsize": 1.5, "elinewidth": 1.2}
    for sums, name, look, side in ((before, "BF16", BASELINE, -0.06), (after, label, style, 0.06)):
        mean, half = clustered(sums)
        top.errorbar(middle + side * width, mean, half, ls="-", lw=0.8, label=name, **bars, **look)
    difference, half = clustered(after, before)
    below.errorbar(middle, difference, half, ls="none", **bars, **style)
    below.axhline(0, color=BLACK, lw=0.9)
    below.set_xlim(edges[0], edges[-1])
    top.set_ylabel("alpha: probability of acceptance\n(conditional on the prefix)")
    below.set_ylabel("change of alpha\nagainst BF16")
    below.set_xlabel("context length (tokens before the position)")
    legend_outside(top, 2, title="95 % intervals, clustered by prompt")
    if not np.isfinite(half).any():
        return f"Acceptance probability by context length, {label} against BF16 (one prompt: no intervals)"
    clear = int((np.abs(difference) > half).sum())
    return f"Acceptance probability by context length: {label} is apart from BF16 in {clear} of {len(half)} bins"


def context_edges(lengths: np.ndarray) -> np.ndarray:
    """Edges of bins that hold about equally many positions."""
    bins = int(np.clip(len(lengths) // SMALLEST_BIN, 1, CONTEXT_BINS))
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, bins + 1)))
    return np.append(edges[:-1], edges[-1] + 1.0) if len(edges) > 1 else edges[0] + np.array([0.0, 1.0])


def sums_by_prompt(positions: Columns, rows: np.ndarray, edges: np.ndarray, column: str) -> Sums:
    """(sum of alpha, number of positions), each [prompts, bins]; contexts beyond the edges join the outer bins."""
    names, prompt = _codes(positions["prompt"])
    shape = (len(names), len(edges) - 1)
    inside = np.clip(np.searchsorted(edges, positions["context_len"][rows], side="right") - 1, 0, shape[1] - 1)
    cell, values = prompt[rows] * shape[1] + inside, positions[column][rows].astype(float)
    return tuple(np.bincount(cell, w, minlength=shape[0] * shape[1]).reshape(shape) for w in (values, None))


def _codes(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct labels, the number of each row's label); rows of one label stand together, so only runs are sorted."""
    starts = np.flatnonzero(np.concatenate([[True], labels[1:] != labels[:-1]]))
    names, codes = np.unique(labels[starts].astype(str), return_inverse=True)
    return names, np.repeat(codes, np.diff(np.append(starts, len(labels))))


def clustered(sums: Sums, minus: Sums | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean per bin, or a difference of means paired by prompt, and the half width of its 95 % interval.

    Delta method over prompts with residuals (S_i - m n_i) / sum n and Student's quantile; NaN where a bin has one prompt.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, residuals = _ratio_terms(sums)
        prompts = (sums[1] > 0).sum(0).astype(float)
        if minus is not None:
            mean_minus, residuals_minus = _ratio_terms(minus)
            mean, residuals = mean - mean_minus, residuals - residuals_minus
        error = np.sqrt((residuals**2).sum(0) * prompts / (prompts - 1))
        return mean, student.ppf(0.975, prompts - 1) * error


def _ratio_terms(sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    total, count = sums
    mean = total.sum(0) / count.sum(0)
    return mean, (total - mean * count) / count.sum(0)
