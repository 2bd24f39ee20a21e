"""From logits to distributions, and from distributions to tokens.

Distributions are float32 log-probabilities with -inf outside the support, over the pair's common vocabulary.
"""

import hashlib

import torch

from specq.rules import Transform


def fit_width(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Cut logits [..., width] to `size` ids, or pad with -inf where the model has fewer: those ids get probability 0."""
    if logits.shape[-1] >= size:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=float("-inf"))


def log_probs(logits: torch.Tensor, transform: Transform) -> torch.Tensor:
    """Transformed log-probabilities [..., V] in float32.

    Greedy gives a one-hot on the lowest id among equal maxima. Top-k keeps ties with the k-th value; top-p keeps the
    smallest set, in falling order, whose mass within top-k reaches top_p (at least one id). A row with NaN stays NaN.
    """
    x = logits.float()
    if transform.greedy:
        best = x.argmax(-1, keepdim=True)
        out = torch.full_like(x, float("-inf")).scatter_(-1, best, 0.0)
        return torch.where(x.isnan().any(-1, keepdim=True), x.new_tensor(float("nan")), out)
    # Subtract the maximum first: dividing by a tiny temperature then reaches -inf, never +inf.
    x = (x - x.amax(-1, keepdim=True)) / transform.temperature
    if 0 < transform.top_k < x.shape[-1]:
        kth = x.topk(transform.top_k, -1).values[..., -1:]
        x = x.masked_fill(x < kth, float("-inf"))
    if transform.top_p < 1.0:
        ordered, ids = x.sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(-1)
        outside = p.cumsum(-1) - p >= transform.top_p
        outside[..., 0] = False
        x = x.masked_fill(torch.zeros_like(outside).scatter(-1, ids, outside), float("-inf"))
    return x.log_softmax(-1)


def stream(seed: int, *names: object) -> torch.Generator:
    """A random stream of its own for (seed, names): the same on every machine, whatever else is drawn."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def gumbel_choice(logp: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sample from `logp` [B, V] with exponential `noise` [B, V]: argmax of p / noise (the Gumbel-max trick).

    Two arms given the same noise pick the same token as often as their distributions allow in this coupling.
    """
    return (logp - noise.clamp_min(1e-38).log()).argmax(-1)


def inverse_cdf(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Sample from `p` [N, V] with uniforms `u` [N] in [0, 1); never an id of probability 0. Returns ids [N].

    One uniform per position couples the draws of several arms: equal distributions give equal tokens.
    """
    cdf = p.double().cumsum(-1)
    at = torch.searchsorted(cdf, (u.double() * cdf[:, -1])[:, None], right=True)[:, 0]
    last = p.shape[-1] - 1 - (p > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(at, last)
