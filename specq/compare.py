"""What `specq compare A B` does: two finished studies side by side, and the difference of what they found.

Where both scored the same documents the difference is paired document by document; otherwise the studies count as
independent and the standard errors add in squares.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table
from scipy.special import stdtrit

from specq import files, stats
from specq.analysis import BASE, Analysis
from specq.config import DRAWS
from specq.errors import SpecqError
from specq.finished import Finished, load
from specq.report.schema import Recommendation
from specq.terminal import Terminal


def same_documents(a: Finished, b: Finished) -> bool:
    """Whether both studies scored the same documents of the same prompt file: names alone may be line numbers."""
    one, two = (list(dict.fromkeys(t.prompt.document for t in x.material.main.texts)) for x in (a, b))
    return one == two and a.config.prompts_sha256 == b.config.prompts_sha256


def mu_difference(a: Analysis, b: Analysis, arms: list[tuple[float, str]], k: int, *, paired: bool) -> stats.Estimate:
    """B minus A of sum_i coefficient_i mu_i(k) over `arms` that both have, e.g. one arm's mu or a shift.

    `paired` is for the same documents in the same order; otherwise the two count as independent.
    """
    if paired:
        parts = [(sign * c, x.arms[arm].sums) for x, sign in ((b, 1), (a, -1)) for c, arm in arms]
        tokens = np.stack([sums.tokens for _, sums in parts])
        return stats.Resampler(a.documents.count, DRAWS, a.resampler.seed, tokens=tokens).combination(parts, k)
    one, two = (x.resampler.combination([(c, x.arms[arm].sums) for c, arm in arms], k) for x in (a, b))
    value, se = two.value - one.value, float(np.hypot(one.se, two.se))
    least = min(x.resampler.documents for x in (a, b))
    width = float(stdtrit(least - 1, (1 + stats.LEVEL) / 2)) * se if se else 0.0
    return stats.Estimate(value, se, value - width, value + width)


def compare_command(first: Path, second: Path) -> None:
    """Print what differs in the two studies' settings, and both answers with the difference, format by format."""
    a, b = load(first), load(second)
    console = Terminal()
    console.print(f"A: {first}\nB: {second}", soft_wrap=True, markup=False)
    console.print(settings_table(a, b))
    common = [d for d in a.config.dtypes if d in b.config.dtypes]
    if not common:
        raise SpecqError(f"the studies share no format: {', '.join(a.config.dtypes)} and {', '.join(b.config.dtypes)}")
    k = min(a.config.current_k or a.config.k_max, b.config.k_max)
    console.print(mu_table(a, b, common, k))
    for name in common:
        console.rule(escape(name), align="left")
        console.print(decision_table(*(_recommendation(x, name) for x in (a, b))))


def _recommendation(x: Finished, name: str) -> Recommendation:
    path = x.folder / x.study["directories"][name] / "recommendation.json"
    try:
        return Recommendation.model_validate(files.read_json(path))
    except ValueError as error:
        raise SpecqError(f"{path} was written by another version of specq: run the study again") from error


def settings_table(a: Finished, b: Finished) -> Table:
    """Settings in which the studies differ."""
    table = Table(title="settings that differ", title_justify="left", box=None, pad_edge=False)
    for heading in ("setting", "A", "B"):
        table.add_column(heading, overflow="fold")
    one, two = (_settings(x) for x in (a, b))
    differing = [(n, one.get(n), two.get(n)) for n in one | two if one.get(n) != two.get(n)]
    for name, *values in differing:
        table.add_row(name.replace("_", " "), *(escape(str(v)) for v in values))
    if not differing:
        table.add_row("none", "", "")
    return table


def _settings(x: Finished) -> dict:
    environment = {n: x.study["environment"].get(n) for n in ("specq", "torch", "transformers", "device")}
    named = {"pair": x.study["pair"]["name"], **{s: x.study["pair"][s]["source"] for s in ("target", "draft")}}
    return named | x.config.model_dump(mode="json", exclude=set(named)) | environment


def mu_table(a: Finished, b: Finished, formats: list[str], k: int) -> Table:
    """mu and its shift in both studies at K = k, and their difference."""
    one, two = a.material.main, b.material.main
    rows = [("mu bf16", [(1.0, BASE)])]
    for name in formats:
        arm = f"{name}+bf16"
        if name != "bf16" and arm in one.arms and arm in two.arms:
            rows += [(f"mu {name}", [(1.0, arm)]), (f"shift {name}", [(1.0, arm), (-1.0, BASE)])]
    paired = same_documents(a, b)
    how = "paired: the same documents" if paired else "other documents: as independent studies"
    table = Table(title=f"accepted per cycle at K = {k}; {how}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "A", "B", "B - A", "95 % interval", "resolved"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, arms in rows:
        difference = mu_difference(one, two, arms, k, paired=paired)
        values = [x.resampler.combination([(c, x.arms[arm].sums) for c, arm in arms], k).value for x in (one, two)]
        offset = 0.0 if len(arms) > 1 else 1.0  # emitted is one more than accepted; a shift is the same
        interval = f"[{difference.lo:+.4f}, {difference.hi:+.4f}]"
        resolved = "yes" if difference.excludes_zero else "no"
        table.add_row(name, *(f"{v - offset:.4f}" for v in values), f"{difference.value:+.4f}", interval, resolved)
    return table


def decision_table(a: Recommendation, b: Recommendation) -> Table:
    """Both recommendations."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "A", "B"):
        table.add_column(heading, overflow="fold")

    def row(name: str, show: Callable[[Recommendation], str]) -> None:
        table.add_row(escape(name), *(escape(show(r)) for r in (a, b)))

    row("num_speculative_tokens", lambda r: f"{r.recommended_num_speculative_tokens}")
    row("schedule [from, to, K]", lambda r: ", ".join(str(list(entry)) for entry in r.recommended_schedule))
    row("speedup at it", lambda r: f"{r.speedup.dtype_at_recommended:.3f}x")
    row("cost", lambda r: r.cost.source)
    row("decision", lambda r: r.decision)
    return table
