"""Step times from data-sheet figures: a first estimate, with its efficiency factors stated.

    time = max(bytes / (bandwidth * eff_b), operations / (matrix rate * eff_m))

bytes: all weights once per step (2 bytes each; the embedding table is read only where it is also the LM head) and the
K and V of every row's context in the format's bytes, scales included. operations: 2 per weight and new token, and
4 * heads * head_dim per layer, cached token and new token for attention.
"""

from dataclasses import dataclass

import numpy as np

from specq.cost.base import Kind
from specq.cost.gpus import Gpu
from specq.kv import get_format
from specq.models import LoadedModel

# Share of the data-sheet rates that decoding kernels reach; not calibrated on any machine yet.
BANDWIDTH_EFFICIENCY = 0.80
MATRIX_EFFICIENCY = 0.60


@dataclass(frozen=True)
class ModelShape:
    """What the roofline needs of a model: weights read per step, and its KV geometry."""

    weights: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: LoadedModel) -> "ModelShape":
        """Shape of a loaded model; an embedding table that is not also the LM head is not read whole."""
        g, config = model.geometry, model.model.config.get_text_config()
        table = 0 if config.tie_word_embeddings else g.vocab * g.hidden
        return cls(model.parameters - table, g.layers, g.heads, g.kv_heads, g.head_dim)


class Roofline:
    """The cost model `roofline:NAME` on one accelerator."""

    fixed = 0.0

    def __init__(self, gpu: Gpu, target: ModelShape, draft: ModelShape) -> None:
        self.gpu, self.shapes = gpu, {"target": target, "draft": draft}
        self.source = f"roofline:{gpu.name}"
        self.details = {
            "gpu": gpu.name,
            "data_sheet": gpu.source,
            "bandwidth_gb_per_s": gpu.bandwidth,
            "bf16_tflops": gpu.bf16,
            "bandwidth_efficiency": BANDWIDTH_EFFICIENCY,
            "matrix_efficiency": MATRIX_EFFICIENCY,
            "note": "estimate from data-sheet figures; efficiency factors assumed, not measured; one GPU, no communication",
        }

    def step_time(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> float:
        """Seconds; see the module docstring for the formula."""
        s = self.shapes[kind]
        per_token = sum(get_format(kv_format).bytes_per_token(s.kv_heads, s.head_dim)) * s.layers
        moved = 2 * s.weights + batch * (context + new_tokens) * per_token
        attention = 4 * s.heads * s.head_dim * s.layers * (context + new_tokens)
        work = batch * new_tokens * (2 * s.weights + attention)
        by_memory = moved / (self.gpu.bandwidth * 1e9 * BANDWIDTH_EFFICIENCY)
        return max(by_memory, work / (self.gpu.bf16 * 1e12 * MATRIX_EFFICIENCY))

    def step_time_draws(self, kind: Kind, batch: int, context: int, new_tokens: int, kv_format: str) -> np.ndarray:
        """A formula has no measurement noise: one value."""
        return np.array([self.step_time(kind, batch, context, new_tokens, kv_format)])
