"""The two long stages of a study, sampling and scoring, piece by piece: what a piece holds depends on its prompts alone.

Texts are sampled BLOCK prompts at a time and scored SIZE texts per piece; both come back from the pieces on disk, so a
study that was interrupted reads the same as one that was not. When memory runs out, fewer prompts are sampled together,
or fewer arms scored together; the latter changes no number, the former at most a tie in the last bit of the noise. On a GPU
fewer texts are scored side by side where one arm beside the baseline is still too much, which changes numbers in rounding.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch
import transformers

from specq import __version__, files, shards
from specq.analysis import NULL
from specq.config import RunConfig, identity
from specq.inputs import Models
from specq.kv.calibration import KVRange
from specq.memory import Fits
from specq.models.fingerprint import fingerprint
from specq.models.geometry import Geometry
from specq.models.loaded import LoadedModel
from specq.progress import Reporter
from specq.prompts import Prompt, Text
from specq.replay import Arm, ArmScores, Pass, ReplayResult, Room, Setting, score_texts
from specq.shards import BLOCK, SIZE, Columns, Piece, Run, Shards
from specq.texts import sample_texts

LEAST = 1 << 10  # tokens of texts scored side by side, below which fewer would save little


@dataclass
class Work:
    """What every stage needs; `notes` collects what a reader should know about how it went."""

    config: RunConfig
    models: Models
    setting: Setting
    prompts: list[Prompt]
    shards: Shards
    reporter: Reporter
    notes: list[str] = field(default_factory=list)

    @property
    def mine(self) -> list[Prompt]:
        """The prompts of this run's part of the study."""
        return [p for i, p in enumerate(self.prompts) if self.shards.takes(i)]


def _content(model: LoadedModel, digest: str | None) -> str:
    """What a model's weights are told by; a registered shape with random weights is told by its name."""
    return digest or (fingerprint(model.checkpoint) if model.checkpoint else "random")


def run_of(
    config: RunConfig,
    models: Models,
    directories: Mapping[str, str] | None = None,
    part: tuple[int, int] = (1, 1),
    kind: str = "study",
) -> Run:
    """What the pieces of a study or rollout are marked with."""
    weights = {role: _content(model, getattr(config, f"{role}_sha256")) for role, model in models.by_role.items()}
    versions = {"specq": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions["processes"] = str(models.target.processes)  # they add up in another order
    identified = identity(config) | {"weights": weights}
    return Run(identified, config.model_dump(mode="json"), directories or {}, versions, part, kind)


def sample(work: Work, arm: Arm) -> list[Text]:
    """Texts of an arm's target over its own cache, in the arm's order of arithmetic and the order of the prompts."""
    config, models, setting = work.config, work.models, work.setting
    fmt, order = arm.target.format, arm.target.order
    fits = Fits(min(BLOCK, order.batch), "prompts sampled together", work.reporter)
    stage, what = (NULL, "null arm") if arm.name == NULL else (fmt.name, f"{fmt.name} cache")

    def tokens(prompts: Sequence[Prompt]) -> int:
        return sum(len(p.tokens) - 1 for p in prompts) + len(prompts) * config.output_tokens

    with work.reporter.task(f"sampling text, {what}", tokens(work.mine)) as done:

        def sampled(group: Sequence[Prompt]) -> Piece:
            texts = fits.run(
                lambda batch: sample_texts(
                    models.target,
                    group,
                    fmt,
                    transform=setting.transform,
                    vocabulary=models.vocabulary.size,
                    max_tokens=config.output_tokens,
                    seed=config.seed,
                    arm=arm.name,
                    scales=setting.scales.get(("target", fmt.name)),
                    round_query=setting.round_query(fmt),
                    batch=batch,
                    chunk=order.prefill,
                    splits=order.splits,
                    progress=done,
                )
            )
            rows = {
                "prompt": [t.prompt.id for t in texts],
                "response_token_ids": [list(t.response) for t in texts],
                "ended_by_eos": [t.ended for t in texts],
            }
            return Piece([pa.table(rows)])

        paths = work.shards.complete(f"texts-{stage}", work.prompts, BLOCK, sampled, lambda group: done(tokens(group)))
    work.notes += fits.notes
    by_id = {p.id: p for p in work.prompts}
    texts = []
    for rows in map(shards.read, paths):
        columns = (rows[n] for n in ("prompt", "response_token_ids", "ended_by_eos"))
        texts += [Text(by_id[p], tuple(ids), arm.name, ended) for p, ids, ended in zip(*columns, strict=True)]
    return texts


def score(work: Work, stage: str, texts: list[Text], arms: Sequence[Arm], what: str) -> ReplayResult:
    """Replay `texts` (of this run's part) under `arms`; the first arm is the one that sampled them.

    The columns of the result lie on disk, in the pieces, and are read when they are asked for.
    """
    models, by_prompt = work.models, {t.prompt.id: t for t in texts}
    arms = list({a.name: a for a in arms}.values())
    passes = _passes(arms, models)
    fits = Fits(max(1, len(arms) - 1), "arms scored together with the baseline", work.reporter)
    room = Room.on(models.target.device)
    side = Fits(room.tokens, "tokens of texts scored side by side", work.reporter, LEAST)
    tokens = {t.prompt.id: len(passes) * (len(t.prompt.tokens) + t.positions) for t in texts}
    with work.reporter.task(f"scoring {what}", sum(tokens.values())) as done:

        def scored(group: Sequence[Prompt]) -> Piece:
            mine = [by_prompt[p.id] for p in group]

            def within(room: Room) -> ReplayResult:
                return fits.run(lambda count: together(count, room))

            def together(count: int, room: Room) -> ReplayResult:
                others = [arms[i : i + count] for i in range(1, len(arms), count)] or [[]]
                parts = [
                    score_texts(models.target, models.draft, mine, [arms[0], *some], work.setting, done, room)
                    for some in others
                ]
                return _joined(parts)

            replay = side.run(lambda size: within(room.narrowed(size))) if room.tokens else within(room)
            facts = {
                "saturated": [replay.saturated[p] for p in passes],
                "seconds": [replay.seconds[p] for p in passes],
                "ranges": {role: _packed(found) for role, found in replay.ranges.items()},
            }
            return Piece([_table(replay.arms[a.name].columns) for a in arms], facts)

        paths = work.shards.complete(
            f"scores-{stage}", work.prompts, SIZE, scored, lambda group: done(sum(tokens[p.id] for p in group))
        )
    work.notes += fits.notes + side.notes
    saturated = {p: [0] * models.by_role[p.role].geometry.layers for p in passes}
    seconds, ranges = dict.fromkeys(passes, 0.0), {}
    for found in map(shards.facts, paths):
        for i, p in enumerate(passes):
            saturated[p] = [a + b for a, b in zip(saturated[p], found["saturated"][i], strict=True)]
            seconds[p] += found["seconds"][i]
        for role, packed in found["ranges"].items():
            ranges[role] = _unpacked(packed, models.by_role[role].geometry).join(ranges.get(role))
    columns = {arm.name: ArmScores(Columns(paths, i)) for i, arm in enumerate(arms)}
    return ReplayResult(columns, saturated, seconds, ranges)


def _passes(arms: Sequence[Arm], models: Models) -> list[Pass]:
    """What every arm takes, each once; a lookup takes none."""
    return list(
        dict.fromkeys(p for a in arms for p in ((a.target, a.draft) if models.has_draft_model else (a.target,)))
    )


def _table(columns: Mapping[str, np.ndarray]) -> pa.Table:
    return pa.table({name: files.to_arrow(values) for name, values in columns.items()})


def _packed(found: KVRange) -> dict[str, list[str]]:
    """A range as JSON: the float32 of every layer in base64, exact and short."""
    return {part: [base64.b64encode(x.cpu().numpy().tobytes()).decode() for x in getattr(found, part)] for part in "kv"}


def _unpacked(packed: dict[str, list[str]], geometry: Geometry) -> KVRange:
    shape = 1, geometry.kv_heads, 1, -1  # head_dim may differ from layer to layer
    arrays = {p: [np.frombuffer(base64.b64decode(x), np.float32).copy() for x in packed[p]] for p in "kv"}
    return KVRange(*([torch.from_numpy(x).view(shape) for x in arrays[p]] for p in "kv"))


def _joined(parts: Sequence[ReplayResult]) -> ReplayResult:
    """One result of arms that were scored in several goes; passes that ran in each (the baseline's) count once."""
    whole = ReplayResult({}, {}, {}, {})
    for part in parts:
        whole.arms |= part.arms
        whole.saturated |= part.saturated
        whole.seconds |= part.seconds
        whole.ranges |= part.ranges  # the baseline's, which are the same in each
    return whole
