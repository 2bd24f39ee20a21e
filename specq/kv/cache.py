"""The transformers Cache that stores K and V in a KV format, with its own length for every row of the batch.

A forward pass writes its new tokens behind each row's length; `advance` then commits as many of them as are valid, and
`rollback` takes committed ones back. Tokens beyond a row's length are never visible, so a batch of unequal rows is
padded on the right and needs no attention mask from the caller.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specq.kv.base import E4M3, KVFormat


@dataclass
class LayerScales:
    """Static scales of one layer: float32, broadcastable to `[B, kv_heads, T, head_dim]`; query scale as vLLM's q_scale.

    `source` says where they came from: "one" (1.0 by default), "checkpoint" or "calibration".
    """

    k: torch.Tensor = field(default_factory=lambda: torch.ones(1, 1, 1, 1))
    v: torch.Tensor = field(default_factory=lambda: torch.ones(1, 1, 1, 1))
    q: torch.Tensor = field(default_factory=lambda: torch.ones(1, 1, 1, 1))
    source: str = "one"

    def to(self, device: torch.device) -> "LayerScales":
        """The same scales on `device`."""
        return LayerScales(self.k.to(device), self.v.to(device), self.q.to(device), self.source)


@dataclass
class Rows:
    """What all layers of a cache share: the format, the capacity, and how many tokens each row of the batch holds.

    Layers refer to this and not to the cache, so that a cache without users is freed at once. `longest` is the longest
    row, `uniform` the common length where all rows are equal (None otherwise). `valid` [B] are the tokens of the pass under way
    that are no padding (None: all).
    """

    format: KVFormat
    capacity: int
    round_query: bool
    splits: int
    lengths: torch.Tensor
    longest: int = 0
    uniform: int | None = None
    valid: torch.Tensor | None = None
    _kept: dict[Hashable, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.set(self.lengths)

    def set(self, lengths: torch.Tensor) -> None:
        """Take over new lengths [B]."""
        self.lengths = lengths
        self.longest = int(lengths.max()) if len(lengths) else 0
        same = len(lengths) > 0 and bool((lengths == self.longest).all())
        self.uniform = self.longest if same else None
        self.valid = None
        self._kept = {}

    def expect(self, valid: torch.Tensor | None) -> None:
        """Say how many tokens of each row [B] the coming pass has that are no padding; None: all."""
        self.valid = valid
        self._kept = {}

    def once(self, key: Hashable, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What all layers need alike in a pass: built by the first that asks."""
        if key not in self._kept:
            self._kept[key] = build()
        return self._kept[key]

    def on(self, device: torch.device) -> torch.Tensor:
        """The lengths [B] on `device`."""
        return self.once(device, lambda: self.lengths.to(device))

    def padding(self, new: int, device: torch.device) -> torch.Tensor | None:
        """True `[B, 1, new, 1]` on `device` where a row has no token in this pass; None where every row has all."""
        if self.valid is None:
            return None
        mask = torch.arange(new) >= self.valid[:, None]
        return self.once(("padding", device), lambda: mask[:, None, :, None].to(device))


class QuantizedLayer(CacheLayerMixin):
    """One layer's storage. `update` stores the new K and V and returns the layer itself as the handle for attention."""

    is_sliding = False

    def __init__(self, rows: Rows, scales: LayerScales) -> None:
        super().__init__()
        self.rows, self.scales = rows, scales
        self.stored: dict[str, list[torch.Tensor]] = {}
        self.pending = 0
        self.saturated = self.nonfinite = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Moves the scales to the layer's device; buffers come with the first store."""
        self.scales = self.scales.to(key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple["QuantizedLayer", "QuantizedLayer"]:
        """Store K and V `[B, kv_heads, T, head_dim]` behind each row's length."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._store(key_states, value_states)
        fmt = self.rows.format
        padding = self.rows.padding(key_states.shape[2], key_states.device)
        for part, x in (("k", key_states), ("v", value_states)):
            x = x if padding is None else x.masked_fill(padding, 0.0)
            scale = getattr(self.scales, part)
            self.nonfinite = self.nonfinite + (~torch.isfinite(x)).sum()
            self.saturated = self.saturated + fmt.count_saturated(x, part, scale)
        self.pending = key_states.shape[-2]
        return self, self

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for part, x in (("k", key_states), ("v", value_states)):
            self._write(part, self.rows.format.store(x, part, getattr(self.scales, part)))

    def _write(self, part: str, tensors: tuple[torch.Tensor, ...]) -> None:
        lengths, capacity = self.rows.lengths, self.rows.capacity
        if part not in self.stored:
            self.stored[part] = [t.new_zeros((*t.shape[:2], capacity, t.shape[3])) for t in tensors]
        new = tensors[0].shape[2]
        for buffer, t in zip(self.stored[part], tensors, strict=True):
            if self.rows.uniform is not None:
                buffer[:, :, self.rows.uniform : self.rows.uniform + new] = t
            else:
                at = lengths.to(t.device)[:, None] + torch.arange(new, device=t.device)
                rows = torch.arange(len(lengths), device=t.device)[:, None]
                buffer[rows, :, at] = t.transpose(1, 2)

    def read(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as attention sees them, `[B, kv_heads, longest length + pending, head_dim]` in `dtype`."""
        end = self.rows.longest + self.pending
        fmt = self.rows.format
        k, v = (fmt.load(tuple(t[:, :, :end] for t in self.stored[p]), p, getattr(self.scales, p), dtype) for p in "kv")
        return k, v

    def round_query(self, query: torch.Tensor) -> torch.Tensor:
        """The query as the attention kernel sees it: rounded to e4m3 with q_scale where the cache is set to do so."""
        if not self.rows.round_query:
            return query
        codes = E4M3.encode(query.float() / self.scales.q)
        return (E4M3.decode(codes, torch.float32) * self.scales.q).to(query.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of K/V slots the mask covers, offset of the first)."""
        return self.rows.longest + query_length, 0

    def get_seq_length(self) -> int:
        """Length of the longest row, committed tokens only."""
        return self.rows.longest

    def get_max_length(self) -> int:
        """Slots per row."""
        return self.rows.capacity

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch."""
        self.stored = {p: [t[rows.to(t.device)] for t in ts] for p, ts in self.stored.items()}

    @property
    def slots(self) -> int:
        """Tokens there is room for, all rows together."""
        return self.rows.capacity * len(self.rows.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes that the stored tensors occupy, scales included."""
        return sum(t.numel() * t.element_size() for ts in self.stored.values() for t in ts)


class QuantizedCache(Cache):
    """K and V of all layers in one format.

    Args:
        fmt: the KV format.
        scales: one LayerScales per layer.
        batch: rows.
        capacity: tokens per row that can be stored; a write beyond it raises.
        round_query: whether queries are rounded to e4m3 before attention (`--query-dtype`).
        splits: number of pieces attention cuts the K/V sequence into before merging by log-sum-exp.
        layer: what stores a layer: this module's, or `paged.PagedLayer`.
    """

    def __init__(
        self,
        fmt: KVFormat,
        scales: Sequence[LayerScales],
        batch: int,
        capacity: int,
        round_query: bool = False,
        splits: int = 1,
        layer: type[QuantizedLayer] = QuantizedLayer,
    ) -> None:
        self.rows = Rows(fmt, capacity, round_query, splits, torch.zeros(batch, dtype=torch.long))
        super().__init__(layers=[layer(self.rows, s) for s in scales])

    @property
    def lengths(self) -> torch.Tensor:
        """Committed tokens per row, [B] on the CPU."""
        return self.rows.lengths

    def advance(self, counts: torch.Tensor | int) -> None:
        """Commit `counts` (per row, or one for all) of the tokens that the last forward pass wrote."""
        self.rows.set(self.rows.lengths + counts)
        if self.rows.longest > self.rows.capacity:
            raise ValueError(f"cache of {self.rows.capacity} tokens cannot hold {self.rows.longest}")

    def rollback(self, lengths: torch.Tensor) -> None:
        """Forget committed tokens beyond `lengths` [B]; what was stored for them is overwritten later."""
        if bool((lengths > self.lengths).any()) or bool((lengths < 0).any()):
            raise ValueError("rollback can only shorten rows")
        self.rows.set(lengths.clone())

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows of the batch (indices [n])."""
        for layer in self.layers:
            layer.select(rows)
        self.rows.set(self.rows.lengths[rows])

    @property
    def nbytes(self) -> int:
        """Bytes that the stored tensors of all layers occupy, scales included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Measured bytes per token that there is room for, over all layers."""
        return sum(layer.nbytes / max(layer.slots, 1) for layer in self.layers)

    def saturated_per_layer(self) -> list[int]:
        """Elements beyond the static scale's range, per layer, K and V together, since creation."""
        return [int(layer.saturated) for layer in self.layers]

    def whole(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors [1, kv_heads, ...] of all heads, where the cache holds a share of them (`specq.parallel`)."""
        return parts

    def nonfinite(self) -> int:
        """NaN or infinite elements that the model asked to store, over all layers, since creation."""
        return sum(int(layer.nonfinite) for layer in self.layers)
