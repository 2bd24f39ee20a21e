"""Continuations sampled by the target over its own (quantized) cache.

Every prompt has a noise stream of its own, so its text does not depend on the batch it is sampled in, and two arms that
sample the same prompt share the noise (Gumbel-max coupling): their texts part only where their distributions make them.
"""

from collections.abc import Callable, Sequence

import torch

from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.cache import LayerScales
from specq.models.loaded import LoadedModel
from specq.prompts import Prompt, Text
from specq.sampling import Transform, fit_width, gumbel_choice, log_probs, stream


@torch.inference_mode()
def sample_texts(
    target: LoadedModel,
    prompts: Sequence[Prompt],
    fmt: KVFormat,
    *,
    transform: Transform,
    vocabulary: int,
    max_tokens: int,
    seed: int,
    arm: str,
    scales: list[LayerScales] | None = None,
    round_query: bool = False,
    batch: int = 32,
    chunk: int = 512,
    splits: int = 1,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Text]:
    """Sample up to `max_tokens` tokens for every prompt; EOS ends a text and belongs to it.

    Prompts pass through the cache in `fmt` as decoding does; rows per batch, tokens per prefill chunk and pieces of the K/V
    sequence are orders of arithmetic, of which each is valid. `progress` is called with tokens done.
    Raises SpecqError naming the prompt when the model gives NaN logits.
    """
    texts: list[Text] = []
    for start in range(0, len(prompts), batch):
        group = prompts[start : start + batch]
        width = max(len(p.tokens) for p in group)
        cache = target.new_cache(fmt, len(group), width + max_tokens, scales, round_query, splits)
        target.prefill([p.tokens for p in group], cache, chunk, progress)
        noise = [stream(seed, "text", p.id) for p in group]
        responses: list[list[int]] = [[] for _ in group]
        rows = list(range(len(group)))
        tokens = torch.tensor([[p.tokens[-1]] for p in group])
        for _ in range(max_tokens):
            logits = target.forward(tokens, cache)[:, -1]
            logp = log_probs(fit_width(logits, vocabulary), transform)
            if bool(logp.isnan().any()):
                bad = rows[int(logp.isnan().any(-1).nonzero()[0])]
                raise SpecqError(
                    f"arm {arm}: the target gave NaN logits for prompt {group[bad].id} at response position"
                    f" {len(responses[bad])}"
                )
            draws = torch.stack([torch.empty(vocabulary).exponential_(generator=noise[r]) for r in rows])
            picked = gumbel_choice(logp, draws.to(logp.device)).tolist()
            for r, token in zip(rows, picked, strict=True):
                responses[r].append(token)
            keep = [i for i, token in enumerate(picked) if token not in target.eos_ids]
            progress(len(picked))
            if not keep:
                break
            if len(keep) < len(rows):
                cache.select(torch.tensor(keep))
                rows = [rows[i] for i in keep]
            tokens = torch.tensor([[responses[r][-1]] for r in rows])
        for p, ids in zip(group, responses, strict=True):
            texts.append(Text(p, tuple(ids), arm, ids[-1] in target.eos_ids))
    return texts
