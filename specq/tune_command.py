"""What `specq tune` does: decide a finished study again under another cost, batch, context or objective, in a second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from specq import files
from specq.command import answer_table
from specq.conclude import Conclusion, conclude, decision_block
from specq.cost import CostModel, FreeDraft
from specq.cost.roofline import Roofline
from specq.cost_command import show
from specq.decision import Decision, StudyFacts
from specq.errors import SpecqError
from specq.finished import Finished, load, reconfigured
from specq.kv import get_format
from specq.mixtures import GroupChoice, lonely_groups
from specq.sensitivity import sensitivity
from specq.terminal import Terminal
from specq.tune import pays, quantile_interval, tokens_ratio


def tune_command(folder: Path, changes: Mapping[str, Any], mix: str | None, out: Path | None) -> None:
    """Print the decisions; with `out`, write each format's recommendation.json and plots there as well."""
    finished = load(folder)
    config = reconfigured(finished.config, changes)
    shares = parse_mix(mix) if mix else None
    facts = finished.facts(config)
    if shares:
        for name in lonely_groups(finished.material.main, shares):
            facts.warnings[None].append(f"group {name} has one document: its spread is unknown and counts as none")
        shown = ", ".join(f"{100 * s / sum(shares.values()):.0f} % {n}" for n, s in shares.items())
        facts.warnings[None].append(
            f"decided for traffic whose tokens are {shown}, each group from its own measured curve"
        )
    cost = finished.cost(config)
    formats = [get_format(n) for n in config.dtypes]
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise SpecqError(f"{out} exists and is not empty; choose another --out")
    found = conclude(facts, formats, finished.material, cost, shares)
    if out is not None:
        with files.whole_directory(out) as partial:
            write(partial, finished, facts, cost, found)
    console = Terminal()
    steps = cost.cost if isinstance(cost, FreeDraft) else cost
    if isinstance(steps, Roofline) and steps.calibration:
        show(console, steps.calibration)
    for name, conclusion in found.items():
        console.rule(escape(f"{facts.pair}: {name} against BF16"), align="left")
        console.print(answer_table(conclusion.recommendation))
        console.print(operating_table(conclusion.decision, cost))
        if conclusion.groups:
            console.print(group_table(conclusion.groups))
    if out is not None:
        console.print(f"written: {out}", soft_wrap=True, markup=False)


def parse_mix(text: str) -> dict[str, float]:
    """Shares of tokens per prompt group from "code=0.7,chat=0.3". Raises SpecqError where it is none."""
    shares = {}
    for part in text.split(","):
        name, equals, share = part.rpartition("=")
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise SpecqError(f"--mix takes shares like code=0.7,chat=0.3, not {text!r}")
    return shares


def operating_table(made: Decision, cost: CostModel) -> Table:
    """One row per batch and context: each format's K, and the format over BF16, split into its two parts."""
    against = made.format.name != "bf16"
    title = f"every operating point, by step times of {cost.source}; * decided for; speedup over plain decoding"
    if against:
        title += f"; format over BF16: emitted and time per cycle at K = {made.reference_k}, tokens/s at its best K"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    split = ["K", "speedup", "emitted", "time", "tokens/s, %", "pays"]
    for heading in ["batch", "context", "K bf16", *(split if against else ["speedup"])]:
        table.add_column(heading, justify="right", no_wrap=True)
    for point, mine in made.curves.items():
        base, parts = made.base_curves[point], made.break_even[point]
        best, base_best = mine.best, base.best
        row = [f"{point[0]}{'*' if point == made.at else ' '}", f"{point[1]:,}", f"{base_best}"]
        if against:
            over, draws = tokens_ratio(mine, base, best, base_best)
            bounds = quantile_interval(draws)
            low, high = (100 * (x - 1) for x in bounds)
            row += [
                f"{best}",
                f"{mine.point[best]:.2f}x",
                f"{parts.emitted_ratio:.3f}",
                f"{parts.cycle_time_ratio:.3f}",
            ]
            row += [f"{100 * (over - 1):+.1f} [{low:+.1f}, {high:+.1f}]", pays(over, bounds)]
        else:
            row.append(f"{base.point[base_best]:.2f}x")
        table.add_row(*row)
    return table


def group_table(groups: list[GroupChoice]) -> Table:
    """Every prompt group's own acceptance and K, and what the common K costs it."""
    table = Table(
        title="prompt groups, each from its own measured curve", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("group")
    k = groups[0].k
    for heading in ("documents", f"mu bf16, K={k}", f"mu, K={k}", "own best K", "lost by the common K"):
        table.add_column(heading, justify="right")
    for g in groups:
        low, high = g.loss_ci95
        lost = f"{round(100 * g.loss, 1) + 0.0:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
        table.add_row(escape(g.name), str(g.documents), f"{g.mu_bf16:.3f}", f"{g.mu:.3f}", str(g.best), lost)
    return table


def write(out: Path, finished: Finished, facts: StudyFacts, cost: CostModel, found: Mapping[str, Conclusion]) -> None:
    """Each format's recommendation.json, decision.json and the plots of the decision into `out`/<format>/."""
    from specq.report.decision_plots import write_decision_plots

    for name, conclusion in found.items():
        sub = out / finished.study["directories"][name]
        sub.mkdir(parents=True, exist_ok=True)
        made = conclusion.decision
        made.sensitivity = sensitivity(facts, conclusion.basis, made.format, cost, made)
        files.write_json(sub / "recommendation.json", conclusion.recommendation.model_dump(mode="json"))
        block = decision_block(conclusion) | {
            "cost": cost.source,
            "configuration": facts.config.model_dump(mode="json"),
        }
        files.write_json(sub / "decision.json", block)
        write_decision_plots(sub / "plots", files.finite(block), conclusion.recommendation.model_dump(mode="json"))
