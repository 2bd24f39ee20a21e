"""Step times from data-sheet figures: a first estimate, with its efficiency factors stated, and calibratable.

On each of n tensor-parallel GPUs

    time = max(bytes / (bandwidth * eff_b), operations / (matrix rate * eff_m)) + layers * layer_seconds + communication

bytes: the weights a step reads, 1/n of them (the embedding table only where it is also the LM head; of routed experts
the expected share that the step's tokens touch), and what every row's cache keeps in the format's bytes, scales
included, windows capped, KV heads replicated where there are fewer than GPUs. operations: 2 per active weight and new
token, and 4 * heads * head_dim per kept token, layer and new token for attention, 1/n of them. communication: two ring
all-reduces of the hidden state per layer, 2 (n - 1) / n of its bytes over the link each, and one gather of the logits.
Williams et al. 2009 (roofline); Shoeybi et al. 2019, arXiv:1909.08053 (two all-reduces per layer). A draft whose heads
do not divide by n runs on one GPU.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from specq.cost.base import Kind
from specq.cost.gpus import Efficiency, Gpu
from specq.cost.table import Timing
from specq.errors import SpecqError
from specq.kv import get_format
from specq.shape import ModelShape

ACTIVATION_BYTES = 2
PRIOR = 0.05  # pull of calibration towards the assumed factors, for those that the timings do not determine


class Roofline:
    """The cost model `roofline:NxGPU`."""

    fixed = 0.0

    def __init__(self, gpu: Gpu, target: ModelShape, draft: ModelShape, gpus: int = 1) -> None:
        """Raises SpecqError when the target's heads cannot be divided over `gpus`."""
        if not target.splits(gpus):
            raise SpecqError(
                f"{target.heads} heads with {target.kv_heads} KV heads cannot be divided over {gpus} tensor-parallel GPUs"
            )
        self.gpu, self.gpus, self.efficiency = gpu, gpus, gpu.efficiency
        self.shapes = {"target": target, "draft": draft}
        self.over = {"target": gpus, "draft": gpus if draft.splits(gpus) else 1}
        self.source = f"roofline:{f'{gpus}x' if gpus > 1 else ''}{gpu.name}"
        self.calibration: dict = {}

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
        } | ({"calibration": self.calibration} if self.calibration else {})

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds; see the module docstring for the formula."""
        return self._seconds(self.efficiency, kind, batch, context, new_tokens, kv_format)

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """A formula has no measurement noise: one value."""
        return np.array([self.step_time(kind, batch, context, new_tokens, kv_format)])

    def _seconds(self, e: Efficiency, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        s, n, tokens = self.shapes[kind], self.over[kind], batch * new_tokens
        kept = sum(s.kv_bytes(get_format(kv_format), context + new_tokens, n))
        moved = s.read_weights(tokens) * s.weight_bytes / n + batch * kept
        attention = 4 * s.heads * (s.latent or s.head_dim) * s.kept(context + new_tokens)
        work = tokens * (2 * s.active_weights + attention) / n
        by_memory = moved / (self.gpu.bandwidth * 1e9 * e.bandwidth)
        by_matrix = work / (self.gpu.bf16 * 1e12 * e.matrix)
        return max(by_memory, by_matrix) + s.depth * e.layer_seconds + self._communication(e, s, n, tokens)

    def _communication(self, e: Efficiency, s: ModelShape, n: int, tokens: int) -> float:
        if n == 1:
            return 0.0
        share, rate = (n - 1) / n, self.gpu.link * 1e9 * e.link
        reduce = 2 * share * tokens * s.hidden * ACTIVATION_BYTES / rate + e.reduce_seconds
        return 2 * s.depth * reduce + share * tokens * s.vocab * ACTIVATION_BYTES / rate + e.reduce_seconds

    def calibrated(self, records: Sequence[Timing], name: str) -> "Roofline":
        """The same accelerator with efficiency factors fitted to timings of this very pair (least squares of logs).

        Factors that the timings do not determine stay near the assumed ones; `details` tells the error that is left.
        """
        from scipy.optimize import least_squares

        names = ["bandwidth", "matrix", "layer_seconds", *(["link", "reduce_seconds"] if self.gpus > 1 else [])]
        start = np.array([np.log(max(getattr(self.efficiency, x), 1e-9)) for x in names])
        wanted = np.log([r.seconds for r in records])
        cases = [(r.kind, r.batch, r.context, r.new_tokens, r.kv_format) for r in records]

        def error(logs: np.ndarray) -> np.ndarray:
            e = replace(self.efficiency, **dict(zip(names, np.exp(logs), strict=True)))
            return np.log([self._seconds(e, *case) for case in cases]) - wanted

        fitted = least_squares(lambda x: np.concatenate([error(x), PRIOR * (x - start)]), start, x_scale=0.3)
        left = error(fitted.x)
        values = {x: float(v) for x, v in zip(names, np.exp(fitted.x), strict=True)}
        stated = replace(self.efficiency, **values, source=f"calibrated on {name}")
        other = Roofline(replace(self.gpu, efficiency=stated), *self.shapes.values(), self.gpus)
        other.source = f"{self.source}@{name}"
        other.calibration = {
            "file": name,
            "records": len(records),
            "relative_error_rms": float(np.sqrt((left**2).mean())),
            "relative_error_largest": float(np.abs(left).max()),
        }
        return other
