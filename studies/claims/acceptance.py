"""Claims about acceptance, judged on studies: every function takes what was measured, by name, and gives a Claim."""

from collections.abc import Sequence

from specq.analysis import BASE
from studies.claims.outliers import outliers_and_scales
from studies.claims.settings import (
    E4M3,
    E5M2,
    FAR,
    INT8_MIXED,
    INT8_TENSOR,
    INT8_TOKEN,
    NEAR,
    PLAIN,
    STRESSED,
    Studies,
    alone,
    listed,
)
from studies.common.measured import Measured, change_of_difference, change_of_mean, change_of_shift
from studies.common.results import CONFIRMED, DEPENDS, REFUTED, Claim, Table, verdict


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
            there = None if there and shift.hi >= 0 else there  # with 0 in it the interval decides nothing
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
    why += shared_documents(list(m.values())) + _of_outliers(m) + _of_the_null_arm(m)
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


def _of_the_null_arm(m: Studies) -> str:
    """What another order of arithmetic does to mu, in the setting where it does most."""
    study = max(m.values(), key=lambda s: max(-s.null().lo, s.null().hi))
    null = study.null()
    return (
        f" BF16 again in another order of arithmetic (the null arm) moves mu most here: {study.about},"
        f" {null.value:+.4f} [{null.lo:+.4f}, {null.hi:+.4f}]."
    )


def _of_cut_cycles(m: Studies) -> str:
    """How the tokens per cycle of a target drafting for itself are counted."""
    if not (own := [s.about for s in m.values() if s.counts_cut_cycles]):
        return ""
    return (
        f"In the rows of the {listed(own)}, cycles that the texts' ends cut are counted whole: nearly all have K + 1 tokens, so"
        " tokens over cycles ended would hang on where in a cycle the texts end"
        " ([the method](../../../docs/method.md#the-chain))."
    )


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


def _contest(m: Studies, better: str, worse: str) -> tuple[list[bool | None], str, Table]:
    """(outcome per setting, who won where, table); a win: KL or mu resolved for `better`, neither against; None: neither is
    resolved."""
    rows, outcomes, where = [], [], {better: [], worse: [], "undecided": []}
    studies = [s for s in m.values() if {better, worse} <= set(s.formats)]
    for study in studies:
        arms = alone(better), alone(worse)
        mu, kl, means = study.mu_difference(*arms), None, [None, None]
        if study.kl_is_finite:
            kl, means = study.mean_difference("kl", *arms), [study.mean("kl", a).value for a in arms]
        ahead = [n for n, yes in (("KL", kl and kl.hi < 0), ("mu", mu.lo > 0)) if yes]
        behind = [n for n, yes in (("KL", kl and kl.lo > 0), ("mu", mu.hi < 0)) if yes]
        outcomes.append(bool(ahead) and not behind if ahead or behind else None)
        if not (ahead and behind):
            where[better if ahead else worse if behind else "undecided"].append(study.about)
        rows.append([study.about, *means, kl, mu, ", ".join(ahead), ", ".join(behind)])
    told = (
        f"Where KL or mu resolves it ({len(outcomes) - outcomes.count(None)} of {len(outcomes)} settings), `{better}` is the"
        f" better in {len(where[better])}, `{worse}` in: {listed(where[worse])}. Undecided: {listed(where['undecided'])}."
        f"{shared_documents(studies)}"
    )
    table = Table(
        "The target's cache alone has the format, the draft's is BF16; shift of mu at K = 5:",
        ["setting", f"KL, {better}", f"KL, {worse}", "difference of KL", "difference of mu", "for", "against"],
        ["", ".5f", ".5f", "+.5f", "+.4f", "", ""], rows,
    )  # fmt: skip
    return outcomes, told, table


def shared_documents(studies: Sequence[Measured]) -> str:
    """A sentence on settings whose documents all lie among those of the largest; empty where there is none."""
    largest = max(studies, key=lambda s: len(s.documents))
    within = [s for s in studies if s is not largest and set(s.documents) <= set(largest.documents)]
    if not within:
        return ""
    return (
        f" Settings share documents: those of {len(within)} lie among the {len(largest.documents)} of {largest.about}, so that"
        " they are no independent cases."
    )


def e4m3_or_e5m2(m: Studies) -> Claim:
    """(g)."""
    outcomes, told, table = _contest(m, E4M3, E5M2)
    why = (
        f"{told} E4M3 has three bits of mantissa against two. At scale 1.0 it ends at 448 where E5M2 ends at 57,344, so that"
        " keys with very large outliers saturate it; a calibrated scale, or one per token, takes that away. At temperature 0 KL"
        " is infinite and mu alone decides."
    )
    return Claim("g", "E4M3 beats E5M2 for KV.", verdict(outcomes), why, [table])


def keys_by_channel(m: Studies) -> Claim:
    """(h)."""
    outcomes, why, table = _contest(m, INT8_MIXED, INT8_TENSOR)
    if STRESSED in m:
        others = [x for x, row in zip(outcomes, table.rows, strict=True) if row[0] != m[STRESSED].about]
        why += (
            " In the setting with outliers it cannot but win: they are a power of two, which a scale per channel takes up"
            " without a change of any code (see (e)), so what is measured there is what one scale loses."
            f" Without that setting {sum(x is True for x in others)} of {len(others)} are won,"
            f" {others.count(None) or 'none'} undecided."
        )
    claim = "Keys scaled per channel and values per token beat one scale each (`int8_k_channel_v_token`)."
    return Claim("h", claim, verdict(outcomes), why, [table])


# runs without which a claim cannot be judged; the others take whatever there is
NEEDS = {outliers_and_scales: (PLAIN, STRESSED), context: (NEAR, FAR)}
