"""Measure what context does to shift, alpha and KL, and write the page.

python -m studies.context                 # make context
python -m studies.context --page          # the page alone, from the results that are kept
"""

from pathlib import Path

from specq.analysis import BASE
from studies.common.command import main
from studies.common.measured import Measured, change_of_mean, change_of_shift
from studies.context.page import write_page

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "context"
SERIES = {"plain": "keys as they are", "stressed": "key outliers x64"}
PARTS = ((0.0, 1 / 3, "first third"), (2 / 3, 1.0, "last third"))


def judged(config: dict, found: dict[str, Measured]) -> dict:
    """Points by series and context, the growth of every loss, and the arms of the health study, as JSON."""
    series = {s: [m for m in found.values() if m.name.startswith(f"{s}-")] for s in SERIES}
    return {
        "k": series["plain"][0].k,
        "documents": config["documents"]["count"],
        "series": [{"name": about, "points": [_point(m) for m in series[s]], "growth": _growth(series[s])}
                   for s, about in SERIES.items()],
        "health": {"about": found["health"].about, "arms": _arms(found["health"])},
    }  # fmt: skip


def _point(m: Measured) -> dict:
    """What one context gives: the pair itself, and every format beside it."""
    share = m.share_of_text()
    formats = {}
    for fmt in m.formats:
        arm = f"{fmt}+bf16"
        formats[fmt] = {
            "mu_shift": m.shift(arm).as_dict(),
            "alpha_shift": m.mean_difference("alpha", arm, BASE).as_dict(),
            "kl": m.mean("kl", arm).as_dict(),
            "top1_agreement": m.top1_agreement(arm).as_dict(),
            "alpha_shift_by_part": {
                part: m.mean_difference("alpha", arm, BASE, (share > low) & (share <= high)).as_dict()
                for low, high, part in PARTS
            },
        }
    return {
        "context": m.study["configuration"]["prompt_tokens"],
        "mu": m.mu(),
        "alpha": m.mean("alpha", BASE).as_dict(),
        "null_shift": m.null().as_dict(),
        "formats": formats,
    }


def _growth(points: list[Measured]) -> dict:
    """By how much shift and KL differ between the longest and the shortest context, paired by document."""
    near, far = points[0], points[-1]
    return {
        "from": near.study["configuration"]["prompt_tokens"],
        "to": far.study["configuration"]["prompt_tokens"],
        "alpha_bf16": change_of_mean(far, near, "alpha", BASE).as_dict(),
        "formats": {
            f: {
                "mu_shift": change_of_shift(far, near, f"{f}+bf16").as_dict(),
                "kl": change_of_mean(far, near, "kl", f"{f}+bf16").as_dict(),
            }
            for f in near.formats
        },
    }


def _arms(m: Measured) -> list[dict]:
    """Acceptance beside the health of the target, for drafts over their own BF16 cache and over the target's format."""
    arms = [BASE, *(f"{f}+{d}" for f in m.formats for d in ("bf16", f))]
    return [
        {
            "arm": arm,
            "mu": m.mu_estimate(arm).as_dict(),
            "alpha": m.mean("alpha", arm).as_dict(),
            "kl": m.mean("kl", arm).as_dict(),
            "top1_agreement": m.top1_agreement(arm).as_dict(),
        }
        for arm in arms
    ]


if __name__ == "__main__":
    main(__doc__, HERE, RESULTS, judged, write_page)
