"""Real speculative decoding: draft, verify over the target's own quantized cache, correct or add a bonus token, again.

A cycle drafts K tokens, feeds the last committed token and the drafts to the target in one pass of K + 1 positions, accepts
a prefix of them, adds one token of the target's own, and rolls both caches back to the committed tokens but the last, which
opens the next cycle. Rows of a batch advance by different amounts; a finished row leaves the batch.

Every prompt has a noise stream of its own, so what it emits does not depend on the batch it is in. A cycle always drafts K
tokens unless the positions of a model end or n-gram lookup finds nothing: what an accepted block emits beyond EOS or the
length limit is cut from the text and counted apart (`accepted_engine`), as a server's counters would have it.

    specq rollout --pair tiny --dtype fp8 --k 4
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specq.acceptance import Rule, verify_cycle
from specq.clock import Clock
from specq.drafts import Drafter, ModelDrafter, NanDraft, NgramDrafter, Proposal
from specq.errors import SpecqError
from specq.models.loaded import LoadedModel
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
COUNTS = ("cycles", "undrafted", "out_of_positions", "ends")  # of every text


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
) -> Rollout:
    """Decode up to `max_tokens` new tokens for every prompt with K = `k` drafts per cycle; EOS ends a text.

    `draft` may be `target` itself: the arm's draft format then makes it self-speculation. `progress` takes tokens done.
    Raises SpecqError naming arm, prompt, cycle and position when logits are NaN.
    """
    made = Rollout(arm, k)
    rows: list[_Row] = []
    log: list[dict[str, np.ndarray]] = []
    for start in range(0, len(prompts), batch):
        group = [
            _Row(
                start + i,
                p,
                list(p.tokens),
                stream(setting.seed, "rollout", arm.name, setting.rule.name, k, p.id),
                np.zeros(k, int),
            )
            for i, p in enumerate(prompts[start : start + batch])
        ]
        running = _Batch(target, draft, group, made, setting, max_tokens, progress)
        while running.rows:
            log.append(running.cycle())
        running.close()
        rows += group
    made.texts = [Text(r.prompt, tuple(r.ids[len(r.prompt.tokens) :]), arm.name, r.ended) for r in rows]
    for name in COUNTS:
        setattr(made, name, np.array([getattr(r, name) for r in rows]))
    made.accepted = np.stack([r.accepted for r in rows])
    types = COLUMNS | {"prompt": np.int32}
    made.log = {n: np.concatenate([e[n] for e in log] or [[]]).astype(dtype) for n, dtype in types.items()}
    order = np.lexsort((made.log["draft_position"], made.log["cycle"], made.log["prompt"]))
    made.log = {n: column[order] for n, column in made.log.items()}
    return made


class _Batch:
    """Prompts decoded together: `rows` are those still running, with the target's cache and the drafter beside them."""

    def __init__(
        self, target: LoadedModel, draft: LoadedModel | NgramLookup, rows: list[_Row], made: Rollout, setting: Setting,
        max_tokens: int, progress: Callable[[float], None],
    ) -> None:  # fmt: skip
        """Prefill both caches and sample the first new token, which belongs to no cycle."""
        self.target, self.rows, self.made, self.setting = target, rows, made, setting
        self.max_tokens, self.progress = max_tokens, progress
        devices = target.devices + ([] if isinstance(draft, NgramLookup) else draft.devices)
        self.clock, self.devices = Clock(made.seconds), list(dict.fromkeys(devices))
        self.capacity = max(len(r.ids) for r in rows) + max_tokens + made.k
        fmt, ids = made.arm.target.format, [r.ids for r in rows]
        scales = setting.scales.get(("target", fmt.name))
        self.cache = target.new_cache(fmt, len(rows), self.capacity, scales, setting.round_query(fmt))
        target.prefill(ids, self.cache, progress=progress)
        self.drafter: Drafter
        if isinstance(draft, NgramLookup):
            self.drafter, self.draft_positions = NgramDrafter(draft, ids), 1 << 30
        else:
            self.drafter = ModelDrafter(draft, made.arm.draft, setting, ids, self.capacity)
            self.draft_positions = draft.geometry.max_positions
        logp = self._verify_pass(torch.tensor([r.ids[-1:] for r in rows]), torch.ones(len(rows), dtype=torch.long))
        uniforms = torch.stack([torch.rand(1, generator=r.noise, dtype=torch.float64) for r in rows])
        first = inverse_cdf(logp[:, 0].exp(), uniforms[:, 0].to(logp.device)).tolist()
        for r, token in zip(rows, first, strict=True):
            r.ids.append(token)
            r.ended = token in target.eos_ids
        self.clock.lap("prefill", self.devices)
        progress(len(rows))
        self._drop_finished()

    def cycle(self) -> dict[str, np.ndarray]:
        """Draft, verify, commit and roll back once; returns the log of the drafted tokens."""
        rows, k = self.rows, self.made.k
        # The last committed token stands at index n - 1: the target's last draft at n - 1 + count, the draft model's last
        # input at n - 2 + count. Neither may leave the model's positions.
        lengths = torch.tensor([len(r.ids) for r in rows])
        room = torch.minimum(self.target.geometry.max_positions - lengths, self.draft_positions + 1 - lengths)
        limits = room.clamp(0, k)
        noise = torch.stack([torch.rand(3 * k + 1, generator=r.noise, dtype=torch.float64) for r in rows])
        drawn, coins, picks = noise.split([k, k, k + 1], dim=1)
        try:
            proposal = self.drafter.propose([r.ids for r in rows], limits, drawn)
        except NanDraft as nan:
            raise _nan_error("draft", self.made, rows[nan.row], nan.depth) from nan
        self.clock.lap("draft", self.devices)
        counts = 1 + (proposal.tokens >= 0).sum(1)
        block = torch.cat([torch.tensor([r.ids[-1:] for r in rows]), proposal.tokens.clamp(min=0)], dim=1)
        logp = self._verify_pass(block[:, : int(counts.max())], counts)
        logp = torch.nn.functional.pad(logp, (0, 0, 0, k + 1 - logp.shape[1]))  # where no row proposed anything
        accepted, final = verify_cycle(
            logp.exp(),
            None if proposal.logq is None else proposal.logq.to(logp.device).exp(),
            proposal.tokens.to(logp.device),
            self.setting.rule,
            coins.to(logp.device),
            picks.to(logp.device),
        )
        accepted, final = accepted.cpu(), final.cpu()
        kept = _commit(rows, proposal.tokens, accepted, final, limits, self.target.eos_ids, self.max_tokens)
        log = _log_cycle(rows, logp, proposal, accepted, kept, self.setting.rule)
        committed = torch.tensor([len(r.ids) for r in rows])
        self.cache.rollback(torch.minimum(self.cache.lengths, committed - 1))
        self.drafter.settle(committed)
        self.clock.lap("verify", self.devices)
        self.progress(float((committed - lengths).sum()))
        self._drop_finished()
        return log

    def close(self) -> None:
        """Measure the caches; stop if NaN or infinite values went into one: not every format can show them."""
        self.made.kv_bytes = {"target": self.cache.bytes_per_token, "draft": self.drafter.bytes_per_token}
        for role, count in (("target", self.cache.nonfinite()), ("draft", self.drafter.nonfinite())):
            if count:
                raise SpecqError(f"arm {self.made.arm.name}: the {role} produced NaN or infinite K or V")

    def _verify_pass(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """log p [B, q, V] of one target pass; NaN at a position that counts stops the rollout."""
        logits = self.target.forward(tokens, self.cache, counts)
        logp = log_probs(fit_width(logits, self.setting.vocabulary.size), self.setting.transform)
        bad = logp.isnan().any(-1).cpu() & (torch.arange(tokens.shape[1]) < counts[:, None])
        if bool(bad.any()):
            row, at = bad.nonzero()[0].tolist()
            raise _nan_error("target", self.made, self.rows[row], at)
        return logp

    def _drop_finished(self) -> None:
        keep = [i for i, r in enumerate(self.rows) if not r.ended and r.emitted < self.max_tokens]
        if keep and len(keep) < len(self.rows):
            self.cache.select(torch.tensor(keep))
            self.drafter.select(torch.tensor(keep))
        self.rows = [self.rows[i] for i in keep]


def _nan_error(role: str, made: Rollout, row: _Row, at: int) -> SpecqError:
    cycle = row.cycles + 1 if row.emitted else 0  # as the log counts; prefill is before the first
    return SpecqError(
        f"arm {made.arm.name}: the {role} gave NaN logits for prompt {row.prompt.id} in cycle {cycle} at draft position"
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
