"""A loaded model: where its weights lie, the caches made for it, and a pass of tokens through it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from specq.kv import KVFormat
from specq.kv.cache import LayerScales, QuantizedCache, QuantizedLayer
from specq.kv.paged import Backend, PagedLayer, kernel_backend
from specq.models.checkpoint import Checkpoint
from specq.models.geometry import Geometry
from specq.parallel import Share
from specq.shape import ModelShape, shape_of

BACKENDS = ("torch", "triton", "cuda")  # from what runs everywhere to the fastest


@dataclass
class LoadedModel:
    """A model ready to score.

    `width` is the number of logits per position; `scales` has one LayerScales per layer (1.0 where nothing was given);
    `sampling_defaults` are the temperature, top_k and top_p of its generation_config, where it has any; `notes` are
    what a reader of the results should know about the checkpoint. Random weights have no tokenizer and no checkpoint.
    """

    name: str
    model: torch.nn.Module
    tokenizer: Any
    geometry: Geometry
    scales: list[LayerScales]
    eos_ids: frozenset[int]
    sampling_defaults: dict[str, float]
    compute_dtype: torch.dtype
    checkpoint_dtype: str
    parameters: int
    checkpoint: Checkpoint | None
    notes: list[str] = field(default_factory=list)
    cache_keyword: str = field(default="cache")
    share: Share | None = None  # where processes share the model: this one's part in that
    number: int = 0  # what it is called between them

    @property
    def shape(self) -> ModelShape:
        """What cost and capacity need of it."""
        return shape_of(self.model.config, ((name, p.numel()) for name, p in self.model.named_parameters()))

    @property
    def device(self) -> torch.device:
        """Where its inputs go, and where logits come back: its embedding's."""
        return self.model.get_input_embeddings().weight.device

    @property
    def devices(self) -> list[torch.device]:
        """All devices of this process that hold its weights; K and V of a layer lie where the layer does."""
        return list(dict.fromkeys(p.device for p in self.model.parameters()))

    @property
    def processes(self) -> int:
        """How many processes share it."""
        return self.share.size if self.share else 1

    @property
    def backend(self) -> Backend:
        """What its attention and stores run through: the kernels where all of its devices have them."""
        shape = self.geometry
        found = [kernel_backend(d, shape.head_dim, shape.heads // shape.kv_heads) for d in self.devices]
        return min(found, key=lambda backend: BACKENDS.index(backend.name))

    def new_cache(
        self,
        fmt: KVFormat,
        batch: int,
        capacity: int,
        scales: list[LayerScales] | None = None,
        round_query: bool = False,
        splits: int = 1,
    ) -> QuantizedCache:
        """An empty cache for `batch` rows of at most `capacity` tokens; `scales` replaces the checkpoint's."""
        layer = QuantizedLayer if self.backend.name == "torch" else PagedLayer
        arguments = (fmt, scales or self.scales, batch, capacity, round_query, splits)
        return self.share.new_cache(self, arguments, layer) if self.share else QuantizedCache(*arguments, layer)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, cache: QuantizedCache, counts: torch.Tensor | int | None = None, keep: int = 0
    ) -> torch.Tensor:
        """Feed `tokens` [B, q] behind what `cache` holds and commit `counts` of them per row (all by default).

        Returns the logits [B, q or `keep` last, width] in the compute dtype. Raises ValueError when committed tokens would
        stand beyond the model's positions; padding there is given the last one, since learned positions have no more.
        """
        counts = tokens.shape[1] if counts is None else counts
        last = self.geometry.max_positions - 1
        if int((cache.lengths + counts).max()) > last + 1:
            raise ValueError(f"{self.name} has {last + 1} positions and was fed more tokens")
        positions = (cache.lengths[:, None] + torch.arange(tokens.shape[1])).clamp(max=last)
        padded = isinstance(counts, torch.Tensor) and bool((counts < tokens.shape[1]).any())
        cache.rows.expect(counts if padded else None)
        with self.share.one_pass(self, cache, tokens, counts, keep) if self.share else nullcontext():
            out = self.model(
                input_ids=tokens.to(self.device),
                position_ids=positions.to(self.device),
                use_cache=True,
                logits_to_keep=keep,
                **{self.cache_keyword: cache},
            )
        cache.advance(counts)
        return out.logits

    def prefill(
        self,
        rows: Sequence[Sequence[int]],
        cache: QuantizedCache,
        chunk: int = 512,
        progress: Callable[[float], None] = lambda done: None,
    ) -> None:
        """Feed all but the last token of every row, which opens decoding, in chunks; `progress` takes tokens done."""
        width = max(map(len, rows)) - 1
        padded = torch.zeros(len(rows), width, dtype=torch.long)
        for i, ids in enumerate(rows):
            padded[i, : len(ids) - 1] = torch.tensor(ids[:-1])
        body = torch.tensor([len(ids) - 1 for ids in rows])
        for at in range(0, width, chunk):
            counts = (body - at).clamp(0, min(chunk, width - at))
            self.forward(padded[:, at : at + chunk], cache, counts, keep=1)
            progress(float(counts.sum()))
