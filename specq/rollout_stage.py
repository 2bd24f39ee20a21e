"""The long stage of a rollout, piece by piece: `rows` prompts are decoded together and written as they finish.

A piece holds one row per prompt: its text, its counts, and its log as lists. Every prompt has noise of its own, so pieces
that are read back make the rollout that one go would have made.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specq import files, shards
from specq.measure import Work
from specq.memory import Fits
from specq.prompts import Prompt, Text
from specq.replay import Arm
from specq.rollout import COLUMNS, COUNTS, Rollout, roll_out
from specq.shards import Piece


def roll(work: Work, arm: Arm) -> Rollout:
    """Roll all prompts out under an arm. When memory runs out, fewer are decoded together, and a note says so."""
    config, models = work.config, work.models
    fits = Fits(config.rows, "prompts decoded together", work.reporter)

    def tokens(prompts: Sequence[Prompt]) -> int:
        return sum(len(p.tokens) - 1 for p in prompts) + len(prompts) * config.output_tokens

    with work.reporter.task(f"rolling out {arm.name}, K = {config.k}", tokens(work.prompts)) as done:

        def rolled(group: Sequence[Prompt]) -> Piece:
            made = fits.run(
                lambda batch: roll_out(
                    models.target, models.draft, group, arm, work.setting, k=config.k, max_tokens=config.output_tokens,
                    batch=batch, progress=done,
                )
            )  # fmt: skip
            return Piece([_table(made)], {"kv_bytes": made.kv_bytes, "seconds": made.seconds})

        paths = work.shards.complete(
            f"cycles-{arm.name}", work.prompts, config.rows, rolled, lambda group: done(tokens(group))
        )
    work.notes += fits.notes
    return _read(paths, work.prompts, arm, config.k)


def _table(made: Rollout) -> pa.Table:
    """One row per prompt of a rollout, the log of its cycles as lists."""
    ends = np.cumsum(np.bincount(made.log["prompt"], minlength=len(made.texts)))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    columns = {
        "response_token_ids": [list(t.response) for t in made.texts],
        "ended_by_eos": [t.ended for t in made.texts],
        "drafts_accepted": files.to_arrow(made.accepted),
        **{name: getattr(made, name) for name in COUNTS},
        **{f"log_{name}": pa.ListArray.from_arrays(offsets, pa.array(made.log[name])) for name in COLUMNS},
    }
    return pa.table(columns)


def _read(paths: Sequence[Path], prompts: Sequence[Prompt], arm: Arm, k: int) -> Rollout:
    """The rollout whose pieces lie at `paths`, in the order of the prompts."""
    table = pa.concat_tables(pq.read_table(p).replace_schema_metadata() for p in paths)
    logged = {name: table.column(f"log_{name}").combine_chunks() for name in COLUMNS}
    lengths = next(iter(logged.values())).value_lengths().to_numpy()
    log = {name: lists.flatten().to_numpy(zero_copy_only=False) for name, lists in logged.items()}
    responses, ended = (table.column(n).to_pylist() for n in ("response_token_ids", "ended_by_eos"))
    facts = [shards.facts(p) for p in paths]
    return Rollout(
        arm,
        k,
        texts=[Text(p, tuple(r), arm.name, e) for p, r, e in zip(prompts, responses, ended, strict=True)],
        log=log | {"prompt": np.repeat(np.arange(len(prompts), dtype=np.int32), lengths)},
        accepted=files.from_arrow(table.column("drafts_accepted")),
        kv_bytes=facts[-1]["kv_bytes"],
        seconds={name: sum(f["seconds"][name] for f in facts) for name in facts[0]["seconds"]},
        **{name: table.column(name).to_numpy() for name in COUNTS},
    )
