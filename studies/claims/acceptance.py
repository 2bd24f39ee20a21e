"""Claims about acceptance, judged on studies: every function takes what was measured, by name, and gives a Claim."""

from collections.abc import Mapping

from specq.analysis import BASE
from specq.stats import Estimate
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
    why = f"An interval reaches the published range where it overlaps it. {counts}. "
    why += {
        CONFIRMED: "The published sizes fit everywhere.",
        REFUTED: "Losses of this size were not seen in any setting.",
        DEPENDS: "On how large mu is (a draft that is nearly the target has most to lose) and on whether keys have outliers.",
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
    rows = []
    for study in (before, now):
        for fmt in study.formats:
            arm = alone(fmt)
            agree = study.mean("top1_agrees", arm).value
            rows.append([study.about, fmt, study.shift(arm), study.mean("kl", arm), agree])
    shown = Table(
        "Shift of mu at K = 5, KL from the BF16 target in nats, and how often the likeliest token is the same:",
        ["setting", "format", "shift of mu", "KL", "top-1 agreement"], ["", "", "+.4f", ".5f", ".1%"], rows,
    )  # fmt: skip
    caused = {f: change_of_mean(now, before, "kl", alone(f)) for f in now.formats}
    lost = {f: change_of_shift(now, before, alone(f)) for f in now.formats}
    outcome, text = [], []
    for kind, tensor, token in (("INT8", INT8_TENSOR, INT8_TOKEN), ("FP8", E4M3, FP8_TOKEN)):
        broken = caused[tensor].lo > 0 and lost[tensor].hi < 0
        left = caused[token].value / caused[tensor].value
        outcome.append(broken and left <= REMAINS)
        text.append(
            f"{kind}: outliers x256 {'cost' if broken else 'cost no resolved part of mu and KL'}"
            f" {-lost[tensor].value:.3f} accepted tokens with one scale per tensor, and {left:.1%} of the KL remains with one"
            f" per token and head ({'rescued' if outcome[-1] else 'not rescued'})."
        )
    said = verdict(outcome)
    text.append(
        "A scale per token is shared by all channels of the token, and an outlier channel is large in every token: such a scale"
        " mends saturation (FP8 at scale 1.0) and not the lost resolution of integer codes. A scale per channel does:"
        f" {caused[INT8_CHANNEL].value / caused[INT8_TENSOR].value:.1%} of per-tensor INT8's KL remains."
    )
    table = Table(
        f"What the outliers alone add ({now.about} minus {before.about}, the same texts to the bit):",
        ["format", "change of the shift of mu", "added KL"], ["", "+.4f", "+.5f"],
        [[f, lost[f], caused[f]] for f in now.formats],
    )  # fmt: skip
    claim = "Per-tensor scales break where keys have outlier channels, and per-token scales rescue them."
    return Claim("e", claim, said, " ".join(text), [shown, table])


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
    why += "What changes with context is the pair itself: alpha of the BF16 pair moves by more than any format moves it"
    why += " (last row). The study of context goes to 8,000 tokens: [context](../context/README.md)."
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
        mu = study.mu_difference(alone(better), alone(worse))
        kl = study.mean_difference("kl", alone(better), alone(worse))
        ahead, behind = (kl.hi < 0 or mu.lo > 0), (kl.lo > 0 or mu.hi < 0)
        wins.append(ahead and not behind)
        (won if wins[-1] else lost if behind and not ahead else []).append(study.about)
        rows.append(
            [
                study.about,
                study.mean("kl", alone(better)).value,
                study.mean("kl", alone(worse)).value,
                kl,
                mu,
                _who(kl, mu),
            ]
        )
    columns = [
        "setting",
        f"KL, {better}",
        f"KL, {worse}",
        "difference of KL",
        "difference of mu",
        "resolved for the first by",
    ]
    return wins, won, lost, Table("", columns, ["", ".5f", ".5f", "+.5f", "+.4f", ""], rows)


def _who(kl: Estimate, mu: Estimate) -> str:
    for_it = [n for n, yes in (("KL", kl.hi < 0), ("mu", mu.lo > 0)) if yes]
    against = [n for n, yes in (("KL", kl.lo > 0), ("mu", mu.hi < 0)) if yes]
    return listed(for_it) + (f"; against it by {listed(against)}" if against else "")


def e4m3_or_e5m2(m: Studies) -> Claim:
    """(g)."""
    wins, won, lost, table = _contest(m, E4M3, E5M2)
    why = f"E4M3 is closer in {len(won)} of {len(wins)} settings; E5M2 in: {listed(lost)}. "
    why += "E4M3 has three bits of mantissa against two; at scale 1.0 it ends at 448 where E5M2 ends at 57,344, so that keys"
    why += " with large outliers saturate it. A calibrated scale, or one per token, takes that away."
    return Claim("g", "E4M3 beats E5M2 for KV.", verdict(wins), why, [table])


def keys_by_channel(m: Studies) -> Claim:
    """(h)."""
    wins, won, lost, table = _contest(m, INT8_MIXED, INT8_TENSOR)
    why = (
        f"`{INT8_MIXED}` is closer to BF16 in {len(won)} of {len(wins)} settings, `{INT8_TENSOR}` in: {listed(lost)}. "
    )
    why += (
        "By how much depends on the keys: little where channels are alike, nearly everything where some are outliers."
    )
    claim = "Keys scaled per channel and values per token beat one scale each (`int8_k_channel_v_token`)."
    return Claim("h", claim, verdict(wins), why, [table])
