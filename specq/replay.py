"""Teacher-forced scoring: one pass per model and KV format over a text gives every arm's p and q at every position.

Texts are scored one at a time and in fixed chunks, so a text's numbers do not depend on what else is in the study. All
passes walk through a text together, chunk by chunk, and only the chunk's logits exist: never tokens x vocabulary of a
whole text. K and V of the prompt go through the format's cache as those of the response do.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from specq.acceptance import PositionScores, score_positions, score_proposals
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.cache import LayerScales, QuantizedCache
from specq.kv.calibration import KVRange
from specq.models import LoadedModel, Vocabulary
from specq.ngram import NgramLookup, proposals_along
from specq.prompts import Text
from specq.rules import Rule, Transform
from specq.sampling import fit_width, log_probs, stream

# Logits held per pass: at most this many numbers (32 MiB of float32).
LOGITS_BUDGET = 1 << 23
_TYPES = {"draft_top1": np.int64, "draft_token": np.int64, "top1_agrees": np.bool_}
COLUMNS = {f.name: _TYPES.get(f.name, np.float32) for f in fields(PositionScores)}
# Beside them where proposals depend on the cycle's start: a and b after 0, 1, .. accepted drafts, each [positions, depth].
DEPTH_COLUMNS = {"alpha_by_depth": np.float32, "b_by_depth": np.bool_}


@dataclass(frozen=True)
class Order:
    """An order of arithmetic: tokens per prefill pass, pieces of a scoring chunk, pieces of the K/V sequence, and rows
    sampled together. Texts are scored one at a time; there the pieces change the rows of every matrix product."""

    prefill: int = 512
    pieces: int = 1
    splits: int = 1
    batch: int = 32


# The baseline's order, and the equally valid one of the null arm: other chunk boundaries, split-and-merged attention, and
# other neighbours in the batch.
STANDARD, ALTERNATIVE = Order(), Order(prefill=192, pieces=3, splits=3, batch=5)


@dataclass(frozen=True)
class Pass:
    """One model over one text in one KV format: what one forward sweep costs."""

    role: str
    format: KVFormat
    order: Order = STANDARD


@dataclass(frozen=True)
class Arm:
    """A configuration under test: KV formats of target and draft."""

    name: str
    target: Pass
    draft: Pass

    @classmethod
    def of(cls, target: KVFormat, draft: KVFormat, order: Order = STANDARD, name: str | None = None) -> "Arm":
        """The arm `<target format>+<draft format>`."""
        name = name or f"{target.name}+{draft.name}"
        return cls(name, Pass("target", target, order), Pass("draft", draft, order))


@dataclass(frozen=True)
class Setting:
    """How p and q are formed, common to all arms.

    `scales` maps (role, format name) to static scales that replace the checkpoint's; `round_query` maps a format to
    whether queries are rounded to e4m3 under it; `depth` is the largest K, for drafts that look their proposals up.
    """

    transform: Transform
    draft_transform: Transform
    rule: Rule
    vocabulary: Vocabulary
    seed: int
    scales: dict[tuple[str, str], list[LayerScales]] = field(default_factory=dict)
    round_query: Callable[[KVFormat], bool] = lambda fmt: False
    depth: int = 16


@dataclass
class ArmScores:
    """Columns of one arm over all texts, each [sum of positions] (or that by depth), in the order of the texts."""

    columns: Mapping[str, np.ndarray]


@dataclass
class ReplayResult:
    """Scores per arm, saturated elements per pass and layer, seconds per pass, and the range of K and V by role in the first
    arm's passes."""

    arms: dict[str, ArmScores]
    saturated: dict[Pass, list[int]]
    seconds: dict[Pass, float]
    ranges: dict[str, KVRange]


def chunk_positions(width: int) -> int:
    """Positions scored at once for logits of `width` ids: a power of two from 16 to 512 within LOGITS_BUDGET."""
    fit = max(16, min(512, LOGITS_BUDGET // width))
    return 1 << (fit.bit_length() - 1)


def _feed(model: LoadedModel, tokens: torch.Tensor, cache: QuantizedCache, order: Order) -> None:
    for piece in tokens.split(order.prefill, dim=1):
        model.forward(piece, cache, keep=1)


def _score_chunk(model: LoadedModel, tokens: torch.Tensor, cache: QuantizedCache, order: Order) -> torch.Tensor:
    pieces = [p for p in tokens.tensor_split(order.pieces, dim=1) if p.shape[1]]
    logits = [model.forward(p, cache) for p in pieces]
    return logits[0][0] if len(logits) == 1 else torch.cat(logits, dim=1)[0]


@torch.inference_mode()
def score_texts(
    target: LoadedModel,
    draft: LoadedModel | NgramLookup,
    texts: Sequence[Text],
    arms: Sequence[Arm],
    setting: Setting,
    progress: Callable[[float], None] = lambda done: None,
) -> ReplayResult:
    """Score every text under every arm; the first arm is the baseline that `kl` and `top1_agrees` refer to.

    A draft that looks its proposals up takes no pass and adds DEPTH_COLUMNS. `progress` is called with tokens done, over all
    passes. Raises SpecqError naming arm, prompt and position when logits are NaN, and naming the pass when a model asked to
    store NaN or infinite K or V.
    """
    lookup = isinstance(draft, NgramLookup)
    passes = list(dict.fromkeys(p for arm in arms for p in ((arm.target,) if lookup else (arm.target, arm.draft))))
    models = {"target": target, "draft": draft}
    # Columns are allocated once: small results kept between large temporaries would pin the heap and let it grow.
    total = sum(t.positions for t in texts)
    shapes = {n: ((total,), dtype) for n, dtype in COLUMNS.items()}
    if lookup:
        shapes |= {n: ((total, setting.depth), dtype) for n, dtype in DEPTH_COLUMNS.items()}
    columns = {arm.name: {n: np.empty(*shape) for n, shape in shapes.items()} for arm in arms}
    row = 0
    saturated = {p: [0] * models[p.role].geometry.layers for p in passes}
    seconds, ranges = dict.fromkeys(passes, 0.0), {}
    size = setting.vocabulary.size
    chunk = chunk_positions(max(setting.vocabulary.target_logits, setting.vocabulary.draft_logits))

    for text in texts:
        ids = torch.tensor([text.tokens])
        start, positions = len(text.prompt.tokens), text.positions
        if lookup:
            proposals = torch.from_numpy(proposals_along(draft, text.tokens, start + 1, setting.depth))
        uniforms = torch.rand(positions, generator=stream(setting.seed, "draft", text.prompt.id), dtype=torch.float64)
        caches: dict[Pass, QuantizedCache] = {}
        for p in passes:
            began = time.perf_counter()
            model, scales = models[p.role], setting.scales.get((p.role, p.format.name))
            rounded = setting.round_query(p.format)
            caches[p] = model.new_cache(p.format, 1, ids.shape[1] - 1, scales, rounded, p.order.splits)
            _feed(model, ids[:, :start], caches[p], p.order)
            seconds[p] += time.perf_counter() - began
            progress(start)
        for at in range(0, positions, chunk):
            end = min(at + chunk, positions)
            logp: dict[Pass, torch.Tensor] = {}
            for p in passes:
                began = time.perf_counter()
                logits = _score_chunk(models[p.role], ids[:, start + at : start + end], caches[p], p.order)
                transform = setting.transform if p.role == "target" else setting.draft_transform
                logp[p] = log_probs(fit_width(logits, size), transform)
                _refuse_nan(logp[p], p, text, at)
                seconds[p] += time.perf_counter() - began
                progress(end - at)
            tokens = ids[0, start + at + 1 : start + end + 1].to(target.device)
            for arm in arms:
                base = logp[arms[0].target]
                if lookup:
                    mine = proposals[at:end].to(target.device)
                    scores, *by_depth = score_proposals(logp[arm.target], mine, tokens, base)
                    scored = vars(scores) | dict(zip(DEPTH_COLUMNS, by_depth, strict=True))
                else:
                    logq, noise = logp[arm.draft].to(target.device), uniforms[at:end].to(target.device)
                    scored = vars(score_positions(logp[arm.target], logq, tokens, base, noise, setting.rule))
                for name, column in columns[arm.name].items():
                    column[row : row + end - at] = scored[name].cpu().numpy()
            row += end - at
        for p, cache in caches.items():
            if cache.nonfinite():
                raise SpecqError(f"the {p.role} produced NaN or infinite K or V for prompt {text.prompt.id}")
            if p in (arms[0].target, arms[0].draft):
                ranges[p.role] = KVRange.of(cache).join(ranges.get(p.role))
            saturated[p] = [a + b for a, b in zip(saturated[p], cache.saturated_per_layer(), strict=True)]
    return ReplayResult({name: ArmScores(c) for name, c in columns.items()}, saturated, seconds, ranges)


def _refuse_nan(logp: torch.Tensor, p: Pass, text: Text, at: int) -> None:
    bad = logp.isnan().any(-1)
    if bool(bad.any()):
        where = at + int(bad.nonzero()[0]) + 1
        raise SpecqError(
            f"the {p.role} with a {p.format.name} KV cache gave NaN logits for prompt {text.prompt.id} at response"
            f" position {where}"
        )
