"""From the logits of some positions to every arm's columns: through the kernels on a GPU, in torch otherwise.

The kernels read logits where they lie and write no softmax. They know a temperature on both sides; for top-k and top-p, and
where one side alone is greedy, torch does the work in slices of positions.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specq.acceptance import PositionScores, score_positions, score_proposals
from specq.kv.paged import kernels_run_on
from specq.sampling import fit_width, log_probs

if TYPE_CHECKING:
    from specq.replay import Arm, Pass, Setting

# Beside PositionScores where proposals depend on the cycle's start: a and b after 0, 1, .. accepted drafts, each [N, depth].
DEPTH_COLUMNS = {"alpha_by_depth": np.float32, "b_by_depth": np.bool_}


@dataclass(frozen=True)
class Positions:
    """N positions to score: the text's own tokens, one uniform each for the drafted token, and the proposals [N, depth] of a
    draft that looks them up."""

    tokens: torch.Tensor
    uniforms: torch.Tensor
    proposals: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Positions":
        """The same on `device`."""
        proposals = None if self.proposals is None else self.proposals.to(device)
        return Positions(self.tokens.to(device), self.uniforms.to(device), proposals)

    def __getitem__(self, rows: slice) -> "Positions":
        proposals = None if self.proposals is None else self.proposals[rows]
        return Positions(self.tokens[rows], self.uniforms[rows], proposals)


Columns = dict[str, torch.Tensor]


def score(
    logits: Mapping["Pass", torch.Tensor], arms: Sequence["Arm"], positions: Positions, setting: "Setting", at_once: int
) -> tuple[dict[str, Columns], dict["Pass", torch.Tensor]]:
    """Columns [N] of every arm (names of PositionScores, and DEPTH_COLUMNS for a lookup), and NaN verdicts [N] of every pass.

    Args:
        logits: of every pass, [N, that model's width], any float dtype. The first arm's target is the baseline.
        at_once: numbers that a float32 copy of some positions' logits may have.
    """
    device = next(iter(logits.values())).device
    logits = {p: x.to(device) for p, x in logits.items()}
    positions = positions.to(device)
    if positions.proposals is None and kernels_run_on(device) and _known_to_the_kernels(setting):
        return _by_kernels(logits, arms, positions, setting)
    count, size = len(positions.tokens), setting.vocabulary.size
    rows = max(1, at_once // size)
    parts = [
        _by_torch({p: x[i : i + rows] for p, x in logits.items()}, arms, positions[i : i + rows], setting)
        for i in range(0, count, rows)
    ]
    columns = {a.name: _joined([found[a.name] for found, _ in parts]) for a in arms}
    return columns, _joined([bad for _, bad in parts])


def _joined(parts: Sequence[Mapping[Hashable, torch.Tensor]]) -> dict[Hashable, torch.Tensor]:
    return dict(parts[0]) if len(parts) == 1 else {n: torch.cat([p[n] for p in parts]) for n in parts[0]}


def _known_to_the_kernels(setting: "Setting") -> bool:
    p, q = setting.transform, setting.draft_transform
    return not (p.truncates or q.truncates) and p.greedy == q.greedy


def _by_torch(
    logits: Mapping["Pass", torch.Tensor], arms: Sequence["Arm"], positions: Positions, setting: "Setting"
) -> tuple[dict[str, Columns], dict["Pass", torch.Tensor]]:
    logp = {
        p: log_probs(
            fit_width(x, setting.vocabulary.size),
            setting.transform if p.role == "target" else setting.draft_transform,
        )
        for p, x in logits.items()
    }
    bad = {p: x.isnan().any(-1) for p, x in logp.items()}
    base, columns = logp[arms[0].target], {}
    for arm in arms:
        mine = logp[arm.target]
        if positions.proposals is None:
            scores = score_positions(mine, logp[arm.draft], positions.tokens, base, positions.uniforms, setting.rule)
            columns[arm.name] = vars(scores)
        else:
            scores, *by_depth = score_proposals(mine, positions.proposals, positions.tokens, base)
            columns[arm.name] = vars(scores) | dict(zip(DEPTH_COLUMNS, by_depth, strict=True))
    return columns, bad


def _by_kernels(
    logits: Mapping["Pass", torch.Tensor], arms: Sequence["Arm"], positions: Positions, setting: "Setting"
) -> tuple[dict[str, Columns], dict["Pass", torch.Tensor]]:
    """One call of the acceptance kernel per draft pass, all of its target passes and the baseline's together.

    Calls for other numbers of passes may round otherwise, so what a target pass alone decides is taken from the first.
    """
    from specq_kernels import acceptance, draw

    size, rule = setting.vocabulary.size, setting.rule
    hot, draft_hot = (0.0 if t.greedy else t.temperature for t in (setting.transform, setting.draft_transform))
    base, columns, bad, alone = arms[0].target, {}, {}, {}
    for made in dict.fromkeys(a.draft for a in arms):
        mine = [a for a in arms if a.draft == made]
        targets = list(dict.fromkeys([base, *(a.target for a in mine)]))
        stacked = logits[base][None] if len(targets) == 1 else torch.stack([logits[p] for p in targets])
        tokens, greedy = positions.tokens, rule.draft_sampling == "greedy" or not hot
        drafted = None if greedy else draw(logits[made], positions.uniforms, draft_hot, size)
        found = acceptance(stacked, logits[made], tokens, hot, drafted, size, draft_hot)
        ratio = found.alpha_greedy if greedy else found.ratio
        if rule.verify == "strict" and not greedy:
            ratio = acceptance(stacked, logits[made], drafted, hot, None, size, draft_hot).logp.exp()
        for i, p in enumerate(targets):
            alone.setdefault(p, {n: getattr(found, n)[i] for n in ("logp", "kl", "top1_agrees", "entropy")})
        for arm in mine:
            i = targets.index(arm.target)
            columns[arm.name] = vars(
                PositionScores(
                    logq=found.logq[i],
                    alpha=found.alpha[i],
                    alpha_greedy=found.alpha_greedy[i],
                    alpha_strict=found.alpha_strict[i],
                    draft_top1=found.draft_top1[i].long(),
                    draft_token=found.draft_top1[i].long() if greedy else drafted,
                    ratio=ratio[i],
                    **alone[arm.target],
                )
            )
        # NaN reaches the entropies; one-hot distributions have none that could show it
        nan = lambda p: logits[p][:, :size].isnan().any(-1)  # noqa: E731
        bad |= {p: found.entropy[i].isnan() if hot else nan(p) for i, p in enumerate(targets)}
        bad[made] = found.draft_entropy[0].isnan() if hot else nan(made)
    return columns, bad
