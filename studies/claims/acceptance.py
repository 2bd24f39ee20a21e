"""Claims about acceptance, judged on studies: every function takes what was measured, by name, and gives a Claim."""

from collections.abc import Mapping

from specq.analysis import BASE
from studies.common.measured import Measured, change_of_difference, change_of_mean, change_of_shift
from studies.common.results import CONFIRMED, DEPENDS, REFUTED, Claim, Table, verdict

Studies = Mapping[str, Measured]
PLAIN, STRESSED = "outliers-1", "outliers-256"
NEAR, FAR = "context-256", "context-2048"
E4M3, E5M2, FP8_TOKEN = "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"
INT8_TOKEN, INT8_TENSOR, INT8_CHANNEL, INT8_MIXED = (
    "int8_per_token_head", "int8_per_tensor", "int8_per_channel", "int8_k_channel_v_token",
)  # fmt: skip
REMAINS = 0.1  # of the loss that outliers cause: what a rescue may leave


def alone(fmt: str) -> str:
    """The arm whose target's cache alone has the format."""
    return f"{fmt}+bf16"


def listed(names: list[str]) -> str:
    """Names for a sentence."""
    return ", ".join(names) if names else "none"


def sizes_of_the_loss(m: Studies) -> Claim:
    """(a): the published losses of mu against the measured ones."""
    published = {E4M3: (0.3, 0.8), INT8_TOKEN: (0.5, 1.5)}
    rows, reached = [], {f: [] for f in published}
    for study in m.values():
        for fmt, (least, most) in published.items():
            arms = [alone(fmt), f"{fmt}+{fmt}"]
            if fmt not in study.formats:
                continue
            for arm in arms if "shape" in study.study["pair"]["draft"] else arms[:1]:
                shift = study.shift(arm)
                there = shift.lo <= -least and shift.hi >= -most
                reached[fmt].append(there)
                where = "in the range" if there else "smaller" if shift.lo > -least else "larger"
                rows.append([study.about, study.size, arm, study.mu(), shift, where])
    all_cases = [x for cases in reached.values() for x in cases]
    said = verdict(all_cases)
    counts = "; ".join(f"{f}: {sum(r)} of {len(r)} cases reach it" for f, r in reached.items())
    where = listed([f"{about} ({arm})" for about, _, arm, _, _, range_ in rows if range_ == "in the range"])
    why = f"An interval reaches the published range where it overlaps it. {counts}. "
    why += {
        CONFIRMED: "The published sizes fit everywhere.",
        REFUTED: "Losses of this size were not seen in any setting.",
        DEPENDS: f"Reached by: {where}. It hangs on how large mu is: a draft that is nearly the target has most to lose, while"
        " an ordinary draft's own errors hide the target's. Outlier channels of keys make the loss larger too.",
    }[said]
    table = Table(
        "Shift of mu (accepted per cycle) at K = 5, 95 % interval, paired by document:",
        ["setting", "prompts x (prompt + output)", "arm (target+draft cache)", "mu, BF16", "shift", "published range"],
        ["", "", "", ".3f", "+.4f", ""], rows,
    )  # fmt: skip
    text = "FP8 E4M3 lowers the tokens accepted per cycle by 0.3-0.8, INT8 per token by 0.5-1.5."
    return Claim("a", text, said, why, [table])


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
    )
    breaks = {n: kl[n].lo > 0 and mu[n].hi < 0 for n in (INT8_TENSOR, E4M3)}
    left = {n: kl[n].value / kl[INT8_TENSOR].value for n in (INT8_TOKEN, INT8_CHANNEL)}
    rescued = breaks[INT8_TENSOR] and left[INT8_TOKEN] <= REMAINS
    why = (
        f"Three things are claimed. INT8 with one scale per tensor {_breaks(breaks[INT8_TENSOR])}: outliers cost it"
        f" {-mu[INT8_TENSOR].value:.3f} accepted tokens and {kl[INT8_TENSOR].value:.3f} nats. A scale per token and head"
        f" {'rescues' if rescued else 'does not rescue'} it: {left[INT8_TOKEN]:.1%} of that KL and"
        f" {mu[INT8_TOKEN].value / mu[INT8_TENSOR].value:.1%} of that loss remain (rescued would be at most {REMAINS:.0%} of"
        f" the KL). FP8 E4M3 with one scale, 1.0, {_breaks(breaks[E4M3])}: outliers add"
        f" {kl[E4M3].value:.4f} nats and move mu by {mu[E4M3].value:+.3f} [{mu[E4M3].lo:+.3f}, {mu[E4M3].hi:+.3f}], since its"
        " exponent covers the range until codes saturate."
        " An outlier channel is large in every token, so a scale per token is still spent on it; what a scale per token *and"
        " head* mends is the heads that have none, here one of two. A scale per key channel leaves"
        f" {left[INT8_CHANNEL]:.1%} of the KL."
    )
    claim = "Per-tensor scales break where keys have outlier channels, and per-token scales rescue them."
    return Claim("e", claim, verdict([breaks[INT8_TENSOR], rescued, breaks[E4M3]]), why, [shown, table])


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
    return wins, won, lost, Table("", columns, ["", ".5f", ".5f", "+.5f", "+.4f", "", ""], rows)


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
        f" {listed(lost)}; else neither. It hangs on the keys: where some channels are outliers it saves nearly everything;"
        " where channels are alike there is little to save, and static scales per channel can saturate on what their"
        " calibration did not see."
    )
    claim = "Keys scaled per channel and values per token beat one scale each (`int8_k_channel_v_token`)."
    return Claim("h", claim, verdict(wins), why, [table])


# runs without which a claim cannot be judged; the others take whatever there is
NEEDS = {outliers_and_scales: (PLAIN, STRESSED), context: (NEAR, FAR)}
