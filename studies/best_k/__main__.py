"""Write the table of the best K between its markers in README.md.

python -m studies.best_k                  # make tables
python -m studies.best_k --check          # exit code 2 if README.md holds another table
"""

import argparse
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specq.errors import SpecqError, printable
from studies.common.curves import System, alpha_of, best_k
from studies.common.results import Table, markdown, wrapped
from studies.common.runs import read_config

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
RESULTS = "studies/results/llama70b-1b"
BEGIN, END = "<!-- best K: written by `make tables` -->", "<!-- end of best K -->"


def best_k_table(config: Mapping[str, Any], system: System) -> Table:
    """A row per mu, a column per batch: best K in BF16 and each format, tokens per second over BF16, each at its fastest."""
    rows = [[f"{mu:.1f}", *(_cell(config, system, mu, batch) for batch in config["batches"])] for mu in config["mu"]]
    columns = ["mu at K = " + str(config["k"]), *(f"batch {b}" for b in config["batches"])]
    return Table("", columns, [""] * len(columns), rows)


def _cell(config: Mapping[str, Any], system: System, mu: float, batch: int) -> str:
    """`K in BF16 -> K in each format (tokens per second of each over BF16)`, acceptance unchanged."""
    k, speed = _choice(config, system, mu, batch, "bf16")
    found = [_choice(config, system, mu, batch, f) for f in config["formats"]]
    gains = ", ".join(f"{100 * (s / speed - 1):+.0f} %" for _, s in found)
    return f"{k} -> {', '.join(str(n) for n, _ in found)} ({gains})"


def _choice(config: Mapping[str, Any], system: System, mu: float, batch: int, fmt: str) -> tuple[int, float]:
    """(best K, tokens per second of a sequence at the fastest, which may be 1 % more)."""
    context, k_max = config["context"], config["k_max"]
    curve = system.speedup(alpha_of(mu, config["k"]), batch, context, fmt, k_max)
    return best_k(curve), curve.max() / system.times(batch, context, fmt, k_max)[0]


def losses(config: Mapping[str, Any], system: System) -> tuple[int, float]:
    """(largest change of the best K, largest share of speed lost) over the table, were `lost` accepted tokens lost too."""
    steps, shares = [], []
    for mu, batch, fmt in itertools.product(config["mu"], config["batches"], config["formats"]):
        k, speed = _choice(config, system, mu, batch, fmt)
        worse_k, worse = _choice(config, system, mu - config["lost"], batch, fmt)
        steps.append(abs(worse_k - k))
        shares.append(1 - worse / speed)
    return max(steps), max(shares)


def section(config: Mapping[str, Any]) -> str:
    """The table with its assumptions, as the README holds it between the markers."""
    system = System.of(config["system"], HERE)
    fit = {f: system.sequences(config["context"], f) for f in ("bf16", *config["formats"])}
    steps, share = losses(config, system)
    what = (
        "Best K with a BF16 cache -> with FP8, with INT8 per token and head (tokens per second of each over BF16, each at its"
        f" fastest K). {system.pair} on {config['system']['gpus']}, context {config['context']:,}, from measured step times:"
    )
    assumptions = (
        f"Assumptions: mu is what K = {config['k']} accepts, in every format alike; every depth accepts alike (S_k = alpha^k);",
        f"the draft's cache stays BF16; K is the smallest within 1 % of the best, up to {config['k_max']}, the largest that",
        f"was timed: where {config['k_max']} stands, more may be better; between the numbers of new tokens that were timed",
        f"times are interpolated, and differences below {100 * system.drift:.1f} % are within what points that were not timed",
        "together, as two formats' are not, are off by.",
        f"A format that also cost {config['lost']:g} accepted tokens would move K by at most {steps} and take up to",
        f"{100 * share:.1f} % of the speed. Step times are specq's own kernels', without an engine's scheduler",
        f"([measured]({RESULTS}/README.md)): {system.steps_told}.",
        "At that context this server holds",
        ", ".join(f"{n} sequences in {f}" for f, n in fit.items()) + ".",
        "Other pairs, GPUs and contexts: `specq tune`, or `studies/best_k/config.toml` and `make tables`.",
    )
    first, last = (wrapped(t) for t in (what, " ".join(assumptions)))
    return "\n".join([BEGIN, first, "", markdown(best_k_table(config, system).as_dict()), last, END])


def replaced(readme: str, new: str) -> str:
    """The README with the section between its markers replaced. Raises SpecqError where it has no such markers."""
    before, found, rest = readme.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise SpecqError(f"README.md lacks the markers {BEGIN} and {END}")
    return before + new + after


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 2 if the table is another")
    args = parser.parse_args()
    try:
        old = README.read_text()
        new = replaced(old, section(read_config(HERE / "config.toml")))
        if args.check and new != old:
            raise SpecqError("README.md holds another table than `make tables` writes")
    except SpecqError as error:
        print(f"studies.best_k: {printable(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    if not args.check and new != old:
        README.write_text(new)


if __name__ == "__main__":
    main()
