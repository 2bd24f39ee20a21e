"""The two long stages of a study, sampling and scoring, piece by piece: what a piece holds depends on its prompts alone.

Texts are sampled BLOCK prompts at a time and scored SIZE texts per piece; both come back from the pieces on disk, so a
study that was interrupted reads the same as one that was not. When memory runs out, fewer prompts are sampled together,
or fewer arms scored together; the latter changes no number, the former at most a tie in the last bit of the noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from specq import shards
from specq.config import StudyConfig
from specq.inputs import Models
from specq.kv import KVFormat
from specq.memory import Fits
from specq.progress import Reporter
from specq.prompts import Prompt, Text
from specq.replay import Arm, ArmScores, Pass, ReplayResult, Setting, score_texts
from specq.shards import BLOCK, SIZE, Columns, Piece, Shards
from specq.texts import sample_texts


@dataclass
class Work:
    """What every stage needs; `notes` collects what a reader should know about how it went."""

    config: StudyConfig
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


def sample(work: Work, fmt: KVFormat) -> list[Text]:
    """Texts that the target samples over its own cache in `fmt`, in the order of the prompts."""
    config, models, setting = work.config, work.models, work.setting
    fits = Fits(BLOCK, "prompts sampled together", work.reporter)
    arm = f"{fmt.name}+bf16"

    def tokens(prompts: Sequence[Prompt]) -> int:
        return sum(len(p.tokens) - 1 for p in prompts) + len(prompts) * config.output_tokens

    with work.reporter.task(f"sampling text, {fmt.name} cache", tokens(work.mine)) as done:

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
                    arm=arm,
                    scales=setting.scales.get(("target", fmt.name)),
                    round_query=setting.round_query(fmt),
                    batch=batch,
                    progress=done,
                )
            )
            rows = {
                "prompt": [t.prompt.id for t in texts],
                "response_token_ids": [list(t.response) for t in texts],
                "ended_by_eos": [t.ended for t in texts],
            }
            return Piece([pa.table(rows)])

        paths = work.shards.complete(
            f"texts-{fmt.name}", work.prompts, BLOCK, sampled, lambda group: done(tokens(group))
        )
    work.notes += fits.notes
    by_id = {p.id: p for p in work.prompts}
    texts = []
    for rows in map(shards.read, paths):
        columns = (rows[n] for n in ("prompt", "response_token_ids", "ended_by_eos"))
        texts += [Text(by_id[p], tuple(ids), arm, ended) for p, ids, ended in zip(*columns, strict=True)]
    return texts


def score(work: Work, stage: str, texts: list[Text], arms: Sequence[Arm], what: str) -> ReplayResult:
    """Replay `texts` (of this run's part) under `arms`; the first arm is the one that sampled them.

    The columns of the result lie on disk, in the pieces, and are read when they are asked for.
    """
    models, by_prompt = work.models, {t.prompt.id: t for t in texts}
    passes = _passes(arms)
    fits = Fits(max(1, len(arms) - 1), "arms scored together with the baseline", work.reporter)
    tokens = {t.prompt.id: len(passes) * (len(t.prompt.tokens) + t.positions) for t in texts}
    with work.reporter.task(f"scoring {what}", sum(tokens.values())) as done:

        def scored(group: Sequence[Prompt]) -> Piece:
            mine = [by_prompt[p.id] for p in group]

            def together(count: int) -> ReplayResult:
                others = [arms[i : i + count] for i in range(1, len(arms), count)] or [[]]
                parts = [
                    score_texts(models.target, models.draft, mine, [arms[0], *some], work.setting, done)
                    for some in others
                ]
                return _joined(parts)

            replay = fits.run(together)
            facts = {
                "saturated": [replay.saturated[p] for p in passes],
                "seconds": [replay.seconds[p] for p in passes],
            }
            return Piece([pa.table(dict(replay.arms[a.name].columns)) for a in arms], facts)

        paths = work.shards.complete(
            f"scores-{stage}", work.prompts, SIZE, scored, lambda group: done(sum(tokens[p.id] for p in group))
        )
    work.notes += fits.notes
    found = [shards.facts(p) for p in paths]
    return ReplayResult(
        {arm.name: ArmScores(Columns(paths, i)) for i, arm in enumerate(arms)},
        {
            p: [sum(layer) for layer in zip(*(f["saturated"][i] for f in found), strict=True)]
            for i, p in enumerate(passes)
        },
        {p: sum(f["seconds"][i] for f in found) for i, p in enumerate(passes)},
    )


def _passes(arms: Sequence[Arm]) -> list[Pass]:
    return list(dict.fromkeys(p for arm in arms for p in (arm.target, arm.draft)))


def _joined(parts: Sequence[ReplayResult]) -> ReplayResult:
    """One result of arms that were scored in several goes; passes that ran in each (the baseline's) count once."""
    whole = ReplayResult({}, {}, {})
    for part in parts:
        whole.arms |= part.arms
        whole.saturated |= part.saturated
        whole.seconds |= part.seconds
    return whole
