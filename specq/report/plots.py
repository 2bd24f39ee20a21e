"""The five plots of one KV format, drawn with matplotlib's object interface: no global state, no display.

Blue circles are the baseline, orange squares the format under test, grey the null arm, in every plot. Intervals are 95 %.
"""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import t as student

from specq.report.view import BASE, NULL, FormatView, interval, number, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns = Mapping[str, np.ndarray]

# Okabe and Ito's palette: told apart with any common colour vision, and in print by marker and dash as well.
BLUE, ORANGE, GREEN, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#8A8A8A", "#222222"
BASELINE = {"color": BLUE, "marker": "o", "markersize": 4.5}
FORMAT = {"color": ORANGE, "marker": "s", "markersize": 4.5}
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.labelsize": 9.5, "axes.titlesize": 10, "legend.fontsize": 8.5,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#777777", "figure.facecolor": "white", "legend.framealpha": 0.9,
    "text.parse_math": False, "axes.formatter.useoffset": False, "text.usetex": False, "legend.edgecolor": "#dddddd",
}  # fmt: skip
WIDTH, DPI, TITLE_CHARACTERS = 7.8, 160, 86
CONTEXT_BINS, SMALLEST_BIN = 8, 40  # positions that a bin of the context plot holds at least
UNCHANGED = 1e-4  # |change of alpha| below this counts as unchanged


def write_plots(folder: Path, study: dict, recommendation: dict, positions: Columns) -> dict[str, Path]:
    """Draw the five plots into `folder`; returns their paths by name."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    view = FormatView(study, recommendation)
    drawn: dict[str, Callable[[Figure], str]] = {
        "acceptance_curve": lambda f: draw_acceptance(f, view),
        "mu_shift": lambda f: draw_shift(f, view),
        "speedup_vs_k": lambda f: draw_speedup(f, view),
        "ratio_histogram": lambda f: draw_ratios(f, view, positions),
        "context": lambda f: draw_context(f, view, positions),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.png" for name in drawn}
    for name, draw in drawn.items():
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
            FigureCanvasAgg(figure)
            title = "\n".join(textwrap.wrap(draw(figure), TITLE_CHARACTERS))
            figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, fontweight="bold")
            figure.savefig(paths[name], dpi=DPI)
    return paths


def _k_axis(axes: "Axes", first: float, last: int, label: str = "K = num_speculative_tokens") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(first - 0.6, last + 0.6)
    axes.set_xlabel(label)


def _legend_below(axes: "Axes", columns: int = 1) -> None:
    """The axes' legend under its (sub)figure, where it hides no data."""
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def _mark_k(axes: "Axes", view: FormatView) -> None:
    """Vertical lines at the current and the recommended K, named in the legend."""
    if view.current == view.recommended:
        axes.axvline(view.current, color=BLACK, lw=1.0, ls=":", label=f"now and recommended: K = {view.current}")
        return
    axes.axvline(view.current, color=BLACK, lw=1.0, ls=":", label=f"now: K = {view.current}")
    axes.axvline(view.recommended, color=GREEN, lw=1.4, ls="--", label=f"recommended: K = {view.recommended}")


def _with_intervals(axes: "Axes", entries: dict[int, dict], shift: float, style: dict, label: str, line: str) -> None:
    """Values against K with error bars, moved sideways by `shift` so that two arms do not hide one another."""
    k, value, low, high = series(entries)
    bars = np.array([np.maximum(value - low, 0), np.maximum(high - value, 0)])
    axes.errorbar(k + shift, value, yerr=bars, ls=line, lw=1.0, elinewidth=1.2, capsize=1.5, label=label, **style)


def _arms(view: FormatView) -> list[tuple[str, str, dict, float]]:
    """(arm, label, style, sideways shift) of the baseline and, unless it is the same, of the format."""
    both = [(BASE, "BF16", BASELINE, -0.13), (view.arm, view.name, FORMAT, 0.13)]
    return both[:1] if view.is_baseline else both


def draw_acceptance(figure: "Figure", view: FormatView) -> str:
    """Mean accepted per cycle by K, and marginal and conditional survival at one K."""
    figure.set_figheight(4.4)
    left, right = (part.subplots() for part in figure.subfigures(1, 2, width_ratios=[3, 2]))
    k = view.shown_k
    for arm, label, style, shift in _arms(view):
        _with_intervals(left, view.mu(arm), shift, style, f"{label}, 95 % interval", "none")
        marginal, conditional = view.survival(arm)
        steps = np.arange(1, k + 1) + shift * 0.6
        right.plot(steps, marginal, ls="-", lw=1.1, label=f"{label} marginal S_k", **style)
        hollow = style | {"markerfacecolor": "white"}
        right.plot(steps, conditional, ls="--", lw=1.1, label=f"{label} conditional S_k/S_(k-1)", **hollow)
    _mark_k(left, view)
    _k_axis(left, min(1, view.current, view.recommended), view.k_max)
    left.set_ylabel("mu: mean accepted tokens per cycle")
    _legend_below(left)
    _k_axis(right, 1, k, f"k: draft position in a cycle with K = {k}")
    right.set_ylim(0, 1.02)
    right.set_ylabel("probability of acceptance")
    _legend_below(right)
    return _acceptance_title(view, k)


def _acceptance_title(view: FormatView, k: int) -> str:
    base, mine = (view.mu(arm)[k]["value"] for arm in (BASE, view.arm))
    text = f"Accepted tokens per cycle at K = {k}: {number(base, 3, False)} with a BF16 cache"
    if not view.is_baseline:
        text += f", {number(mine, 3, False)} with {view.name}"
    return text


def draw_shift(figure: "Figure", view: FormatView) -> str:
    """Shift of mu against the baseline by K, the null arm's band, and the shift on own text in a panel of its own."""
    own = None if view.own_text_only or view.is_baseline else view.recommendation["mu_shift_own"]
    if own and own["k"]:
        axes, side = figure.subplots(1, 2, width_ratios=[6, 1])
        _own_shift(side, own)
    else:
        axes = figure.subplots()
    k, value, low, high = series(view.null_shifts())
    axes.fill_between(k, low, high, color=GREY, alpha=0.35, lw=0, label="null arm, 95 % band")
    axes.plot(k, value, color=GREY, lw=1.6)
    axes.axhline(0, color=BLACK, lw=0.9)
    text = "own text" if view.own_text_only else "same text"
    if not view.is_baseline:
        draft_too = {"color": PURPLE, "marker": "^", "markersize": 4.5}
        _with_intervals(axes, view.shifts(view.arm), -0.13, FORMAT, f"{view.arm} ({text})", "none")
        _with_intervals(axes, view.shifts(view.inherited_arm), 0.13, draft_too, f"{view.inherited_arm} ({text})", "none")
    _mark_k(axes, view)
    _k_axis(axes, min(1, view.current, view.recommended), view.k_max)
    axes.set_ylabel(f"mu({view.name}) − mu(BF16)\naccepted tokens per cycle")
    _legend_below(axes, 3)
    return _shift_title(view)


def _own_shift(axes: "Axes", own: dict) -> None:
    style = {"color": ORANGE, "marker": "D", "markersize": 5.5}
    _with_intervals(axes, {own["k"]: own}, 0.0, style, "own text", "none")
    axes.axhline(0, color=BLACK, lw=0.9)
    axes.set_xlim(own["k"] - 0.5, own["k"] + 0.5)
    axes.set_xticks([own["k"]])
    axes.set_title("own text,\nscale of its own", fontsize=8.5)
    axes.set_xlabel("K")


def _shift_title(view: FormatView) -> str:
    if view.is_baseline:
        return "BF16 is the baseline: all that can differ is the order of arithmetic (null arm)"
    k = view.shown_k
    at = view.shifts(view.arm).get(k)
    if at is None or at["value"] is None:
        return f"Shift of accepted tokens per cycle, {view.name} against BF16"
    said = f"{number(at['value'])} {interval(at['ci95'])} at K = {k}"
    if at["ci95"][0] is None:
        return f"{view.name} shifts accepted tokens per cycle by {number(at['value'])} at K = {k}; no interval"
    if at["significant"]:
        return f"{view.name} changes accepted tokens per cycle beyond the noise floor: {said}"
    return f"{view.name}: no change of accepted tokens per cycle is resolved: {said}"


def draw_speedup(figure: "Figure", view: FormatView) -> str:
    """Speedup over plain decoding by K at the decided operating point, and for every other batch and context."""
    first, curves = view.curves[0], view.curves
    contexts = list(dict.fromkeys(c["context"] for c in curves))[:3]
    if len(curves) > 1:
        figure.set_figheight(6.4)
        top, bottom = figure.subfigures(2, 1, height_ratios=[3.3, 2.7])
        _speedup_small(bottom, view, contexts)
    else:
        top = figure
    axes = top.subplots()
    k = np.arange(len(first["speedup"]))
    for name, key, style in (("BF16", "speedup_bf16", BASELINE), (view.name, "speedup", FORMAT)):
        if view.is_baseline and key == "speedup":
            continue
        low, high = np.array(first[f"{key}_ci95"], dtype=float).T
        axes.fill_between(k, low, high, color=style["color"], alpha=0.18, lw=0)
        axes.plot(k, first[key], lw=1.4, label=f"{name}, 95 % band", **style)
    axes.axhline(1, color=BLACK, lw=0.9)
    _mark_k(axes, view)
    _k_axis(axes, 0, view.k_max)
    axes.set_ylabel("speedup over plain decoding\nat the same KV format (x)")
    axes.set_title(f"batch {first['batch']}, context {first['context']} tokens", loc="left", fontsize=9.5)
    axes.legend(loc="best")
    now, best = first["speedup"][view.current], first["speedup"][view.recommended]
    change = f"K = {view.recommended} gives {best:.2f}x"
    if view.current != view.recommended:
        change += f", K = {view.current} now {now:.2f}x"
    return f"{view.name}: {change} over plain decoding (cost: {view.study['cost']['source']})"


def _speedup_small(figure: "Figure", view: FormatView, contexts: list[int]) -> None:
    """One panel per context, one line per batch, a dot at each batch's recommended K."""
    from matplotlib import colormaps

    batches = sorted({c["batch"] for c in view.curves})
    shades = colormaps["viridis"](np.linspace(0.05, 0.85, len(batches)))
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(panels, contexts, strict=True):
        for curve in (c for c in view.curves if c["context"] == context):
            k, at = np.arange(len(curve["speedup"])), curve["recommended"]
            shade = shades[batches.index(curve["batch"])]
            axes.plot(k, curve["speedup"], color=shade, lw=1.1, label=f"batch {curve['batch']}")
            axes.plot(at, curve["speedup"][at], color=shade, marker="o", markersize=5, ls="none")
        axes.axhline(1, color=BLACK, lw=0.8)
        axes.set_title(f"{view.name}, context {context}", loc="left", fontsize=9)
        _k_axis(axes, 0, view.k_max, "K (dot: recommended)")
    panels[0].set_ylabel("speedup (x)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")


def draw_ratios(figure: "Figure", view: FormatView, positions: Columns) -> str:
    """Ratios of drafted tokens, and the change of alpha per position against the baseline."""
    figure.set_figheight(4.2)
    left, right = (part.subplots() for part in figure.subfigures(1, 2))
    certain = {}
    for arm, label, style, _ in _arms(view):
        ratio = np.asarray(positions["ratio"][view.rows(positions, arm)], dtype=float)
        certain[label] = float((ratio >= 1).mean())
        _ratio_outline(left, ratio, style, f"{label}: {100 * certain[label]:.1f} % are exactly 1")
    left.set_yscale("log")
    left.set_xlabel(_ratio_name(view))
    left.set_ylabel("share of drafted tokens per bin")
    left.set_xticks([0, 0.25, 0.5, 0.75, 1.06], ["0", "0.25", "0.5", "0.75", "1"])
    left.set_xlim(-0.03, 1.12)
    _legend_below(left)
    _alpha_changes(right, view, positions)
    shares = " and ".join(f"{100 * share:.1f} % with {label}" for label, share in certain.items())
    return f"Drafted tokens that are accepted for certain (ratio 1): {shares}"


def _ratio_outline(axes: "Axes", ratio: np.ndarray, style: dict, label: str) -> None:
    """Bins of 0.05 below 1, and what is exactly 1 in a bin of its own beyond the axis' end."""
    inside, edges = np.histogram(ratio[ratio < 1], bins=np.linspace(0, 1, 21))
    filled = style["color"] == BLUE
    how = {"color": style["color"], "fill": filled, "alpha": 0.35 if filled else 1.0, "lw": 0 if filled else 1.5}
    floor = 0.5 / len(ratio)
    axes.stairs(np.maximum(inside / len(ratio), floor), edges, baseline=floor, label=label, **how)
    axes.stairs([max((ratio >= 1).mean(), floor)], [1.02, 1.10], baseline=floor, **how)


def _ratio_name(view: FormatView) -> str:
    config = view.study["configuration"]
    if config["verify"] == "strict":
        return "probability that the drafted token is the target's own sample"
    if config["draft_sampling"] == "greedy":
        return "p of the drafted token (greedy draft: q counts as 1)"
    return "ratio min(1, p/q) of the drafted token"


def _alpha_changes(axes: "Axes", view: FormatView, positions: Columns) -> None:
    edges = np.geomspace(UNCHANGED, 1, 13)
    edges = np.concatenate([-edges[::-1], edges])
    arms = [(NULL, "null arm", GREY)]
    if not (view.is_baseline or view.own_text_only):
        arms.append((view.arm, view.name, ORANGE))
    base = view.rows(positions, BASE)
    for arm, label, color in arms:
        rows = view.rows(positions, arm)
        change = positions[view.alpha_column][rows].astype(float) - positions[view.alpha_column][base].astype(float)
        counts = np.histogram(change, edges)[0] / len(change)
        same = 100 * counts[len(counts) // 2]
        floor = 0.5 / len(change)
        how = {"fill": color == GREY, "alpha": 0.5 if color == GREY else 1.0, "lw": 0 if color == GREY else 1.5}
        name = f"{label}: {same:.1f} % unchanged (within {UNCHANGED:g})"
        axes.stairs(np.maximum(counts, floor), edges, baseline=floor, color=color, label=name, **how)
    axes.set_xscale("symlog", linthresh=UNCHANGED, linscale=0.4)
    axes.set_xticks([-1, -1e-2, -UNCHANGED, UNCHANGED, 1e-2, 1], ["−1", "−0.01", "−1e-4", "1e-4", "0.01", "1"])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel("change of alpha at a position, against BF16\non the same text (log scale either side of 0)")
    axes.set_ylabel("share of positions per bin")
    _legend_below(axes)


def draw_context(figure: "Figure", view: FormatView, positions: Columns) -> str:
    """Alpha by context length for both arms and, below, its difference with prompt-clustered intervals."""
    figure.set_figheight(5.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    base, other = (view.rows(positions, a) for a in (BASE, NULL if view.is_baseline else view.arm))
    lengths = positions["context_len"]
    bins = int(np.clip(len(base) // SMALLEST_BIN, 1, CONTEXT_BINS))
    edges = np.unique(np.quantile(lengths[base], np.linspace(0, 1, bins + 1)))
    edges = np.append(edges[:-1], edges[-1] + 1) if len(edges) > 1 else np.array([edges[0], edges[0] + 1])
    sums = [_sums(positions, rows, edges, view.alpha_column) for rows in (base, other)]
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    names = ("BF16", "null arm" if view.is_baseline else view.name)
    for part, label, style, side in zip(sums, names, (BASELINE, FORMAT), (-0.06, 0.06), strict=True):
        mean, half = _clustered([part])
        top.errorbar(middle + side * width, mean, half, ls="-", lw=0.8, capsize=1.5, elinewidth=1.2, label=label, **style)
    difference, half = _clustered([sums[1], sums[0]])
    below.errorbar(middle, difference, half, ls="none", capsize=2, elinewidth=1.3, **FORMAT)
    below.axhline(0, color=BLACK, lw=0.9)
    top.set_ylabel("alpha: conditional\nacceptance probability")
    below.set_ylabel(f"alpha({names[1]})\n− alpha(BF16)")
    below.set_xlabel("context length (tokens before the position)")
    top.legend(loc="best", ncols=2)
    clear = int((np.abs(difference) > half).sum())
    if not np.isfinite(half).any():
        return f"Acceptance probability by context: {names[1]} against BF16 (one prompt: no intervals)"
    return f"Acceptance probability by context: {names[1]} differs from BF16 in {clear} of {len(half)} bins (95 % each)"


def _sums(positions: Columns, rows: np.ndarray, edges: np.ndarray, column: str) -> tuple[np.ndarray, np.ndarray]:
    """(sum of alpha, number of positions) by prompt and bin, [prompts, bins]; prompts in sorted order."""
    names, code = np.unique(positions["prompt"].astype(str), return_inverse=True)
    shape = (len(names), len(edges) - 1)
    inside = np.clip(np.searchsorted(edges, positions["context_len"][rows], side="right") - 1, 0, shape[1] - 1)
    cell = code[rows] * shape[1] + inside
    weights = positions[column][rows].astype(float)
    return tuple(np.bincount(cell, w, minlength=shape[0] * shape[1]).reshape(shape) for w in (weights, None))


def _clustered(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean per bin, or the difference of two means paired by prompt, with the half width of its 95 % interval.

    Delta method over prompts: residual (S_i - m n_i) / sum n, Student's quantile; NaN where a bin has one prompt.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        means = [s.sum(0) / n.sum(0) for s, n in parts]
        residuals = [(s - m * n) / n.sum(0) for (s, n), m in zip(parts, means, strict=True)]
        prompts = (sum(n for _, n in parts) > 0).sum(0).astype(float)
        sign = (1.0, -1.0)[: len(parts)]
        spread = (sum(a * r for a, r in zip(sign, residuals, strict=True)) ** 2).sum(0) * prompts / (prompts - 1)
        half = student.ppf(0.975, prompts - 1) * np.sqrt(spread)
    return sum(a * m for a, m in zip(sign, means, strict=True)), half
