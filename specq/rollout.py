"""Real speculative decoding: draft, verify over the target's own quantized cache, correct or add a bonus token, again.

A cycle drafts K tokens, feeds the last committed token and the drafts to the target in one pass of K + 1 positions, accepts
a prefix of them, adds one token of the target's own, and rolls both caches back to the committed tokens but the last, which
opens the next cycle. Rows of a batch advance by different amounts; a finished row leaves the batch.

Every prompt has a noise stream of its own, so what it emits does not depend on the batch it is in. A cycle always drafts K
tokens unless the positions of a model end or n-gram lookup finds nothing: what an accepted block emits beyond EOS or the
length limit is cut from the text and counted apart (`accepted_engine`), as a server's counters would have it.

    specq rollout --pair tiny --dtype fp8 --k 4
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specq.acceptance import Rule, verify_cycle
from specq.drafts import Drafter, ModelDrafter, NanDraft, NgramDrafter, Proposal
from specq.errors import SpecqError
from specq.models import LoadedModel
from specq.ngram import NgramLookup
from specq.prompts import Prompt
from specq.replay import Arm, Setting
from specq.sampling import fit_width, inverse_cdf, log_probs, stream
from specq.texts import Text

# Columns of cycles.parquet beside `arm` and `prompt`: one row per cycle and drafted token.
COLUMNS = {
    "cycle": np.int32,
    "draft_position": np.int16,
    "token": np.int32,
    "logp": np.float32,
    "logq": np.float32,
    "ratio": np.float32,
    "alpha": np.float32,
    "accepted": np.bool_,
    "accepted_engine": np.bool_,
}


@dataclass
class Rollout:
    """One arm's rollout of N prompts at one K.

    `log` holds COLUMNS and `prompt`, an index into `texts`. Counts per text, [N] or [N, K]: `cycles` began; `undrafted` of
    them had no draft (lookup found nothing, or `out_of_positions`: a model's positions had ended); `ends` are tokens of the
    text that a cycle ended with (a text may stop inside a cycle); `accepted[n, k - 1]` drafts in the text that were their
    cycle's k-th. `kv_bytes` are measured bytes per token of capacity; `seconds` per kind of pass.
    """

    arm: Arm
    k: int
    texts: list[Text] = field(default_factory=list)
    log: dict[str, np.ndarray] = field(default_factory=dict)
    cycles: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    undrafted: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    out_of_positions: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    ends: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    accepted: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), int))
    kv_bytes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "draft": 0.0, "verify": 0.0})


@dataclass
class _Row:
    """A prompt on its way: committed tokens, where the response starts, its noise, and its counts."""

    index: int
    prompt: Prompt
    ids: list[int]
    noise: torch.Generator
    accepted: np.ndarray
    cycles: int = 0
    undrafted: int = 0
    out_of_positions: int = 0
    ends: int = 0
    ended: bool = False

    @property
    def emitted(self) -> int:
        return len(self.ids) - len(self.prompt.tokens)


@torch.inference_mode()
def roll_out(
    target: LoadedModel,
    draft: LoadedModel | NgramLookup,
    prompts: Sequence[Prompt],
    arm: Arm,
    setting: Setting,
    *,
    k: int,
    max_tokens: int,
    batch: int = 16,
    progress: Callable[[float], None] = lambda done: None,
    watch: Callable[[Sequence[Sequence[int]], "object", Drafter], None] = lambda rows, cache, drafter: None,
) -> Rollout:
    """Decode up to `max_tokens` new tokens for every prompt with K = `k` drafts per cycle; EOS ends a text.

    `draft` may be `target` itself: the arm's draft format then makes it self-speculation. `progress` takes tokens done;
    `watch` sees committed tokens, target cache and drafter after every cycle. Raises SpecqError naming arm, prompt and
    cycle when logits are NaN, or when a prompt leaves no room for a new token.
    """
    made = Rollout(arm, k)
    rows: list[_Row] = []
    log: list[dict[str, np.ndarray]] = []
    for start in range(0, len(prompts), batch):
        group = [
            _Row(start + i, p, list(p.tokens), stream(setting.seed, "rollout", arm.name, k, p.id), np.zeros(k, int))
            for i, p in enumerate(prompts[start : start + batch])
        ]
        _roll_batch(target, draft, group, made, setting, max_tokens, log, progress, watch)
        rows += group
    made.texts = [Text(r.prompt, tuple(r.ids[len(r.prompt.tokens) :]), arm.name, r.ended) for r in rows]
    for name in ("cycles", "undrafted", "out_of_positions", "ends"):
        setattr(made, name, np.array([getattr(r, name) for r in rows]))
    made.accepted = np.stack([r.accepted for r in rows])
    types = COLUMNS | {"prompt": np.int32}
    made.log = {n: np.concatenate([e[n] for e in log] or [[]]).astype(dtype) for n, dtype in types.items()}
    order = np.lexsort((made.log["draft_position"], made.log["cycle"], made.log["prompt"]))
    made.log = {n: column[order] for n, column in made.log.items()}
    return made


def _roll_batch(
    target: LoadedModel, draft: LoadedModel | NgramLookup, rows: list[_Row], made: Rollout, setting: Setting,
    max_tokens: int, log: list, progress: Callable, watch: Callable,
) -> None:  # fmt: skip
    arm, k = made.arm, made.k
    capacity = max(len(r.ids) for r in rows) + max_tokens + k
    fmt = arm.target.format
    cache = target.new_cache(
        fmt, len(rows), capacity, setting.scales.get(("target", fmt.name)), setting.round_query(fmt)
    )
    clock = _Clock(made.seconds, target.device.type == "cuda")
    target.prefill([r.ids for r in rows], cache, progress=progress)
    if isinstance(draft, NgramLookup):
        drafter: Drafter = NgramDrafter(draft, [r.ids for r in rows])
        draft_positions = 1 << 30
    else:
        drafter = ModelDrafter(draft, arm.draft, setting, [r.ids for r in rows], capacity, lambda done: None)
        draft_positions = draft.geometry.max_positions
    # The first new token comes from prefill and belongs to no cycle.
    logp = _target_logp(target, cache, torch.tensor([r.ids[-1:] for r in rows]), rows, made, setting)
    uniforms = torch.stack([torch.rand(1, generator=r.noise, dtype=torch.float64) for r in rows])
    first = inverse_cdf(logp[:, 0].exp(), uniforms[:, 0].to(logp.device)).tolist()
    made.kv_bytes = {
        "target": cache.nbytes / (len(rows) * capacity),
        "draft": drafter.nbytes / (len(rows) * capacity),
    }
    clock.lap("prefill")
    for r, token in zip(rows, first, strict=True):
        r.ids.append(token)
        r.ended = token in target.eos_ids
    progress(len(rows))
    live = _drop_finished(rows, max_tokens, cache, drafter)
    while live:
        # The last committed token stands at index n - 1: the target's last draft at n - 1 + count, the draft model's last
        # input at n - 2 + count. Neither may leave the model's positions.
        lengths = torch.tensor([len(r.ids) for r in live])
        room = torch.minimum(target.geometry.max_positions - lengths, draft_positions + 1 - lengths)
        limits = room.clamp(0, k)
        noise = torch.stack([torch.rand(3 * k + 1, generator=r.noise, dtype=torch.float64) for r in live])
        drawn, coins, picks = noise.split([k, k, k + 1], dim=1)
        try:
            proposal = drafter.propose([r.ids for r in live], limits, drawn)
        except NanDraft as nan:
            raise _nan_error("draft", made, live[nan.row], nan.depth) from nan
        clock.lap("draft")
        block = torch.cat([torch.tensor([r.ids[-1:] for r in live]), proposal.tokens.clamp(min=0)], dim=1)
        counts = 1 + (proposal.tokens >= 0).sum(1)
        logp = _target_logp(target, cache, block[:, : int(counts.max())], live, made, setting, counts)
        logp = torch.nn.functional.pad(logp, (0, 0, 0, k + 1 - logp.shape[1]))  # rows of nothing but padding
        accepted, final = verify_cycle(
            logp.exp(),
            None if proposal.logq is None else proposal.logq.to(logp.device).exp(),
            proposal.tokens.to(logp.device),
            setting.rule,
            coins.to(logp.device),
            picks.to(logp.device),
        )
        accepted, final = accepted.cpu(), final.cpu()
        kept = _commit(live, proposal.tokens, accepted, final, limits, target.eos_ids, max_tokens)
        log.append(_log_cycle(live, logp, proposal, accepted, kept, setting.rule))
        committed = torch.tensor([len(r.ids) for r in live])
        cache.rollback(torch.minimum(cache.lengths, committed - 1))
        drafter.settle(committed)
        clock.lap("verify")
        progress(float((committed - lengths).sum()))
        watch([r.ids for r in live], cache, drafter)
        live = _drop_finished(live, max_tokens, cache, drafter)
    if cache.nonfinite():
        raise SpecqError(f"arm {arm.name}: the target produced NaN or infinite K or V")


class _Clock:
    """Charges the time since the last lap to a kind of pass."""

    def __init__(self, seconds: dict[str, float], cuda: bool) -> None:
        self.seconds, self.cuda, self.last = seconds, cuda, time.perf_counter()

    def lap(self, name: str) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now


def _target_logp(
    target: LoadedModel, cache: object, tokens: torch.Tensor, rows: Sequence[_Row], made: Rollout, setting: Setting,
    counts: torch.Tensor | int | None = None,
) -> torch.Tensor:  # fmt: skip
    """log p [B, q, V] of one pass; NaN at a position that counts stops the rollout."""
    logits = target.forward(tokens, cache, counts)
    logp = log_probs(fit_width(logits, setting.vocabulary.size), setting.transform)
    bad = logp.isnan().any(-1).cpu()
    if counts is not None:
        bad &= torch.arange(tokens.shape[1]) < torch.as_tensor(counts)[:, None]
    if bool(bad.any()):
        row, at = bad.nonzero()[0].tolist()
        raise _nan_error("target", made, rows[row], at)
    return logp


def _nan_error(role: str, made: Rollout, row: _Row, at: int) -> SpecqError:
    return SpecqError(
        f"arm {made.arm.name}: the {role} gave NaN logits for prompt {row.prompt.id} in cycle {row.cycles} at draft position"
        f" {at + 1}"
    )


def _commit(
    rows: Sequence[_Row], drafted: torch.Tensor, accepted: torch.Tensor, final: torch.Tensor, limits: torch.Tensor,
    eos_ids: frozenset[int], max_tokens: int,
) -> list[int]:  # fmt: skip
    """Append each row's accepted drafts and the token behind them, up to EOS or the limit; returns drafts that stayed."""
    kept = []
    columns = (drafted.tolist(), accepted.tolist(), final.tolist(), limits.tolist())
    for r, drafts, n, last, limit in zip(rows, *columns, strict=True):
        block = [*drafts[:n], last][: max_tokens - r.emitted]
        stop = next((i for i, token in enumerate(block) if token in eos_ids), None)
        if stop is not None:
            block, r.ended = block[: stop + 1], True
        stayed = min(n, len(block))
        r.ids += block
        r.cycles += 1
        r.undrafted += drafts[0] < 0 if drafts else 1
        r.out_of_positions += limit == 0
        r.ends += len(block) > n
        r.accepted[:stayed] += 1
        kept.append(stayed)
    return kept


def _drop_finished(rows: list[_Row], max_tokens: int, cache: object, drafter: Drafter) -> list[_Row]:
    keep = [i for i, r in enumerate(rows) if not r.ended and r.emitted < max_tokens]
    if keep and len(keep) < len(rows):
        cache.select(torch.tensor(keep))
        drafter.select(torch.tensor(keep))
    return [rows[i] for i in keep]


def _log_cycle(
    rows: Sequence[_Row], logp: torch.Tensor, proposal: Proposal, accepted: torch.Tensor, kept: list[int], rule: Rule
) -> dict[str, np.ndarray]:
    """The drafted tokens of one cycle, flattened. alpha is the acceptance probability given the prefix, by the rule."""
    drafted = proposal.tokens
    k = drafted.shape[1]
    at = drafted.clamp(min=0)[..., None].to(logp.device)
    logp_d = logp[:, :k].gather(-1, at)[..., 0]
    if proposal.logq is None:
        logq_d = torch.zeros_like(logp_d)
        alpha = logp_d.exp()
    else:
        logq = proposal.logq.to(logp.device)
        logq_d = logq.gather(-1, at)[..., 0]
        p, q = logp[:, :k].exp(), logq.exp()
        alpha = (p * q).sum(-1) if rule.verify == "strict" else 1.0 - 0.5 * (p - q).abs().sum(-1)
    ratio = logp_d.exp() if rule.verify == "strict" else (logp_d - logq_d).clamp(max=0.0).exp()
    depth = torch.arange(k).expand(len(rows), k)
    columns = {
        "prompt": torch.tensor([r.index for r in rows])[:, None].expand(-1, k),
        "cycle": torch.tensor([r.cycles for r in rows])[:, None].expand(-1, k),
        "draft_position": depth + 1,
        "token": drafted,
        "logp": logp_d,
        "logq": logq_d,
        "ratio": ratio,
        "alpha": alpha,
        "accepted": depth < torch.tensor(kept)[:, None],
        "accepted_engine": depth < accepted[:, None],
    }
    proposed = drafted >= 0
    return {name: column.cpu()[proposed].numpy() for name, column in columns.items()}
