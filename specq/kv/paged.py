"""The cache layer that specq_kernels stores and attends to, and when it is used.

Codes and scales are those of `cache.QuantizedLayer` bit for bit; only where they lie (pages of 16 tokens) and the order of
summation in attention differ. Without a CUDA GPU, Triton, or a head_dim the kernels know, the torch layer does the work.
"""

import functools
import importlib.util
import logging
import os
from typing import NamedTuple

import torch

from specq.kv.cache import LayerScales, QuantizedLayer, Rows

PAGE = 16
MAX_VERIFY = 17  # query tokens of one pass up to which the split kernel for few queries is the faster one
_log = logging.getLogger("specq")


class Backend(NamedTuple):
    """What attention and stores run through: `torch`, `triton`, or `cuda` (CUDA C++ beside Triton); and why not more."""

    name: str
    why: str


@functools.cache
def kernel_backend(device: torch.device, head_dim: int, group: int) -> Backend:
    """The backend on this device for `group` query heads per KV head; logged once."""
    found = _find(device, head_dim, group)
    _log.info(
        "attention on %s, head_dim %d: %s%s", device, head_dim, found.name, f" ({found.why})" if found.why else ""
    )
    return found


def kernels_run_on(device: torch.device) -> bool:
    """Whether the kernels can be used at all on this device."""
    return not _without(device)


def _without(device: torch.device) -> str:
    """Why nothing runs through the kernels on this device; empty where it does."""
    if device.type != "cuda":
        return f"the model is on a {device.type} device, the kernels need a CUDA GPU"
    if os.environ.get("SPECQ_KERNELS") == "0":
        return "SPECQ_KERNELS=0 is set"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def _find(device: torch.device, head_dim: int, group: int) -> Backend:
    if why := _without(device):
        return Backend("torch", why)
    from specq_kernels import verify_cuda
    from specq_kernels.attention import MAX_GROUP
    from specq_kernels.store import HEAD_DIMS

    if head_dim not in HEAD_DIMS:
        return Backend("torch", f"the kernels have no head_dim {head_dim}")
    if group > MAX_GROUP:
        return Backend("torch", f"the kernels take {MAX_GROUP} query heads per KV head, not {group}")
    why = verify_cuda.why_not(device, head_dim)
    return Backend("triton", why) if why else Backend("cuda", "")


class PagedLayer(QuantizedLayer):
    """One layer in pages. Rows of the batch own `ceil(capacity / 16)` pages each, the same ones in every layer; selecting rows
    selects their tables."""

    def __init__(self, rows: Rows, scales: LayerScales) -> None:
        super().__init__(rows, scales)
        self.pages = None
        self.table = torch.empty(0, 0, dtype=torch.int32)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the pages for `[B, kv_heads, *, head_dim]` on the layer's device."""
        from specq_kernels import PagedKV

        super().lazy_initialization(key_states, value_states)
        batch, heads, _, dim = key_states.shape
        each = -(-self.rows.capacity // PAGE)
        k, v = (getattr(self.scales, part).expand(1, heads, 1, dim)[0, :, 0] for part in "kv")
        device = key_states.device
        self.pages = PagedKV.allocate(self.rows.format.name, batch * each, heads, PAGE, dim, device, k, v)
        self.table = torch.arange(batch * each, dtype=torch.int32, device=device).view(batch, each)

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        from specq_kernels import store_kv

        new, device = key_states.shape[2], key_states.device

        def slots() -> torch.Tensor:
            at = self.rows.on(device)[:, None] + torch.arange(new, device=device)
            return (self.table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()

        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        store_kv(k, v, self.pages, self.rows.once(("slots", device), slots))

    def read(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """See `QuantizedLayer.read`; gathers the pages."""
        end = self.rows.longest + self.pending

        def gather(pages: torch.Tensor) -> torch.Tensor:
            raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages  # few operations know FP8
            rows = raw[self.table.long()].transpose(1, 2).flatten(2, 3)[:, :, :end]
            return rows.view(pages.dtype)

        p, out = self.pages, []
        for part, codes, scale, low in (("k", p.k, p.k_scale, p.k_low), ("v", p.v, p.v_scale, p.v_low)):
            stored = (gather(codes), *(gather(t)[..., None] for t in (scale, low) if t.numel()))
            out.append(self.rows.format.load(stored, part, getattr(self.scales, part), dtype))
        return out[0], out[1]

    def attend(
        self, query: torch.Tensor, scaling: float, window: int, softcap: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Causal attention of `query` [B, heads, q, D], whose K and V are the last q tokens stored -> `[B, q, heads, D]`.

        `window` 0 means none. With more than one split of the sequence (the null arm) the kernels sum in another order.
        """
        from specq_kernels import replay_attention, verify_attention

        batch, _, new, _ = query.shape
        device = query.device
        contexts = self.rows.once(("contexts", device), lambda: (self.rows.on(device) + new).to(torch.int32))
        counts = self.rows.once(("counts", device), lambda: torch.full((batch,), new, dtype=torch.int32, device=device))
        longest, other = self.rows.longest + new, self.rows.splits > 1
        arguments = (query.transpose(1, 2), self.pages, self.table, contexts, counts, longest, scaling, window)
        arguments += (softcap or 0.0, sinks)
        if new <= MAX_VERIFY:
            return verify_attention(*arguments, chunk=256 if other else None)
        return replay_attention(*arguments, tuning={"block_n": 32} if other else None)

    def select(self, rows: torch.Tensor) -> None:
        """See `QuantizedLayer.select`; only the tables are copied, so no row may be taken twice."""
        if len(rows.unique()) < len(rows):
            raise ValueError("a row of a paged cache cannot be taken twice")
        self.table = self.table[rows.to(self.table.device)]

    @property
    def slots(self) -> int:
        """Tokens there are pages for."""
        return 0 if self.pages is None else len(self.pages.k) * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of pages and scales."""
        return 0 if self.pages is None else self.pages.nbytes
