"""Static scales from text that is not scored: the largest magnitude of K and V per layer, or per head and channel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specq.kv import KVFormat, get_format
from specq.kv.base import nonzero_scale
from specq.kv.cache import LayerScales, QuantizedCache
from specq.models.loaded import LoadedModel


@dataclass
class KVRange:
    """Largest |K| and |V| of every layer per KV head and channel, each [1, kv_heads, 1, head_dim] float32."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @classmethod
    def of(cls, cache: QuantizedCache) -> "KVRange":
        """Of the tokens that a cache holds, on the CPU."""
        found, longest = [], cache.rows.longest
        beyond = torch.arange(longest) >= cache.lengths[:, None]
        for layer in cache.layers:
            for x in layer.read(torch.float32):
                x = x[:, :, :longest].abs()
                if cache.rows.uniform is None:
                    x.masked_fill_(beyond.to(x.device)[:, None, :, None], 0.0)
                found.append(x.amax(dim=(0, 2), keepdim=True).cpu())
        found = cache.whole(found)
        return cls(found[::2], found[1::2])

    def join(self, other: "KVRange | None") -> "KVRange":
        """The largest of both."""
        if other is None:
            return self
        pairs = ((self.k, other.k), (self.v, other.v))
        return KVRange(*([torch.maximum(a, b) for a, b in zip(*pair, strict=True)] for pair in pairs))

    def scales(self, fmt: KVFormat) -> list[LayerScales]:
        """Scales that map the largest magnitude seen to the codec's largest value, in the format's granularity."""
        out = []
        for k, v in zip(self.k, self.v, strict=True):
            parts = {}
            for name, amax in (("k", k), ("v", v)):
                if fmt.granularity(name) == "channel":
                    parts[name] = nonzero_scale(amax / fmt.codec.max)
                elif fmt.granularity(name) == "tensor":
                    parts[name] = nonzero_scale(amax.amax().view(1, 1, 1, 1) / fmt.codec.max)
            out.append(LayerScales(**parts, source="calibration"))
        return out


@torch.inference_mode()
def measure_range(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    chunk: int = 512,
    progress: Callable[[float], None] = lambda done: None,
) -> KVRange:
    """Run token sequences through `model` with a BF16 cache and take the largest |K| and |V| (after RoPE, as stored)."""
    found = None
    for ids in prompts:
        cache = model.new_cache(get_format("bf16"), 1, len(ids))
        for piece in torch.tensor([list(ids)]).split(chunk, dim=1):
            model.forward(piece, cache, keep=1)
            progress(piece.shape[1])
        found = KVRange.of(cache).join(found)
    return found
