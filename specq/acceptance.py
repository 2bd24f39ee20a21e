"""The acceptance rules: from p and q to acceptance probabilities, ratios and the outcome of a cycle.

p and q are the target's and the draft's distributions at one position, x the token of the text, d a drafted token.

    rule                       accepts d with      a = P(accept | prefix)   b = P(accepted | prefix, text token x)
    probabilistic, standard    min(1, p/q)(d)      sum min(p, q)            min(p, q)(x) / p(x)
    greedy draft, standard     p(argmax q)         p(argmax q)              [x = argmax q]
    probabilistic, strict      [d = target's x]    sum p q                  q(x)
    greedy draft, strict       [argmax q = x]      p(argmax q)              [x = argmax q]

Sources: Leviathan et al. 2023 (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318) for the first row; the others
follow by putting a one-hot q, or equality with the target's own sample, in its place.
"""

from dataclasses import dataclass

import torch

from specq.rules import Rule
from specq.sampling import inverse_cdf


@dataclass
class PositionScores:
    """Everything logged per position (each [N]); see `score_positions`."""

    logp: torch.Tensor
    logq: torch.Tensor
    alpha: torch.Tensor
    alpha_greedy: torch.Tensor
    alpha_strict: torch.Tensor
    draft_top1: torch.Tensor
    draft_token: torch.Tensor
    ratio: torch.Tensor
    kl: torch.Tensor
    top1_agrees: torch.Tensor
    entropy: torch.Tensor


def score_positions(
    logp: torch.Tensor,
    logq: torch.Tensor,
    tokens: torch.Tensor,
    base_logp: torch.Tensor,
    uniforms: torch.Tensor,
    rule: Rule,
) -> PositionScores:
    """Scores of N positions from log-probabilities over V ids.

    Args:
        logp, logq: target and draft, [N, V] float32, -inf outside the support.
        tokens: the text's own token per position, [N].
        base_logp: the baseline target's log-probabilities [N, V], for KL(base || arm) in nats and top-1 agreement.
        uniforms: one number in [0, 1) per position, [N]; the drafted token is drawn with it.
        rule: decides only how `draft_token` is drawn and its ratio min(1, p/q) is formed.

    `alpha` is 1 - TV(p, q), computed as 1 - sum|p - q| / 2, which is exactly 1 where p and q are bit-equal.
    """
    p, q, x = logp.exp(), logq.exp(), tokens[:, None]
    top1 = logq.argmax(-1)
    if rule.draft_sampling == "greedy":
        drafted, log_drafted = top1, torch.zeros_like(logq[:, 0])
    else:
        drafted = inverse_cdf(q, uniforms)
        log_drafted = logq.gather(-1, drafted[:, None])[:, 0]
    logp_drafted = logp.gather(-1, drafted[:, None])[:, 0]
    if rule.verify == "strict":
        ratio = logp_drafted.exp()
    else:
        ratio = (logp_drafted - log_drafted).clamp(max=0.0).exp()
    base = base_logp.exp()
    gap = torch.where(base > 0, base_logp - logp, torch.zeros_like(logp))
    return PositionScores(
        logp=logp.gather(-1, x)[:, 0],
        logq=logq.gather(-1, x)[:, 0],
        alpha=1.0 - 0.5 * (p - q).abs().sum(-1),
        alpha_greedy=p.gather(-1, top1[:, None])[:, 0],
        alpha_strict=(p * q).sum(-1),
        draft_top1=top1,
        draft_token=drafted,
        ratio=ratio,
        kl=(base * gap).sum(-1),
        top1_agrees=logp.argmax(-1) == base_logp.argmax(-1),
        entropy=-torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1),
    )


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Distribution of the correction token after a rejection: max(p - q, 0), normalised. [..., V]; q one-hot allowed.

    Where p equals q nothing is ever rejected; p itself is returned there, so that the row is a distribution.
    """
    rest = (p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.where(total > 0, 1.0), p)


def accepted_prefix(coins: torch.Tensor) -> torch.Tensor:
    """Accepted drafts per cycle, [cycles], from raw per-position verdicts [cycles, K]: those before the first failure."""
    return coins.to(torch.int64).cumprod(-1).sum(-1)


def verify_cycle(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, rule: Rule, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One verification of B rows.

    Args:
        p: target distributions at the K drafted positions and the one after, [B, K + 1, V].
        q: draft distributions at the K positions, [B, K, V] (ignored for a greedy draft, which counts as one-hot).
        drafted: proposed tokens, [B, K].

    Returns (accepted [B] in 0..K, next token [B]): the correction after a rejection, the bonus token otherwise.
    """
    batch, k = drafted.shape
    u = torch.rand(batch, k, generator=generator, dtype=torch.float64)
    if rule.draft_sampling == "greedy":
        q = torch.zeros_like(p[:, :k]).scatter_(-1, drafted[..., None], 1.0)
    pick = torch.rand(batch * (k + 1), generator=generator, dtype=torch.float64)
    if rule.verify == "strict":
        own = inverse_cdf(p.flatten(0, 1), pick).view(batch, k + 1)
        accepted = accepted_prefix(own[:, :k] == drafted)
        return accepted, own.gather(1, accepted[:, None])[:, 0]
    at = drafted[..., None]
    coins = u < (p[:, :k].gather(-1, at) / q.gather(-1, at))[..., 0]
    accepted = accepted_prefix(coins)
    row = torch.arange(batch)
    stop = accepted.clamp(max=k - 1)
    rejected = residual(p[row, stop], q[row, stop]) if k else p[:, 0]
    final = torch.where((accepted < k)[:, None], rejected, p[row, accepted])
    return accepted, inverse_cdf(final, pick[:batch])
