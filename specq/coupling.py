"""How the interval of the own-text shift widens as texts part.

Two arms that sample the same prompt share their noise, so their texts agree until their distributions let a token differ,
and then go their own ways: from there on the pairing of a document's figures helps less and less. This module tells both:
where texts part, and the shift with its standard error over ever longer beginnings of the texts, beside the same-text one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specq import analysis
from specq.acceptance import Rule
from specq.stats import Estimate
from specq.texts import Text

BEGINNINGS = (1 / 8, 1 / 4, 1 / 2, 1)  # shares of the longest text


def shared_tokens(own: Sequence[Text], base: Sequence[Text]) -> np.ndarray:
    """[N] response tokens from the start that both texts of a prompt have in common."""
    out = []
    for a, b in zip(own, base, strict=True):
        pairs = zip(a.response, b.response, strict=False)
        shorter = min(len(a.response), len(b.response))
        out.append(next((i for i, (x, y) in enumerate(pairs) if x != y), shorter))
    return np.array(out)


def beginning(
    texts: Sequence[Text], columns: Mapping[str, np.ndarray], positions: int
) -> tuple[list[Text], dict[str, np.ndarray]]:
    """Texts and their columns cut to at most `positions` positions."""
    keep = np.concatenate([np.arange(t.positions) < positions for t in texts])
    cut = [replace(t, response=t.response[: positions + 1], ended=t.ended and t.positions <= positions) for t in texts]
    return cut, {name: column[keep] for name, column in columns.items()}


def widening(
    base: tuple[Sequence[Text], Mapping[str, np.ndarray]],
    own: tuple[Sequence[Text], Mapping[str, np.ndarray]],
    same: Mapping[str, np.ndarray] | None,
    rule: Rule,
    k: int,
    *,
    seed: int,
    draws: int,
) -> list[dict]:
    """Own-text and same-text shift of mu at K = k over beginnings of the texts.

    Args:
        base: the baseline's texts with its columns; own: the arm's own texts with its columns.
        same: the arm's columns on the baseline's texts, where they were scored.
    """
    shared, longest = shared_tokens(own[0], base[0]), max(t.positions for t in base[0])
    out = []
    for n in sorted({max(k + 1, round(share * longest)) for share in BEGINNINGS}):
        base_texts, base_columns = beginning(*base, n)
        own_texts, own_columns = beginning(*own, n)
        columns = {"base": base_columns}
        if same is not None:
            columns["same"] = beginning(base[0], same, n)[1]
        paired = analysis.analyse(base_texts, columns, "base", rule, k, seed=seed, draws=draws)
        mine = analysis.analyse(own_texts, {"own": own_columns}, "own", rule, k, seed=seed, draws=draws)
        paired.arms["own"] = mine.arms["own"]
        lengths = [min(len(a.response), len(b.response)) for a, b in zip(own_texts, base_texts, strict=True)]
        out.append(
            {
                "positions": int(n),
                "texts_parted": float(np.mean(shared < np.array(lengths))),
                "own": _block(paired.shift("own", k)),
                "same": _block(paired.shift("same", k)) if same is not None else None,
            }
        )
    return out


def _block(shift: Estimate) -> dict:
    return {"value": shift.value, "se": shift.se}
