"""A finished study read back: its analyses and facts from its files, without models and without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from specq import files
from specq.analysis import NULL, Analysis, Columns, analyse
from specq.conclude import Material
from specq.config import DRAWS, StudyConfig, cost_digest, validated
from specq.cost import CostModel
from specq.cost.spec import build, from_study, parse_cost
from specq.decision import StudyFacts
from specq.errors import SpecqError
from specq.prompts import Prompt, Text
from specq.rules import Rule, Transform
from specq.shape import ModelShape

# what the estimator and the tables need of positions.parquet
COLUMNS = ("logp", "logq", "alpha", "alpha_greedy", "alpha_strict", "draft_top1")


@dataclass
class Finished:
    """A study from its directory: `study` is study.json, `config` what it was asked."""

    folder: Path
    study: dict
    config: StudyConfig
    material: Material
    shapes: tuple[ModelShape, ModelShape]  # target's, draft's

    def facts(self, config: StudyConfig) -> StudyFacts:
        """The study's facts, decided under another configuration (cost, batch, context, current K, objective)."""
        study, pair, spec = self.study, self.study["pair"], parse_cost(config.cost)
        target, draft = self.shapes
        return StudyFacts(
            config=config,
            pair=pair["name"],
            target=pair["target"]["source"],
            draft=pair["draft"]["source"],
            target_shape=target,
            draft_shape=draft,
            transform=Transform(**study["sampling"]),
            target_vocab=pair["vocabulary"]["target_logits"],
            draft_vocab=pair["vocabulary"]["draft_logits"],
            scale_sources=study["scales"],
            warnings={None: list(study["warnings"])} | {n: list(w) for n, w in study["warnings_by_format"].items()},
            native_fp8=spec.gpu.fp8 if spec.gpu else study["native_fp8"],
            server=spec.server,
        )

    def cost(self, config: StudyConfig) -> CostModel:
        """The cost model that `config` names; `measured` is the table that the study measured."""
        spec = parse_cost(config.cost)
        if spec.kind != "measured":
            return build(spec, *self.shapes)
        if self.study["cost"]["source"] != "measured":
            raise SpecqError(
                f"{self.folder} measured no step times (its cost is {self.study['cost']['source']}); give --cost"
                " roofline:GPU or a timings file"
            )
        return from_study(self.study["cost"])


def load(folder: Path) -> Finished:
    """Read a study back. Raises SpecqError when `folder` holds none, a damaged one, or one of an older specq."""
    if not (folder / "study.json").is_file():
        raise SpecqError(f"{folder} holds no study (no study.json)")
    study = files.read_json(folder / "study.json")
    try:
        config = StudyConfig(**study["configuration"])
        target, draft = (ModelShape.from_dict(study["pair"][side]["shape"]) for side in ("target", "draft"))
        return Finished(folder, study, config, _material(folder, study, config), (target, draft))
    except (KeyError, ValidationError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise SpecqError(f"{folder} was written by another version of specq ({why}): run the study again") from error


def _material(folder: Path, study: dict, config: StudyConfig) -> Material:
    sets = _texts(files.read_parquet(folder / "texts.parquet"), study["prompts"]["kept"])
    rows = files.read_parquet(folder / "positions.parquet", [*COLUMNS, "arm", "text"])
    shapes = [_columns(rows, study["text"], None)]
    if config.text in ("own", "both"):
        shapes += [_columns(rows, "own", name) for name in config.dtypes]
    if len(sets) != len(shapes):
        raise SpecqError(f"{folder} is damaged: {len(sets)} sets of texts where {len(shapes)} were scored")
    done = [_analyse(texts, columns, config) for texts, columns in zip(sets, shapes, strict=True)]
    own = dict(zip(config.dtypes, done[1:], strict=False))
    return Material(study["text"], done[0], shapes[0], own)


def _texts(table: Mapping[str, np.ndarray], kept: int) -> list[list[Text]]:
    """The texts of every set, `kept` at a time, in the order they were written."""
    names = ("prompt", "document", "group", "arm", "ended_by_eos", "prompt_token_ids", "response_token_ids")
    texts = [
        Text(Prompt(p, d, g, tuple(t.tolist())), tuple(r.tolist()), arm, bool(ended))
        for p, d, g, arm, ended, t, r in zip(*(table[n] for n in names), strict=True)
    ]
    return [texts[i : i + kept] for i in range(0, len(texts), kept)]


def _columns(rows: Mapping[str, np.ndarray], kind: str, fmt: str | None) -> dict[str, Columns]:
    """Logged columns per arm of one set of texts: the main one, or a format's own."""
    of_kind = rows["text"] == kind
    arms = dict.fromkeys(rows["arm"][of_kind].tolist())
    wanted = [a for a in arms if fmt is None or a.split("+")[0] == fmt]
    return {a: {c: rows[c][of_kind & (rows["arm"] == a)] for c in COLUMNS} for a in wanted}


def _analyse(texts: list[Text], columns: dict[str, Columns], config: StudyConfig) -> Analysis:
    """As the study did: the first arm sampled the texts, and so did those with the same target format."""
    base = next(iter(columns))
    writers = tuple(a for a in columns if a != NULL and a.split("+")[0] == base.split("+")[0])
    rule = Rule(config.draft_sampling, config.verify)
    return analyse(texts, columns, base, rule, config.k_max, seed=config.seed, draws=DRAWS, sampled_own=writers)


def reconfigured(config: StudyConfig, changes: Mapping[str, Any]) -> StudyConfig:
    """The configuration with another cost, batch, context, current K, objective or vLLM version; None means unchanged.

    Raises SpecqError for values that make no sense, and when the study's own cost rests on a file that has changed.
    """
    given = {k: v for k, v in changes.items() if v is not None}
    digest = cost_digest(given.get("cost", config.cost))
    if "cost" not in given and digest != config.cost_sha256:
        raise SpecqError(
            f"the file behind the study's cost ({config.cost}) has changed since; give --cost to use it anew"
        )
    return validated(config.model_dump() | given | {"cost_sha256": digest})
