"""Teacher-forced scoring: one pass per model and KV format over a text gives every arm's p and q at every position.

All passes walk through a text together, chunk by chunk, and only the chunk's logits exist: never tokens x vocabulary of a
whole text. K and V of the prompt go through the format's cache as those of the response do. On a CPU texts are scored one
at a time, so a text's numbers do not depend on what else is in the study; on a GPU texts of similar length go together, as
many as `Room` says, and a text's numbers depend, in rounding, on which of the texts given here share its batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from specq.acceptance import PositionScores
from specq.clock import Clock
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.kv.cache import LayerScales, QuantizedCache
from specq.kv.calibration import KVRange
from specq.models.loaded import LoadedModel
from specq.models.vocabulary import Vocabulary
from specq.ngram import NgramLookup, proposals_along
from specq.prompts import Text
from specq.rules import Rule, Transform
from specq.sampling import stream
from specq.scoring import DEPTH_COLUMNS, Positions, score


@dataclass(frozen=True)
class Room:
    """How much is done at once: tokens of texts scored together (0: one text), tokens of a prefill pass of STANDARD order,
    numbers of logits held per pass, positions per row and chunk at most, and numbers of a float32 copy of logits."""

    tokens: int
    prefill: int
    logits: int
    positions: int
    copied: int

    @classmethod
    def on(cls, device: torch.device) -> "Room":
        """32 MiB of float32 logits on a CPU; on a GPU 1 GiB of bf16 ones, which fill its matrix units."""
        if device.type == "cpu":
            return cls(tokens=0, prefill=512, logits=1 << 23, positions=512, copied=1 << 23)
        return cls(tokens=1 << 15, prefill=1 << 12, logits=1 << 29, positions=1 << 12, copied=1 << 26)

    def narrowed(self, tokens: int) -> "Room":
        """For at most `tokens` tokens of texts together, and all else in proportion."""
        by = max(1, self.tokens // tokens)
        return Room(tokens, self.prefill // by, self.logits // by, self.positions // by, self.copied // by)

    def chunk(self, width: int, rows: int) -> int:
        """Positions per row scored at once for `rows` rows of logits of `width` ids: a power of two, at least 16."""
        fit = max(16, min(self.positions, self.logits // (width * rows)))
        return 1 << (fit.bit_length() - 1)


_TYPES = {"draft_top1": np.int64, "draft_token": np.int64, "top1_agrees": np.bool_}
COLUMNS = {f.name: _TYPES.get(f.name, np.float32) for f in fields(PositionScores)}


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


def batches(texts: Sequence[Text], tokens: int) -> list[list[int]]:
    """Indices of the texts that are scored together: none twice as long as another, at most `tokens`
    with their padding (0: each alone)."""
    if not tokens:
        return [[i] for i in range(len(texts))]
    groups: list[list[int]] = []
    shortest = 0
    for i in sorted(range(len(texts)), key=lambda i: len(texts[i].tokens)):
        length = len(texts[i].tokens)
        if not groups or length > 2 * shortest or (len(groups[-1]) + 1) * length > tokens:
            groups.append([])
            shortest = length
        groups[-1].append(i)
    return groups


def _score_chunk(
    model: LoadedModel, tokens: torch.Tensor, counts: torch.Tensor, cache: QuantizedCache, order: Order
) -> torch.Tensor:
    """Logits [B, q, width] of `tokens` [B, q], of which `counts` per row are no padding, in the order's pieces."""
    logits, at = [], 0
    for piece in tokens.tensor_split(order.pieces, dim=1):
        if width := piece.shape[1]:
            logits.append(model.forward(piece, cache, (counts - at).clamp(0, width)))
            at += width
    return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)


@torch.inference_mode()
def score_texts(
    target: LoadedModel,
    draft: LoadedModel | NgramLookup,
    texts: Sequence[Text],
    arms: Sequence[Arm],
    setting: Setting,
    progress: Callable[[float], None] = lambda done: None,
    room: Room | None = None,
) -> ReplayResult:
    """Score every text under every arm; the first arm is the baseline that `kl` and `top1_agrees` refer to.

    A draft that looks its proposals up takes no pass and adds DEPTH_COLUMNS. `progress` is called with tokens done, over all
    passes; `room` is by default what the target's device has. Raises SpecqError naming arm, prompt and position when logits
    are NaN, and naming the pass when a model asked to store NaN or infinite K or V.
    """
    lookup = isinstance(draft, NgramLookup)
    passes = list(dict.fromkeys(p for arm in arms for p in ((arm.target,) if lookup else (arm.target, arm.draft))))
    # Columns are allocated once: small results kept between large temporaries would pin the heap and let it grow.
    ends = np.cumsum([t.positions for t in texts])
    total = int(ends[-1]) if len(ends) else 0
    shapes = {n: ((total,), dtype) for n, dtype in COLUMNS.items()}
    if lookup:
        shapes |= {n: ((total, setting.depth), dtype) for n, dtype in DEPTH_COLUMNS.items()}
    made = ReplayResult(
        {arm.name: ArmScores({n: np.empty(*shape) for n, shape in shapes.items()}) for arm in arms},
        {p: [0] * (target if p.role == "target" else draft).geometry.layers for p in passes},
        dict.fromkeys(passes, 0.0),
        {},
    )
    room = room or Room.on(target.device)
    for group in batches(texts, room.tokens):
        places = [int(ends[i]) - texts[i].positions for i in group]
        _score_together(target, draft, [texts[i] for i in group], places, arms, passes, setting, room, made, progress)
    return made


def _score_together(
    target: LoadedModel, draft: LoadedModel | NgramLookup, texts: Sequence[Text], places: Sequence[int],
    arms: Sequence[Arm], passes: Sequence[Pass], setting: Setting, room: Room, made: ReplayResult,
    progress: Callable[[float], None],
) -> None:  # fmt: skip
    """Score some texts side by side, padded on the right, and write their columns into `made` at `places`."""
    models = {"target": target, "draft": draft}
    starts, positions = ([len(t.prompt.tokens) for t in texts], torch.tensor([t.positions for t in texts]))
    longest, rows, voc = int(positions.max()), len(texts), setting.vocabulary
    # row i: the token before its first scored position, then its scored tokens
    ids = torch.zeros(rows, longest + 1, dtype=torch.long)
    uniforms = torch.zeros(rows, longest, dtype=torch.float64)
    proposals = torch.full((rows, longest, setting.depth), -1) if isinstance(draft, NgramLookup) else None
    for i, (t, start) in enumerate(zip(texts, starts, strict=True)):
        ids[i, : t.positions + 1] = torch.tensor(t.tokens[start:])
        noise = stream(setting.seed, "draft", t.prompt.id)
        uniforms[i, : t.positions] = torch.rand(t.positions, generator=noise, dtype=torch.float64)
        if proposals is not None:
            found = proposals_along(draft, t.tokens, start + 1, setting.depth)
            proposals[i, : t.positions] = torch.from_numpy(found)
    clock, caches = Clock(made.seconds), {}
    for p in passes:
        model, scales = models[p.role], setting.scales.get((p.role, p.format.name))
        caches[p] = model.new_cache(
            p.format, rows, max(starts) + longest, scales, setting.round_query(p.format), p.order.splits
        )
        prompts = [t.tokens[: start + 1] for t, start in zip(texts, starts, strict=True)]
        model.prefill(prompts, caches[p], max(1, room.prefill // (STANDARD.prefill * rows)) * p.order.prefill, progress)
        clock.lap(p, model.devices)
    chunk = room.chunk(max(voc.target_logits, voc.draft_logits), rows)
    for at in range(0, longest, chunk):
        end = min(at + chunk, longest)
        counts = (positions - at).clamp(0, end - at)
        logits: dict[Pass, torch.Tensor] = {}
        for p in passes:
            logits[p] = _score_chunk(models[p.role], ids[:, at:end], counts, caches[p], p.order).flatten(0, 1)
            clock.lap(p, models[p.role].devices)
            progress(float(counts.sum()))
        here = Positions(
            ids[:, at + 1 : end + 1].flatten(),
            uniforms[:, at:end].flatten(),
            None if proposals is None else proposals[:, at:end].flatten(0, 1),
        )
        scored, bad = score(logits, arms, here, setting, room.copied)
        del logits
        real = (torch.arange(end - at) < counts[:, None]).flatten()
        for p, verdicts in bad.items():
            if bool((wrong := verdicts.cpu() & real).any()):
                row, column = divmod(int(wrong.nonzero()[0]), end - at)
                raise SpecqError(
                    f"the {p.role} with a {p.format.name} KV cache gave NaN logits for prompt {texts[row].prompt.id} at"
                    f" response position {at + column + 1}"
                )
        for name, columns in scored.items():
            for column, whole in made.arms[name].columns.items():
                values = columns[column].cpu().unflatten(0, (rows, -1)).numpy()
                for i, (place, count) in enumerate(zip(places, counts.tolist(), strict=True)):
                    whole[place + at : place + at + count] = values[i, :count]
        clock.skip(target.devices)
    for p, cache in caches.items():
        if cache.nonfinite():
            raise SpecqError(f"the {p.role} produced NaN or infinite K or V for {_named(texts)}")
        if p in (arms[0].target, arms[0].draft):
            made.ranges[p.role] = KVRange.of(cache).join(made.ranges.get(p.role))
        made.saturated[p] = [a + b for a, b in zip(made.saturated[p], cache.saturated_per_layer(), strict=True)]


def _named(texts: Sequence[Text]) -> str:
    names = [t.prompt.id for t in texts]
    return f"prompt {names[0]}" if len(names) == 1 else f"one of the prompts {', '.join(names)}"
