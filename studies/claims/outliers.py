"""The claim about outlier channels of keys: what they cost under each scale, and at which strengths a finer scale rescues."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from specq.analysis import BASE
from specq.stats import Estimate
from studies.claims.settings import (
    BY_CHANNEL,
    E4M3,
    FACTOR,
    INT8_TENSOR,
    INT8_TOKEN,
    PLAIN,
    STRESSED,
    Studies,
    alone,
)
from studies.common.command import read_results
from studies.common.measured import Measured, change_of_mean, change_of_shift
from studies.common.results import Claim, Table, verdict
from studies.common.stress import CHANNELS, HEAD

CONTEXT = Path(__file__).parents[1] / "results" / "context"  # what the study that stresses keys by other factors kept
REMAINS = 0.1  # of the KL that outliers cause under one scale: what a rescue may leave, a limit chosen here
RESCUED, NOT_RESCUED, UNCLEAR = "rescued", "not rescued", "undecided"


def outliers_and_scales(m: Studies) -> Claim:
    """(e): what outlier channels cost under each scale, and what of it remains."""
    now, before = m[STRESSED], m[PLAIN]
    shown = Table(
        "Shift of mu at K = 5, KL from the BF16 target in nats, and how often the likeliest token is the same:",
        ["setting", "format", "shift of mu", "KL", "top-1 agreement"],
        ["", "", "+.4f", ".5f", ".1%"],
        [
            [s.about, f, s.shift(alone(f)), s.mean("kl", alone(f)), s.top1_agreement(alone(f))]
            for s in (before, now)
            for f in s.formats
        ],
    )
    kl = {f: change_of_mean(now, before, "kl", alone(f)) for f in now.formats}
    mu = {f: change_of_shift(now, before, alone(f)) for f in now.formats}
    table = Table(
        f"What the outliers alone add ({now.about} minus {before.about}, the same texts to the bit):",
        ["format", "change of the shift of mu", "added KL"],
        ["", "+.4f", "+.5f"],
        [[f, mu[f], kl[f]] for f in now.formats],
        _stress_told(now.study["pair"]["target"]["shape"], [f for f in now.formats if f in BY_CHANNEL]),
    )
    rows = [_left_here(now), *_left_in_context(read_results(CONTEXT, "context"))]
    left = Table(
        f"What a scale per token and head leaves of what one scale per tensor loses; rescued where at most {REMAINS:.0%} of the"
        " KL remains, a limit chosen here:",
        ["outliers", "INT8 step / largest value before", "setting", "KL left", "loss of mu left", ""],
        ["", ".1f", "", ".1%", ".1%", ""],
        [[f"x{r[0]}", *r[1:]] for r in sorted(rows, key=lambda r: r[0])],
        "An INT8 step that spans the outliers, over the largest value that those channels had before. Rows without an interval"
        " are of the [context study](../context/README.md), which keeps none of the ratio: judged by the value alone.",
    )
    breaks = {n: kl[n].lo > 0 and mu[n].hi < 0 for n in (INT8_TENSOR, E4M3)}
    why = (
        f"Three things are claimed. INT8 with one scale per tensor {_breaks(breaks[INT8_TENSOR])}: outliers cost it"
        f" {-mu[INT8_TENSOR].value:.3f} accepted tokens and {kl[INT8_TENSOR].value:.3f} nats. With a scale per token and head"
        f" it is {_rescue_told(left.rows)} (in brackets what remains of the KL). FP8 E4M3 with one scale, 1.0,"
        f" {_breaks(breaks[E4M3])}: outliers x{FACTOR} add {kl[E4M3].value:.4f} nats and move mu by {mu[E4M3].value:+.3f}"
        f" [{mu[E4M3].lo:+.3f}, {mu[E4M3].hi:+.3f}], since its exponent covers the range until codes saturate. An outlier"
        " channel is large in every token, so a scale per token and head is still spent on it in its own head; it only spares"
        " the heads without outliers."
    )
    claim = "Per-tensor scales break where keys have outlier channels, and per-token scales rescue them."
    rescues = [None if r[-1] == UNCLEAR else r[-1] == RESCUED for r in left.rows]
    outcome = [breaks[INT8_TENSOR], *rescues, breaks[E4M3]]
    return Claim("e", claim, verdict(outcome), why, [shown, table, left])


def _left_here(m: Measured) -> list:
    """A row of what a scale per token and head leaves, with an interval: rescued where all of it lies below REMAINS."""
    token, tensor = alone(INT8_TOKEN), alone(INT8_TENSOR)
    kl, mu = m.ratio("kl", token, tensor), m.shift(token).value / m.shift(tensor).value
    said = RESCUED if kl.hi <= REMAINS else NOT_RESCUED if kl.lo > REMAINS else UNCLEAR
    made, behind = m.study["prompts"]["kept"], m.study["configuration"]["prompt_tokens"]
    return [FACTOR, FACTOR / 127, f"{made} documents behind {behind:,} tokens", kl, mu, said]


def _left_in_context(kept: Mapping) -> list[list]:
    """The same rows from the context study's JSON, by the values alone."""
    found = []
    for series in kept["series"]:
        for point in (p for p in series["points"] if {INT8_TOKEN, INT8_TENSOR} <= p["formats"].keys()):
            token, tensor = (point["formats"][f] for f in (INT8_TOKEN, INT8_TENSOR))
            told = f"{kept['documents']} documents behind {point['context']:,} tokens"
            found.append((series["name"], told, token, tensor, *(f["mu_shift"]["value"] for f in (token, tensor))))
    arms = {a["arm"]: a for a in kept["health"]["arms"]}
    token, tensor = (arms[alone(f)] for f in (INT8_TOKEN, INT8_TENSOR))
    lost = (a["mu"]["value"] - arms[BASE]["mu"]["value"] for a in (token, tensor))
    about = kept["health"]["about"]
    found.append((about, about.partition(",")[0], token, tensor, *lost))
    rows = []
    for name, told, token, tensor, mine, base in found:
        factor, kl = int(re.search(r"x(\d+)$", name)[1]), token["kl"]["value"] / tensor["kl"]["value"]
        rows.append([factor, factor / 127, told, kl, mine / base, RESCUED if kl <= REMAINS else NOT_RESCUED])
    return rows


def _rescue_told(rows: Sequence[Sequence]) -> str:
    """At which strengths a scale per token and head rescues, and at which not, with what remains."""
    told = []
    for said in (RESCUED, NOT_RESCUED, UNCLEAR):
        at: dict[str, list[str]] = {}
        for name, *_, kl, _, outcome in rows:
            if outcome == said:
                left = f"{kl.value:.1%} [{kl.lo:.1%}, {kl.hi:.1%}]" if isinstance(kl, Estimate) else f"{kl:.1%}"
                at.setdefault(name, []).append(left)
        told += [f"{said} at " + ", ".join(f"{n} ({', '.join(x)})" for n, x in at.items())] if at else []
    return "; ".join(told)


def _stress_told(shape: Mapping, by_channel: list[str]) -> str:
    """How the outliers are made, and which rows follow from that alone."""
    half = shape["head_dim"] // 2
    channels = [c + offset for c in CHANNELS for offset in (0, half)]
    return (
        f"The outliers are made, not found: in every layer, channels {', '.join(map(str, channels))} of the"
        f" {shape['head_dim']} of KV head {HEAD} (of {shape['kv_heads']}) are multiplied by {FACTOR} in the keys and divided by"
        " it in the queries, so that the model with a BF16 cache is the same to the bit. The factor is a power of two, so where"
        f" a key channel has a scale of its own ({', '.join(by_channel)}) the scale takes it up and every code stays the same:"
        " the zeros of those rows are an identity, not a finding. E4M3 and E5M2 take it up in their exponents too, but for what"
        " saturates or lies below their smallest numbers. The strength is chosen by hand; others stand in the next table."
    )


def _breaks(broken: bool) -> str:
    return "breaks" if broken else "does not break by what these texts resolve"
