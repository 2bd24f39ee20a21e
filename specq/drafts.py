"""What proposes tokens in a rollout: a model (the target itself with a cheaper KV format included), or n-gram lookup.

A drafter sees the committed tokens of every row, proposes, and is told afterwards which rows remain. Nothing it stored
beyond the committed tokens survives a cycle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specq.models.loaded import LoadedModel
from specq.ngram import NgramIndex, NgramLookup
from specq.replay import Pass, Setting
from specq.sampling import fit_width, inverse_cdf, log_probs


class NanDraft(Exception):
    """The draft gave NaN logits in `row` of the batch for the draft of index `depth`."""

    def __init__(self, row: int, depth: int) -> None:
        super().__init__(row, depth)
        self.row, self.depth = row, depth


@dataclass
class Proposal:
    """Drafted tokens [B, K], -1 from where on a row proposes nothing, and their log q [B, K, V] (None: q is one-hot)."""

    tokens: torch.Tensor
    logq: torch.Tensor | None


class Drafter(Protocol):
    """What a rollout asks of a draft."""

    def propose(self, rows: Sequence[Sequence[int]], limits: torch.Tensor, uniforms: torch.Tensor) -> Proposal:
        """Up to `limits` [B] drafts behind the committed `rows`, drawn with `uniforms` [B, K]."""
        ...

    def settle(self, committed: torch.Tensor) -> None:
        """Forget what lies beyond `committed` [B] tokens, but for the last one, which is not fed yet."""
        ...

    def select(self, keep: torch.Tensor) -> None:
        """Keep only these rows."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """Measured bytes of its KV cache per token."""
        ...

    def nonfinite(self) -> int:
        """NaN or infinite elements that went into its KV cache."""
        ...


class ModelDrafter:
    """Drafts from a model over its own KV cache, one token per pass.

    After K accepted drafts the last of them is not in the cache yet; the next cycle's first pass feeds it together with
    the bonus token.
    """

    def __init__(
        self,
        model: LoadedModel,
        made: Pass,
        setting: Setting,
        rows: Sequence[Sequence[int]],
        capacity: int,
    ) -> None:
        self.model, self.setting = model, setting
        scales = setting.scales.get((made.role, made.format.name))
        self.cache = model.new_cache(made.format, len(rows), capacity, scales, setting.round_query(made.format))
        fit = model.geometry.max_positions  # rows beyond it are never drafted for
        model.prefill([ids[: fit + 1] for ids in rows], self.cache)

    def propose(self, rows: Sequence[Sequence[int]], limits: torch.Tensor, uniforms: torch.Tensor) -> Proposal:
        """See Drafter; a draft that drafts greedily proposes its argmax. Raises NanDraft."""
        batch, k = uniforms.shape
        greedy = self.setting.rule.draft_sampling == "greedy"
        tokens = torch.full((batch, k), -1)
        logq = []
        lengths = self.cache.lengths.tolist()
        missing = [ids[n:] if limit else [] for ids, n, limit in zip(rows, lengths, limits.tolist(), strict=True)]
        counts = torch.tensor([len(m) for m in missing])
        fed = torch.tensor([[*m, *[0] * (max(1, int(counts.max())) - len(m))] for m in missing])
        for i in range(int(limits.max())):
            logits = self.model.forward(fed, self.cache, counts)
            last = logits[torch.arange(batch), (counts - 1).clamp(min=0)] if i == 0 else logits[:, -1]
            logq.append(log_probs(fit_width(last, self.setting.vocabulary.size), self.setting.draft_transform))
            active = i < limits
            if bool((bad := logq[i].isnan().any(-1).cpu() & active).any()):
                raise NanDraft(int(bad.nonzero()[0]), i)
            picked = logq[i].argmax(-1) if greedy else inverse_cdf(logq[i].exp(), uniforms[:, i].to(last.device))
            tokens[:, i] = torch.where(active, picked.cpu(), -1)
            counts = (i + 1 < limits).long()
            fed = tokens[:, i : i + 1].clamp(min=0)
        if not logq:
            return Proposal(tokens, None)
        logq += [torch.zeros_like(logq[0])] * (k - len(logq))
        return Proposal(tokens, None if greedy else torch.stack(logq, dim=1))

    def settle(self, committed: torch.Tensor) -> None:
        """Roll the cache back."""
        self.cache.rollback(torch.minimum(self.cache.lengths, committed - 1))

    def select(self, keep: torch.Tensor) -> None:
        """Keep only these rows."""
        self.cache.select(keep)

    @property
    def bytes_per_token(self) -> float:
        """Measured bytes of its KV cache per token."""
        return self.cache.bytes_per_token

    def nonfinite(self) -> int:
        """NaN or infinite elements that went into its KV cache."""
        return self.cache.nonfinite()


class NgramDrafter:
    """Prompt lookup: proposes what followed an earlier occurrence of the last tokens. It has no model and no cache."""

    bytes_per_token = 0.0

    def __init__(self, lookup: NgramLookup, rows: Sequence[Sequence[int]]) -> None:
        self.indices = [NgramIndex(lookup, ids) for ids in rows]

    def propose(self, rows: Sequence[Sequence[int]], limits: torch.Tensor, uniforms: torch.Tensor) -> Proposal:
        """See Drafter; q is one-hot."""
        tokens = torch.full(uniforms.shape, -1)
        for i, (index, ids, limit) in enumerate(zip(self.indices, rows, limits.tolist(), strict=True)):
            index.extend(ids[len(index.tokens) :])
            found = index.propose(limit)
            tokens[i, : len(found)] = torch.tensor(found, dtype=torch.long)
        return Proposal(tokens, None)

    def nonfinite(self) -> int:
        """None: it has no cache."""
        return 0

    def settle(self, committed: torch.Tensor) -> None:
        """Only committed tokens were ever indexed."""

    def select(self, keep: torch.Tensor) -> None:
        """Keep only these rows."""
        self.indices = [self.indices[i] for i in keep.tolist()]
