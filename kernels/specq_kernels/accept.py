"""Acceptance figures of several target arms against one draft, from logits, without a softmax in memory.

Two walks over each row: the first finds maxima, their ids and normalisers, the second the sums that need both
distributions. alpha = sum min(p, q) is formed as 1 - sum |p - q| / 2, exactly 1 for equal rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
COLUMNS = tl.constexpr(9)


@triton.jit
def _walk(row, size, width, factor, BLOCK: tl.constexpr):
    """(maximum, its lowest id, sum of 2^(x - maximum)) of one row of scaled logits (base 2)."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for v0 in range(0, size, BLOCK):
        v = v0 + lane
        x = tl.load(row + v, mask=v < tl.minimum(size, width), other=float("-inf")).to(tl.float32) * factor
        larger = x > best
        new = tl.where(larger, x, best)
        at = tl.where(larger, v, at)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(best - safe) + tl.exp2(x - safe)
        best = new
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, at, 2147483647), 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, first, tl.sum(total * tl.exp2(best - safe), 0)


@triton.jit
def _acceptance_kernel(
    target, target_arm, target_row, draft, draft_row, tokens, drafted, out, top1, rows, size, target_width, draft_width,
    factor, draft_factor, BLOCK: tl.constexpr, HAS_DRAFTED: tl.constexpr,
):  # fmt: skip
    """One program: one position of one arm. Columns: see `Acceptance`."""
    n = tl.program_id(0)
    arm = tl.program_id(1)
    base_row = target + n.to(tl.int64) * target_row
    p_row = base_row + arm.to(tl.int64) * target_arm
    q_row = draft + n.to(tl.int64) * draft_row
    p_top, p_id, p_sum = _walk(p_row, size, target_width, factor, BLOCK)
    q_top, q_id, q_sum = _walk(q_row, size, draft_width, draft_factor, BLOCK)
    b_top, b_id, b_sum = p_top, p_id, p_sum
    if arm > 0:
        b_top, b_id, b_sum = _walk(base_row, size, target_width, factor, BLOCK)
    p_lse = p_top + tl.log2(p_sum)
    q_lse = q_top + tl.log2(q_sum)
    b_lse = b_top + tl.log2(b_sum)
    lane = tl.arange(0, BLOCK)
    gap = tl.zeros([BLOCK], tl.float32)
    strict = tl.zeros([BLOCK], tl.float32)
    p_entropy = tl.zeros([BLOCK], tl.float32)
    q_entropy = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    for v0 in range(0, size, BLOCK):
        v = v0 + lane
        p_in = v < tl.minimum(size, target_width)
        q_in = v < tl.minimum(size, draft_width)
        lp = tl.load(p_row + v, mask=p_in, other=float("-inf")).to(tl.float32)
        lq = tl.load(q_row + v, mask=q_in, other=float("-inf")).to(tl.float32)
        # explicit fma on both sides: equal logits then give bit-equal probabilities
        lp = tl.math.fma(lp, factor, -p_lse)
        lq = tl.math.fma(lq, draft_factor, -q_lse)
        p = tl.exp2(lp)
        q = tl.exp2(lq)
        gap += tl.abs(p - q)
        strict += p * q
        p_entropy += tl.where(p > 0.0, p * lp, 0.0)
        q_entropy += tl.where(q > 0.0, q * lq, 0.0)
        if arm > 0:
            lb = tl.load(base_row + v, mask=p_in, other=float("-inf")).to(tl.float32)
            lb = tl.math.fma(lb, factor, -b_lse)
            b = tl.exp2(lb)
            kl += tl.where(b > 0.0, b * (lb - lp), 0.0)
    token = tl.load(tokens + n)
    place = out + (arm.to(tl.int64) * rows + n) * COLUMNS
    tl.store(place + 0, _log2_prob(p_row, token, target_width, factor, p_lse) * LN2)
    tl.store(place + 1, _log2_prob(q_row, token, draft_width, draft_factor, q_lse) * LN2)
    tl.store(place + 2, 1.0 - 0.5 * tl.sum(gap, 0))
    tl.store(place + 3, tl.exp2(_log2_prob(p_row, q_id, target_width, factor, p_lse)))
    tl.store(place + 4, tl.sum(strict, 0))
    tl.store(place + 5, tl.sum(kl, 0) * LN2)
    tl.store(place + 6, -tl.sum(p_entropy, 0) * LN2)
    tl.store(place + 7, -tl.sum(q_entropy, 0) * LN2)
    if HAS_DRAFTED:
        d = tl.load(drafted + n)
        ratio = _log2_prob(p_row, d, target_width, factor, p_lse) - _log2_prob(
            q_row, d, draft_width, draft_factor, q_lse
        )
        tl.store(place + 8, tl.exp2(tl.minimum(ratio, 0.0)))
    ids = top1 + (arm.to(tl.int64) * rows + n) * 3
    tl.store(ids + 0, p_id)
    tl.store(ids + 1, q_id)
    tl.store(ids + 2, b_id)


@triton.jit
def _log2_prob(row, token, width, factor, lse):
    x = tl.load(row + token, mask=token < width, other=float("-inf")).to(tl.float32)
    return tl.math.fma(x, factor, -lse)


@dataclass
class Acceptance:
    """Figures per arm and position, each `[arms, positions]` float32 (ids int32, booleans).

    logp, logq: log-probability of the text's token. alpha: sum min(p, q). alpha_greedy: p(argmax q). alpha_strict: sum p q.
    kl: KL(arm 0 || arm) in nats. entropy, draft_entropy: in nats. ratio: min(1, p / q) of the drafted token, if given.
    """

    logp: torch.Tensor
    logq: torch.Tensor
    alpha: torch.Tensor
    alpha_greedy: torch.Tensor
    alpha_strict: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor
    draft_entropy: torch.Tensor
    ratio: torch.Tensor | None
    top1: torch.Tensor
    draft_top1: torch.Tensor
    top1_agrees: torch.Tensor


def _check(
    target: torch.Tensor, draft: torch.Tensor, tokens: torch.Tensor, size: int | None, temperatures: tuple
) -> int:
    if target.dim() != 3 or draft.dim() != 2 or target.shape[1] != draft.shape[0] or tokens.shape != draft.shape[:1]:
        raise ValueError(
            f"target logits {tuple(target.shape)} must be [arms, positions, width], draft logits {tuple(draft.shape)}"
            f" [positions, width], tokens {tuple(tokens.shape)} [positions]"
        )
    if target.stride(2) != 1 or draft.stride(1) != 1:
        raise ValueError("logits must be contiguous over the vocabulary")
    if min(temperatures) < 0:
        raise ValueError(f"temperature {min(temperatures)} is negative")
    return target.shape[2] if size is None else min(size, target.shape[2])


def acceptance(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    drafted: torch.Tensor | None = None,
    size: int | None = None,
    draft_temperature: float | None = None,
) -> Acceptance:
    """Acceptance figures of every arm.

    Args:
        target_logits: `[arms, positions, width]`, bf16, fp16 or float32; arm 0 is the one that KL is taken from.
        draft_logits: `[positions, width]`; narrower or wider than the target's: ids it lacks have q = 0.
        tokens: int64 `[positions]`, the text's own tokens. drafted: int64 `[positions]`, proposed tokens, or None.
        temperature: 0 makes p and q one-hot on their lowest-id maximum. draft_temperature: default the same.
        size: ids that count (the tokenizer's length); default the target's width.

    Raises ValueError for shapes that do not fit or a negative temperature.
    """
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    size = _check(target_logits, draft_logits, tokens, size, (temperature, draft_temperature))
    arms, rows, width = target_logits.shape
    out = torch.empty((arms, rows, COLUMNS.value), dtype=torch.float32, device=target_logits.device)
    top1 = torch.empty((arms, rows, 3), dtype=torch.int32, device=target_logits.device)
    log2e = 1.4426950408889634
    _acceptance_kernel[(rows, arms)](
        target_logits, target_logits.stride(0), target_logits.stride(1), draft_logits, draft_logits.stride(0), tokens,
        tokens if drafted is None else drafted, out, top1, rows, size, width, draft_logits.shape[1],
        log2e / (temperature or 1.0), log2e / (draft_temperature or 1.0),
        BLOCK=min(4096, triton.next_power_of_2(size)), HAS_DRAFTED=drafted is not None, num_warps=8,
    )  # fmt: skip
    return _finish(out, top1, tokens, drafted, temperature == 0, draft_temperature == 0)


def _finish(
    out: torch.Tensor,
    top1: torch.Tensor,
    tokens: torch.Tensor,
    drafted: torch.Tensor | None,
    cold: bool,
    draft_cold: bool,
) -> Acceptance:
    """Columns by name; with a temperature of 0 on a side, its distribution is one-hot on the ids found."""
    p_id, q_id, b_id = top1.unbind(-1)
    c = list(out.unbind(-1))
    if cold != draft_cold:
        raise ValueError("temperature 0 on one side only is not supported; make both 0 or neither")
    if cold:
        hit = lambda ids, of: (ids == of).float()  # noqa: E731
        same = hit(p_id, q_id)
        c[0], c[1] = hit(p_id, tokens).log(), hit(q_id, tokens).log()
        c[2] = c[3] = c[4] = same
        c[5] = torch.where(p_id == b_id, 0.0, float("inf"))
        c[6], c[7] = torch.zeros_like(same), torch.zeros_like(same)
        if drafted is not None:
            c[8] = hit(p_id, drafted)
    return Acceptance(*c[:8], c[8] if drafted is not None else None, p_id, q_id, p_id == b_id)
