"""What the probe recorded in a cell: one cycles.parquet, and its alpha beside the replay's at the same text positions.

Draft d of a cycle that starts behind text token s was proposed after the text's own tokens as long as the drafts before it
were accepted; then it stands at position s + d, and its alpha is the replay's a there, but for the arithmetic.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specq.engines.vllm.probe import COLUMNS
from specq.engines.vllm.protocol import CellResult, RequestLog
from specq.files import read_parquet, write_parquet

_REQUEST = re.compile(r"pass(\d+)-(\d+)(?:-|$)")  # the adapter's request id; vLLM may append to it
Key = tuple[int, int]  # (pass, prompt)


def collect(folder: Path, arm: str) -> dict[str, np.ndarray] | None:
    """All rows of a cell in order, also written to cycles.parquet; None where the probe wrote nothing."""
    parts = [read_parquet(p) for p in sorted(folder.glob("cycles-*.parquet"))]
    if not parts:
        return None
    rows = {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
    write_parquet(folder / "cycles.parquet", {"arm": np.full(len(rows["token"]), arm), **rows})
    return rows


def reached(rows: dict[str, np.ndarray]) -> dict[Key, list[tuple[int, float]]]:
    """(position, alpha) of every draft that followed the text, per request; position 0 is the chain's first."""
    out: dict[Key, list[tuple[int, float]]] = {}
    start: dict[Key, int] = {}  # where a request's running cycle starts
    running: dict[Key, tuple[int, int, bool]] = {}  # (cycle, drafts accepted in it, whether all so far were)
    for name, cycle, alpha, ok in zip(*(rows[c] for c in ("prompt", "cycle", "alpha", "accepted")), strict=True):
        found = _REQUEST.match(str(name))
        if found is None:
            continue  # warm-up
        key = (int(found[1]), int(found[2]))
        before, accepted, alive = running.get(key, (cycle, 0, True))
        if before != cycle:
            start[key] = start.get(key, 0) + accepted + 1
            accepted, alive = 0, True
        if alive:
            out.setdefault(key, []).append((start.get(key, 0) + accepted, float(alpha)))
        alive = alive and bool(ok)
        running[key] = (cycle, accepted + alive, alive)
    return out


def compare_alpha(rows: dict[str, np.ndarray], result: CellResult, logs: Sequence[RequestLog], a: np.ndarray) -> dict:
    """The probe's alpha minus the replay's over all positions that both have.

    logs: the requests that were replayed, in the order of `a` [sum of positions].
    """
    keys = {id(r): (n, r.prompt) for n, p in enumerate(result.passes) for r in p.requests}
    seen, gaps, both, start = reached(rows), [], [], 0
    for log in logs:
        length = len(log.tokens) - 1
        own = a[start : start + length]
        start += length
        for position, alpha in seen.get(keys[id(log)], []):
            if position < length:
                gaps.append(alpha - own[position])
                both.append((alpha, own[position]))
    if not gaps:
        return {"positions": 0, "mean_difference": None, "rms_difference": None, "largest": None, "means": None}
    g = np.array(gaps)
    return {
        "positions": len(g),
        "mean_difference": float(g.mean()),
        "rms_difference": float(np.sqrt((g**2).mean())),
        "largest": float(np.abs(g).max()),
        "means": {"probe": float(np.mean([x for x, _ in both])), "replay": float(np.mean([y for _, y in both]))},
    }
