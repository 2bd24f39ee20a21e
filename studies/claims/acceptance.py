"""Claims about acceptance, judged on studies: every function takes what was measured, by name, and gives a Claim."""

from collections.abc import Mapping
from pathlib import Path

from specq.analysis import BASE
from studies.common.measured import Measured, change_of_difference, change_of_mean, change_of_shift
from studies.common.results import CONFIRMED, DEPENDS, REFUTED, Claim, Table, verdict
from studies.common.runs import read_config
from studies.common.stress import CHANNELS, HEAD

Studies = Mapping[str, Measured]
CONTEXT = Path(__file__).parents[1] / "context" / "config.toml"  # the study that stresses keys by other factors
FACTOR = 256  # of the stressed keys
PLAIN, STRESSED = "outliers-1", f"outliers-{FACTOR}"
NEAR, FAR = "context-256", "context-2048"
E4M3, E5M2 = "fp8_e4m3", "fp8_e5m2"
INT8_TOKEN, INT8_TENSOR, INT8_CHANNEL, INT8_MIXED = (
    "int8_per_token_head", "int8_per_tensor", "int8_per_channel", "int8_k_channel_v_token",
)  # fmt: skip
BY_CHANNEL = (INT8_CHANNEL, INT8_MIXED)  # formats whose keys have a scale per channel
REMAINS = 0.1  # of the loss that outliers cause: what a rescue may leave


def alone(fmt: str) -> str:
    """The arm whose target's cache alone has the format."""
    return f"{fmt}+bf16"


def listed(names: list[str]) -> str:
    """Names for a sentence."""
    return ", ".join(names) if names else "none"


def drafts_for_itself(study: Measured) -> bool:
    """Whether the draft is the target."""
    return study.study["configuration"]["draft"] == "self"


def sizes_of_the_loss(m: Studies) -> Claim:
    """(a): the claimed losses of mu against the measured ones.

    A case could reach its range where mu is at least the smallest claimed loss, and where the draft is not the target with
    the same cache, which accepts everything whatever the format. The others are shown and not judged.
    """
    claimed = {E4M3: (0.3, 0.8), INT8_TOKEN: (0.5, 1.5)}
    rows, reached, where, could_not = [], {f: [] for f in claimed}, [], 0
    for study, fmt in ((s, f) for s in m.values() for f in claimed if f in s.formats):
        least, most = claimed[fmt]
        for arm in [alone(fmt), f"{fmt}+{fmt}"][: 2 if "shape" in study.study["pair"]["draft"] else 1]:
            shift = study.shift(arm)
            there = shift.lo <= -least and shift.hi >= -most
            if study.mu() < least or (drafts_for_itself(study) and arm != alone(fmt)):
                could_not += 1
                said = "cannot reach it"
            else:
                reached[fmt].append(there)
                where += [(study, arm)] if there else []
                said = "in the range" if there else "smaller" if shift.lo > -least else "larger"
            rows.append([study.about, study.size, arm, study.mu(), shift, said])
    said = verdict([x for cases in reached.values() for x in cases])
    counts = "; ".join(f"{f}: {sum(r)} of {len(r)} cases reach it" for f, r in reached.items())
    why = (
        f"An interval reaches the claimed range where it overlaps it. {counts}. {could_not} more could not, whatever a format"
        " does, and are not counted: mu itself is below the smallest claimed loss, or the draft is the target and reads the"
        " same cache. "
    )
    why += {
        CONFIRMED: "The claimed sizes fit everywhere.",
        REFUTED: "Losses of this size were not seen in any setting.",
        DEPENDS: f"Reached by: {listed([f'{s.about} ({arm})' for s, arm in where])}.{_on_what(m, where)}",
    }[said]
    why += _of_outliers(m)
    table = Table(
        "Shift of mu (accepted per cycle) at K = 5, 95 % interval, paired by document:",
        ["setting", "prompts x (prompt + output)", "arm (target+draft cache)", "mu, BF16", "shift", "claimed range"],
        ["", "", "", ".3f", "+.4f", ""], rows, _of_cut_cycles(m),
    )  # fmt: skip
    text = "FP8 E4M3 lowers the tokens accepted per cycle by 0.3-0.8, INT8 per token by 0.5-1.5."
    return Claim("a", text, said, why, [table])


def _on_what(m: Studies, where: list[tuple[Measured, str]]) -> str:
    """What settings that reach the range have in common: said where theirs is the largest mu."""
    settings = {s.name: s.mu() for s, _ in where}
    rest = [s.mu() for s in m.values() if s.name not in settings]
    if not settings or not rest or min(settings.values()) <= max(rest):
        return ""
    said = "the setting" if len(settings) == 1 else f"the {len(settings)} settings"
    return (
        f" It may hang on how large mu is: a draft that is nearly the target has most to lose, while an ordinary draft's own"
        f" errors hide the target's. That rests on {said} with the largest mu alone."
    )


def _of_outliers(m: Studies) -> str:
    """For which formats outlier keys are resolved to make the loss larger, and for which not."""
    if not {PLAIN, STRESSED} <= m.keys():
        return ""
    changes = {f: change_of_shift(m[STRESSED], m[PLAIN], alone(f)) for f in (E4M3, INT8_TOKEN)}
    told = ", ".join(f"{f} {c.value:+.3f} [{c.lo:+.3f}, {c.hi:+.3f}]" for f, c in changes.items())
    larger = listed([f for f, c in changes.items() if c.hi < 0])
    return f" Outlier channels of keys (see (e)) change the shift: {told}; resolved to make the loss larger: {larger}."


def _of_cut_cycles(m: Studies) -> str:
    """How the tokens per cycle of a target drafting for itself are counted."""
    if not (own := [s.about for s in m.values() if s.counts_cut_cycles]):
        return ""
    return (
        f"Of the {listed(own)} cycles that the texts' ends cut are counted whole: nearly all have K + 1 tokens, so tokens over"
        " cycles ended would hang on where in a cycle the texts end ([the method](../../../docs/method.md#the-chain))."
    )


def outliers_and_scales(m: Studies) -> Claim:
    """(e): what outlier channels cost under each scale, and what of it remains."""
    now, before = m[STRESSED], m[PLAIN]
    shown = Table(
        "Shift of mu at K = 5, KL from the BF16 target in nats, and how often the likeliest token is the same:",
        ["setting", "format", "shift of mu", "KL", "top-1 agreement"],
        ["", "", "+.4f", ".5f", ".1%"],
        [
            [s.about, f, s.shift(alone(f)), s.mean("kl", alone(f)), s.mean("top1_agrees", alone(f)).value]
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
    breaks = {n: kl[n].lo > 0 and mu[n].hi < 0 for n in (INT8_TENSOR, E4M3)}
    left = kl[INT8_TOKEN].value / kl[INT8_TENSOR].value
    rescued = breaks[INT8_TENSOR] and left <= REMAINS
    why = (
        f"Three things are claimed. INT8 with one scale per tensor {_breaks(breaks[INT8_TENSOR])}: outliers cost it"
        f" {-mu[INT8_TENSOR].value:.3f} accepted tokens and {kl[INT8_TENSOR].value:.3f} nats. A scale per token and head"
        f" {'rescues' if rescued else 'does not rescue'} it: {left:.1%} of that KL and"
        f" {mu[INT8_TOKEN].value / mu[INT8_TENSOR].value:.1%} of that loss remain (rescued would be at most {REMAINS:.0%} of"
        f" the KL). FP8 E4M3 with one scale, 1.0, {_breaks(breaks[E4M3])}: outliers add"
        f" {kl[E4M3].value:.4f} nats and move mu by {mu[E4M3].value:+.3f} [{mu[E4M3].lo:+.3f}, {mu[E4M3].hi:+.3f}], since its"
        " exponent covers the range until codes saturate."
        " An outlier channel is large in every token, so a scale per token and head is still spent on it in its own head; it"
        " only spares the heads without outliers."
    )
    claim = "Per-tensor scales break where keys have outlier channels, and per-token scales rescue them."
    return Claim("e", claim, verdict([breaks[INT8_TENSOR], rescued, breaks[E4M3]]), why, [shown, table])


def _stress_told(shape: Mapping, by_channel: list[str]) -> str:
    """How the outliers are made, and which rows follow from that alone."""
    half = shape["head_dim"] // 2
    channels = [c + offset for c in CHANNELS for offset in (0, half)]
    strengths = {e["outliers"] for e in read_config(CONTEXT)["study"] if "outliers" in e}
    others = " and ".join(f"x{f} ({f / 127:.1f} times)" for f in sorted(strengths))
    return (
        f"The outliers are made, not found: in every layer, channels {', '.join(map(str, channels))} of the"
        f" {shape['head_dim']} of KV head {HEAD} (of {shape['kv_heads']}) are multiplied by {FACTOR} in the keys and divided by"
        " it in the queries, so that the model with a BF16 cache is the same to the bit. The factor is a power of two, so where"
        f" a key channel has a scale of its own ({', '.join(by_channel)}) the scale takes it up and every code stays the same:"
        " the zeros of those rows are an identity, not a finding. E4M3 and E5M2 take it up in their exponents too, but for what"
        f" saturates or lies below their smallest numbers. The strength is chosen by hand: with x{FACTOR} one step of an INT8"
        f" scale that spans the outliers is {FACTOR / 127:.1f} times the largest value that those channels had before. The"
        f" [context study](../context/README.md) uses {others}."
    )


def _breaks(broken: bool) -> str:
    return "breaks" if broken else "does not break by what these texts resolve"


def context(m: Studies) -> Claim:
    """(f): whether the loss is larger behind a long context than behind a short one."""
    near, far = m[NEAR], m[FAR]
    rows, outcome, closer = [], [], []
    for fmt in near.formats:
        arm = alone(fmt)
        growth, kl = change_of_shift(far, near, arm), change_of_mean(far, near, "kl", arm)
        alpha = change_of_difference(far, near, "alpha", arm)
        outcome.append(growth.hi < 0)
        closer.append(kl.hi < 0)
        rows.append([fmt, near.shift(arm), far.shift(arm), growth, alpha, kl])
    base = change_of_mean(far, near, "alpha", BASE)
    why = f"The loss of mu grows for {listed([f for f, o in zip(near.formats, outcome, strict=True) if o])}. "
    why += (
        f"KL from the BF16 target shrinks for {listed([f for f, o in zip(near.formats, closer, strict=True) if o])}. "
    )
    why += f"With {near.study['prompts']['kept']} documents only large changes are resolved: not confirmed is not refuted. "
    why += "The last row is how alpha of the BF16 pair itself moves. More contexts, and outliers with them:"
    why += " [context](../context/README.md)."
    rows.append(["alpha, BF16", None, None, None, base, None])
    table = Table(
        f"The same {near.study['prompts']['kept']} documents, behind their first 256 and their first 2048 tokens, K = 5:",
        ["format", "shift at 256", "shift at 2048", "growth of the shift", "growth of the shift of alpha", "growth of KL"],
        ["", "+.4f", "+.4f", "+.4f", "+.5f", "+.6f"], rows,
    )  # fmt: skip
    return Claim("f", "The loss grows with context.", verdict(outcome), why, [table])


def _contest(m: Studies, better: str, worse: str) -> tuple[list[bool], list[str], list[str], Table]:
    """(wins per setting, settings won, settings lost, table); a win: KL or mu resolved for `better`, neither against."""
    rows, wins, won, lost = [], [], [], []
    for study in (s for s in m.values() if {better, worse} <= set(s.formats)):
        arms = alone(better), alone(worse)
        mu, kl, means = study.mu_difference(*arms), None, [None, None]
        if study.kl_is_finite:
            kl, means = study.mean_difference("kl", *arms), [study.mean("kl", a).value for a in arms]
        ahead = [n for n, yes in (("KL", kl and kl.hi < 0), ("mu", mu.lo > 0)) if yes]
        behind = [n for n, yes in (("KL", kl and kl.lo > 0), ("mu", mu.hi < 0)) if yes]
        wins.append(bool(ahead) and not behind)
        (won if wins[-1] else lost if behind and not ahead else []).append(study.about)
        rows.append([study.about, *means, kl, mu, ", ".join(ahead), ", ".join(behind)])
    columns = ["setting", f"KL, {better}", f"KL, {worse}", "difference of KL", "difference of mu", "for", "against"]
    return (
        wins,
        won,
        lost,
        Table(
            "The target's cache alone has the format, the draft's is BF16; shift of mu at K = 5:",
            columns,
            ["", ".5f", ".5f", "+.5f", "+.4f", "", ""],
            rows,
        ),
    )


def e4m3_or_e5m2(m: Studies) -> Claim:
    """(g)."""
    wins, won, lost, table = _contest(m, E4M3, E5M2)
    why = (
        f"E4M3 is resolved to be the better in {len(won)} of {len(wins)} settings, E5M2 in: {listed(lost)}; else neither. E4M3"
        " has three bits of mantissa against two. At scale 1.0 it ends at 448 where E5M2 ends at 57,344, so that keys with very"
        " large outliers saturate it; a calibrated scale, or one per token, takes that away. At temperature 0 KL is infinite"
        " and mu alone decides."
    )
    return Claim("g", "E4M3 beats E5M2 for KV.", verdict(wins), why, [table])


def keys_by_channel(m: Studies) -> Claim:
    """(h)."""
    wins, won, lost, table = _contest(m, INT8_MIXED, INT8_TENSOR)
    why = (
        f"`{INT8_MIXED}` is resolved to be the better in {len(won)} of {len(wins)} settings, `{INT8_TENSOR}` in:"
        f" {listed(lost)}; else neither. It hangs on the keys: where channels are alike there is little to save, and static"
        " scales per channel can saturate on what their calibration did not see."
    )
    if STRESSED in m:
        why += (
            " In the setting with outliers it cannot but win: they are a power of two, which a scale per channel takes up"
            " without a change of any code (see (e)), so what is measured there is what one scale loses. Without that setting"
            f" it is {len(won) - (m[STRESSED].about in won)} of {len(wins) - 1}."
        )
    claim = "Keys scaled per channel and values per token beat one scale each (`int8_k_channel_v_token`)."
    return Claim("h", claim, verdict(wins), why, [table])


# runs without which a claim cannot be judged; the others take whatever there is
NEEDS = {outliers_and_scales: (PLAIN, STRESSED), context: (NEAR, FAR)}
