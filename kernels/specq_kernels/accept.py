"""Acceptance figures of several target arms against one draft, from logits, without a softmax in memory.

Two walks over the rows of a position: the first finds maxima, their ids and normalisers of the draft and of every arm, the
second the sums that need two distributions; it runs backwards, so that it begins with what the cache still holds.
alpha = sum min(p, q) is formed as 1 - sum |p - q| / 2, exactly 1 for equal rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specq_kernels.layout import SIZES, integers, on

LN2 = tl.constexpr(0.6931471805599453)
COLUMNS = tl.constexpr(9)
LANES = tl.constexpr(8)  # neighbouring logits that one thread reads at once
FAR = tl.constexpr(2147483647)


@triton.jit
def _scaled(row, v, width, factor, top, log):
    """log2 of the probabilities of ids v, from a row's maximum and the log2 of its sum relative to that (subtracting the
    maximum first keeps large logits and small temperatures exact). Equal logits give bit-equal probabilities."""
    x = tl.load(row + v, mask=v < width, other=float("-inf")).to(tl.float32) - top
    return tl.math.fma(x, tl.full(x.shape, factor, tl.float32), tl.zeros_like(x) - log)


@triton.jit
def _of_token(row, token, size, width, factor, top, log):
    """The same of one id; -inf for an id that does not count."""
    token = tl.where(token < 0, FAR, token)
    x = tl.load(row + token, mask=token < tl.minimum(size, width), other=float("-inf")).to(tl.float32)
    return (x - top) * factor - log


@triton.jit(do_not_specialize=SIZES)
def _acceptance_kernel(
    target, target_arm, target_row, draft, draft_row, tokens, drafted, out, top1, rows, size, target_width, draft_width,
    factor, draft_factor, ARMS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_R: tl.constexpr,
    CUT: tl.constexpr, HAS_DRAFTED: tl.constexpr,
):  # fmt: skip
    """One program: one position, all arms. Columns: see `Acceptance`."""
    n = tl.program_id(0).to(tl.int64)
    base = target + n * target_row
    q_row = draft + n * draft_row
    # loads are masked by the width in memory (wide loads need its divisibility), ids that do not count by CUT
    p_width = target_width
    q_width = draft_width
    v_block = tl.arange(0, BLOCK_R)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    BLOCK: tl.constexpr = BLOCK_R * LANES
    # first walk: row 0 is the draft, row 1 + i is arm i
    x_row = tl.arange(0, BLOCK_X)
    x_base = tl.where(x_row == 0, q_row, base + (x_row - 1).to(tl.int64) * target_arm)
    x_width = tl.where(x_row == 0, q_width, tl.where(x_row <= ARMS, p_width, 0))
    x_factor = tl.where(x_row == 0, draft_factor, factor)
    best = tl.full([BLOCK_X, BLOCK_R], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK_X, BLOCK_R], tl.int32)
    total = tl.zeros([BLOCK_X, BLOCK_R], tl.float32)
    for v0 in range(0, size, BLOCK):
        v = v0 + v_block
        ok = v[None, :, :] < x_width[:, None, None]
        x = tl.load(x_base[:, None, None] + v[None, :, :], mask=ok, other=float("-inf")).to(tl.float32)
        if CUT:
            x = tl.where((v < size)[None, :, :], x, float("-inf"))
        high = tl.max(x, 2)
        new = tl.maximum(best, high)
        at = tl.where(high > best, v0, at)
        safe = tl.where(new == float("-inf"), 0.0, new)
        e = tl.exp2((x - safe[:, :, None]) * x_factor[:, None, None])
        total = total * tl.exp2((best - safe) * x_factor[:, None]) + tl.sum(e, 2)
        best = new
    top = tl.max(best, 1)
    x_top = tl.where(top == float("-inf"), 0.0, top)
    x_log = tl.log2(tl.sum(total * tl.exp2((best - x_top[:, None]) * x_factor[:, None]), 1))
    # the lowest id of the maximum: the first run of lanes that holds it, then within that run
    run = tl.where(best == top[:, None], at + tl.arange(0, BLOCK_R)[None, :] * LANES, FAR)
    run = tl.min(run, 1)
    near = run[:, None] + tl.arange(0, LANES)[None, :]
    candidates = tl.load(x_base[:, None] + near, mask=near < x_width[:, None], other=float("-inf")).to(tl.float32)
    x_id = tl.min(tl.where(candidates == top[:, None], near, FAR), 1)
    q_top = tl.sum(tl.where(x_row == 0, x_top, 0.0), 0)
    q_log = tl.sum(tl.where(x_row == 0, x_log, 0.0), 0)
    q_id = tl.sum(tl.where(x_row == 0, x_id, 0), 0)
    b_top = tl.sum(tl.where(x_row == 1, x_top, 0.0), 0)
    b_log = tl.sum(tl.where(x_row == 1, x_log, 0.0), 0)
    b_id = tl.sum(tl.where(x_row == 1, x_id, 0), 0)
    # second walk: arms only
    arm = tl.arange(0, BLOCK_A)
    mine = x_row[None, :] == arm[:, None] + 1
    p_top = tl.sum(tl.where(mine, x_top[None, :], 0.0), 1)
    p_log = tl.sum(tl.where(mine, x_log[None, :], 0.0), 1)
    p_id = tl.sum(tl.where(mine, x_id[None, :], 0), 1)
    p_base = base + arm.to(tl.int64) * target_arm
    a_width = tl.where(arm < ARMS, p_width, 0)
    gap = tl.zeros([BLOCK_A, BLOCK_R], tl.float32)
    strict = tl.zeros([BLOCK_A, BLOCK_R], tl.float32)
    entropy = tl.zeros([BLOCK_A, BLOCK_R], tl.float32)
    kl = tl.zeros([BLOCK_A, BLOCK_R], tl.float32)
    q_entropy = tl.zeros([BLOCK_R], tl.float32)
    for i in range(tl.cdiv(size, BLOCK) - 1, -1, -1):
        v = i * BLOCK + v_block
        lq = _scaled(q_row, v, q_width, draft_factor, q_top, q_log)
        if CUT:
            lq = tl.where(v < size, lq, float("-inf"))
        q = tl.exp2(lq)
        # 0 log 0 = 0: the floor keeps the product from being NaN
        q_entropy += tl.sum(q * tl.maximum(lq, -1e30), 1)
        lp = _scaled(
            p_base[:, None, None],
            v[None, :, :],
            a_width[:, None, None],
            factor,
            p_top[:, None, None],
            p_log[:, None, None],
        )
        if CUT:
            lp = tl.where((v < size)[None, :, :], lp, float("-inf"))
        p = tl.exp2(lp)
        gap += tl.sum(tl.abs(p - q[None, :, :]), 2)
        strict += tl.sum(p * q[None, :, :], 2)
        entropy += tl.sum(p * tl.maximum(lp, -1e30), 2)
        if ARMS > 1:
            lb = _scaled(base, v, p_width, factor, b_top, b_log)[None, :, :]
            if CUT:
                lb = tl.where((v < size)[None, :, :], lb, float("-inf"))
            b = tl.exp2(lb)
            kl += tl.sum(tl.where(b > 0.0, b * (lb - lp), 0.0), 2)
    token = tl.load(tokens + n)
    live = arm < ARMS
    place = out + (arm.to(tl.int64) * rows + n) * COLUMNS
    lq_token = _of_token(q_row, token, size, q_width, draft_factor, q_top, q_log)
    tl.store(place + 0, _of_token(p_base, token, size, a_width, factor, p_top, p_log) * LN2, mask=live)
    tl.store(place + 1, tl.broadcast_to(lq_token * LN2, [BLOCK_A]), mask=live)
    alpha = 1.0 - 0.5 * tl.sum(gap, 1)
    tl.store(place + 2, tl.where(alpha < 0.0, 0.0, alpha), mask=live)
    tl.store(place + 3, tl.exp2(_of_token(p_base, q_id, size, a_width, factor, p_top, p_log)), mask=live)
    tl.store(place + 4, tl.sum(strict, 1), mask=live)
    tl.store(place + 5, tl.where(arm == 0, 0.0 * b_log, tl.sum(kl, 1)) * LN2, mask=live)
    tl.store(place + 6, -tl.sum(entropy, 1) * LN2, mask=live)
    tl.store(place + 7, tl.broadcast_to(-tl.sum(q_entropy, 0) * LN2, [BLOCK_A]), mask=live)
    if HAS_DRAFTED:
        d = tl.load(drafted + n)
        ratio = _of_token(p_base, d, size, a_width, factor, p_top, p_log)
        ratio -= _of_token(q_row, d, size, q_width, draft_factor, q_top, q_log)
        tl.store(place + 8, tl.exp2(tl.minimum(ratio, 0.0)), mask=live)
    ids = top1 + (arm.to(tl.int64) * rows + n) * 3
    tl.store(ids + 0, p_id, mask=live)
    tl.store(ids + 1, tl.broadcast_to(q_id, [BLOCK_A]), mask=live)
    tl.store(ids + 2, tl.broadcast_to(b_id, [BLOCK_A]), mask=live)


@dataclass
class Acceptance:
    """Figures per arm and position, each `[arms, positions]` float32 (ids int32, booleans).

    logp, logq: log-probability of the text's token. alpha: sum min(p, q), to about 1e-6 absolutely. alpha_greedy: p(argmax q).
    alpha_strict: sum p q.
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


def _check(target: torch.Tensor, draft: torch.Tensor, size: int | None, temperatures: tuple) -> int:
    if target.dim() != 3 or draft.dim() != 2 or target.shape[1] != draft.shape[0] or target.shape[0] == 0:
        raise ValueError(
            f"target logits {tuple(target.shape)} must be [arms, positions, width], draft logits {tuple(draft.shape)}"
            " [positions, width]"
        )
    if target.stride(2) != 1 or draft.stride(1) != 1:
        raise ValueError("logits must be contiguous over the vocabulary")
    if min(temperatures) < 0:
        raise ValueError(f"temperature {min(temperatures)} is negative")
    if (temperatures[0] == 0) != (temperatures[1] == 0):
        raise ValueError("temperature 0 on one side only is not supported; make both 0 or neither")
    size = target.shape[2] if size is None else min(size, target.shape[2])
    if size < 1:
        raise ValueError("no ids count")
    return size


def acceptance(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    drafted: torch.Tensor | None = None,
    size: int | None = None,
    draft_temperature: float | None = None,
    tuning: dict | None = None,
) -> Acceptance:
    """Acceptance figures of every arm.

    Args:
        target_logits: `[arms, positions, width]`, bf16, fp16 or float32; arm 0 is the one that KL is taken from.
        draft_logits: `[positions, width]`; narrower or wider than the target's: ids it lacks have q = 0.
        tokens: int64 `[positions]`, the text's own tokens. drafted: int64 `[positions]`, proposed tokens, or None.
        temperature: 0 makes p and q one-hot on their lowest-id maximum. draft_temperature: default the same.
        size: ids that count (the tokenizer's length); default the target's width.

    Raises ValueError for shapes that do not fit, a negative temperature, or a temperature of 0 on one side only.
    """
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    size = _check(target_logits, draft_logits, size, (temperature, draft_temperature))
    arms, rows, width = target_logits.shape
    tokens, *rest = (
        integers(t, (rows,), target_logits.device, torch.int64, name)
        for t, name in ((tokens, "tokens"), (drafted, "drafted"))
        if t is not None
    )
    drafted = rest[0] if rest else None
    out = torch.empty((arms, rows, COLUMNS.value), dtype=torch.float32, device=target_logits.device)
    top1 = torch.empty((arms, rows, 3), dtype=torch.int32, device=target_logits.device)
    if draft_logits.dtype != target_logits.dtype:
        wider = torch.promote_types(draft_logits.dtype, target_logits.dtype)
        target_logits, draft_logits = target_logits.to(wider), draft_logits.to(wider)
    log2e = 1.4426950408889634
    chosen = {"block": 2048, "warps": 8} | (tuning or {})
    if rows == 0:
        return _finish(out, top1, tokens, drafted, temperature == 0)
    with on(target_logits.device):
        _acceptance_kernel[(rows,)](
            target_logits, target_logits.stride(0), target_logits.stride(1), draft_logits, draft_logits.stride(0), tokens,
            tokens if drafted is None else drafted, out, top1, rows, size, width, draft_logits.shape[1],
            log2e / (temperature or 1.0), log2e / (draft_temperature or 1.0),
            ARMS=arms, BLOCK_A=triton.next_power_of_2(arms), BLOCK_X=triton.next_power_of_2(arms + 1),
            BLOCK_R=min(chosen["block"], max(256, triton.next_power_of_2(size))) // LANES.value,
            CUT=max(width, draft_logits.shape[1]) > size, HAS_DRAFTED=drafted is not None, num_warps=chosen["warps"],
        )  # fmt: skip
    return _finish(out, top1, tokens, drafted, temperature == 0)


def _finish(
    out: torch.Tensor,
    top1: torch.Tensor,
    tokens: torch.Tensor,
    drafted: torch.Tensor | None,
    cold: bool,
) -> Acceptance:
    """Columns by name; with a temperature of 0 on a side, its distribution is one-hot on the ids found."""
    p_id, q_id, b_id = top1.unbind(-1)
    c = list(out.unbind(-1))
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
