"""Key channels much larger than the rest of their head: what a scale shared by channels cannot serve well.

Keys have them where their projection has a bias or no norm (Qwen2.5; KIVI, arXiv:2402.02750, figure 2): with one scale for
the whole row, a channel r times larger leaves the others 127 / r of INT8's levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specq.kv.calibration import KVRange

# amax over the median channel's amax of the same layer and head. Channels of models without such outliers stay within 4
# (the embedded pair: 3.2).
OUTLIER_RATIO = 6.0
TINY = 1.2e-38  # smallest normal float32: a channel of zeros is no divisor


@dataclass(frozen=True)
class Outlier:
    """A key channel (after RoPE, as stored) of a layer and KV head: its largest magnitude, and that over the head's median."""

    layer: int
    head: int
    channel: int
    amax: float
    ratio: float

    def __str__(self) -> str:
        return f"layer {self.layer} head {self.head} channel {self.channel} ({self.ratio:.0f}x)"


def find_outliers(found: KVRange) -> list[Outlier]:
    """All key channels above OUTLIER_RATIO times their head's median channel, largest ratio first."""
    out = []
    for layer, k in enumerate(found.k):
        amax = k[0, :, 0]  # [kv_heads, head_dim]
        ratio = amax / amax.median(-1, keepdim=True).values.clamp(min=TINY)
        for head, channel in (ratio > OUTLIER_RATIO).nonzero().tolist():
            at = head, channel
            out.append(Outlier(layer, head, channel, float(amax[at]), float(ratio[at])))
    return sorted(out, key=lambda o: -o.ratio)
