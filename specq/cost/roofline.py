"""Step times from data-sheet figures: a first estimate, with its efficiency factors stated, and calibratable.

On each of n tensor-parallel GPUs

    time = products + attention + layers * layer_seconds + step_seconds + communication

products = max(bytes / (bandwidth * eff_b), operations / (matrix rate * eff_m)): the weights a step reads, 1/n of them
(the embedding table only where it is also the LM head; of routed experts the expected share that the step's tokens
touch), and 2 operations per active weight and new token. attention, which runs after them and so reads its caches
however busy they were, = bytes / (bandwidth * eff_b) + operations / (matrix rate * eff_a): what every row's cache
keeps in the format's bytes, scales included, windows capped, KV heads replicated where there are fewer than GPUs, and
4 * heads * head_dim operations per kept token, layer and new token, 1/n of them. A sum, since unpacking, softmax and
the few queries of a tile leave reading and arithmetic little to overlap (step times on an H200 tell it from a
maximum). communication: two ring all-reduces of the hidden state per layer, 2 (n - 1) / n of its bytes over the link
each, and one gather of the logits. Williams et al. 2009 (roofline); Shoeybi et al. 2019, arXiv:1909.08053 (two
all-reduces per layer). A draft whose heads do not divide by n runs on one GPU. `specq.cost.calibration` fits the
factors to timings.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from specq.cost.base import Kind, Operating
from specq.cost.gpus import Efficiency, Gpu
from specq.errors import SpecqError
from specq.kv import get_format
from specq.shape import ModelShape

if TYPE_CHECKING:
    from specq.cost.calibration import Calibration

ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Terms:
    """What a step (or an array of steps) is made of: seconds at the data sheet's full rates, and counts.

    weights, cache: what products and attention read. products, attention: what they compute.
    """

    weights: float | np.ndarray
    products: float | np.ndarray
    cache: float | np.ndarray
    attention: float | np.ndarray
    link: float | np.ndarray
    layers: int | np.ndarray
    reduces: int | np.ndarray

    def seconds(self, e: Efficiency) -> float | np.ndarray:
        """Seconds under efficiency factors."""
        return self.alone(e) + self.communication(e)

    def alone(self, e: Efficiency) -> float | np.ndarray:
        """Seconds of one GPU's share, which waits for no other."""
        products = np.maximum(self.weights / e.bandwidth, self.products / e.matrix)
        attention = self.cache / e.bandwidth + self.attention / e.attention
        return products + attention + self.layers * e.layer_seconds + e.step_seconds

    def communication(self, e: Efficiency) -> float | np.ndarray:
        """Seconds of all-reduces and of the gather; 0 on one GPU."""
        return self.link / e.link + self.reduces * e.reduce_seconds


class Roofline:
    """The cost model `roofline:NxGPU`; with a `calibration`, by the factors that it found."""

    def __init__(
        self,
        gpu: Gpu,
        target: ModelShape,
        draft: ModelShape,
        gpus: int = 1,
        calibration: "Calibration | None" = None,
        fixed: float = 0.0,
    ) -> None:
        """Raises SpecqError when the target's heads cannot be divided over `gpus`."""
        if not target.splits(gpus):
            raise SpecqError(
                f"{target.heads} heads with {target.kv_heads} KV heads cannot be divided over {gpus} tensor-parallel GPUs"
            )
        self.gpu, self.gpus, self.calibration, self.fixed = gpu, gpus, calibration, fixed
        self.efficiency = calibration.efficiency if calibration else gpu.efficiency
        self.shapes = {"target": target, "draft": draft}
        self.over = {"target": gpus, "draft": gpus if draft.splits(gpus) else 1}
        self.source = (
            f"roofline:{f'{gpus}x' if gpus > 1 else ''}{gpu.name}{f'@{calibration.file}' if calibration else ''}"
        )

    @property
    def details(self) -> dict:
        """What a reader needs to judge the figures."""
        kind = "estimate from data-sheet figures; efficiency factors"
        many = f"{self.gpus} GPUs, tensor parallel, two all-reduces per layer" if self.gpus > 1 else "one GPU"
        alone = "; the draft's heads do not divide by that and it runs on one" if self.over["draft"] < self.gpus else ""
        return {
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "data_sheet": self.gpu.source,
            "bandwidth_gb_per_s": self.gpu.bandwidth,
            "bf16_tflops": self.gpu.bf16,
            "memory_gb": self.gpu.memory,
            "link_gb_per_s": self.gpu.link,
            "efficiency": asdict(self.efficiency),
            "note": f"{kind} {self.efficiency.source}; {many}{alone}",
        } | ({"calibration": self.calibration.as_dict()} if self.calibration else {})

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds; see the module docstring for the formula."""
        return float(self.terms(kind, batch, context, new_tokens, kv_format).seconds(self.efficiency))

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """A formula has no measurement noise: one value."""
        return np.array([self.step_time(kind, batch, context, new_tokens, kv_format)])

    def caveats(self, points: Sequence[Operating], k_max: int) -> list[str]:
        """None: a formula holds everywhere alike, and `details` say what it is."""
        return []

    def terms(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> Terms:
        """The parts of one step's time, before efficiencies."""
        s, n, tokens = self.shapes[kind], self.over[kind], batch * new_tokens
        byte, operation = 1 / (self.gpu.bandwidth * 1e9), 1 / (self.gpu.bf16 * 1e12)
        kept = sum(s.kv_bytes(get_format(kv_format), context + new_tokens, n))
        scores = 4 * s.heads * (s.latent or s.head_dim) * s.kept(context + new_tokens)
        sent, reduces = 0.0, 0
        if n > 1:
            share, reduces = (n - 1) / n, 2 * s.depth + 1
            sent = share * tokens * ACTIVATION_BYTES * (2 * s.depth * 2 * s.hidden + s.vocab)
        return Terms(
            weights=s.read_weights(tokens) * s.weight_bytes / n * byte,
            products=2 * s.active_weights * tokens / n * operation,
            cache=batch * kept * byte,
            attention=scores * tokens / n * operation,
            link=sent / (self.gpu.link * 1e9),
            layers=s.depth,
            reduces=reduces,
        )
