"""A finished study read back: its analyses and facts from its files, without models and without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specq import files, pairs
from specq.analysis import NULL, Analysis, Columns, analyse
from specq.conclude import Material
from specq.config import DRAWS, StudyConfig, cost_digest, validated
from specq.cost import CostModel, FreeDraft
from specq.cost.spec import build, from_study, parse_cost
from specq.decision import StudyFacts
from specq.errors import SpecqError, first_line
from specq.ngram import NgramLookup
from specq.outliers import Outlier
from specq.prompts import Prompt, Text
from specq.rules import Rule, Transform
from specq.shape import ModelShape

# what the estimator and the tables need of positions.parquet
COLUMNS = ("logp", "logq", "alpha", "alpha_greedy", "alpha_strict", "draft_top1")
DEPTH_COLUMNS = ("alpha_by_depth", "b_by_depth")  # beside them where the draft is a lookup


@dataclass
class Finished:
    """A study from its directory: `study` is study.json, `config` what it was asked."""

    folder: Path
    study: dict
    config: StudyConfig
    material: Material
    shapes: tuple[ModelShape, ModelShape | None]  # target's, draft's (None where it is no model)

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
            transform=self.transform,
            target_vocab=pair["vocabulary"]["target_logits"],
            draft_vocab=pair["vocabulary"]["draft_logits"],
            scale_sources=study["scales"],
            warnings={None: list(study["warnings"])} | {n: list(w) for n, w in study["warnings_by_format"].items()},
            native_fp8=spec.native_fp8(study["native_fp8"]),
            server=spec.server,
            outliers=[Outlier(**o) for o in study["key_outliers"]],
            lookup=self.lookup,
        )

    @property
    def transform(self) -> Transform:
        """The target's sampling."""
        return Transform(**self.study["sampling"])

    @property
    def lookup(self) -> NgramLookup | None:
        """The draft where it is no model."""
        return None if self.shapes[1] else NgramLookup(*self.config.ngram)

    @property
    def drafting(self) -> str:
        """How drafts are proposed: ngram, probabilistic or greedy."""
        return pairs.NGRAM if self.lookup else self.config.draft_sampling

    def cost(self, config: StudyConfig) -> CostModel:
        """The cost model that `config` names; `measured` is the table that the study measured."""
        cost = self._model_cost(config)
        return FreeDraft(cost) if self.lookup else cost

    def _model_cost(self, config: StudyConfig) -> CostModel:
        spec, (target, draft) = parse_cost(config.cost), self.shapes
        if spec.kind != "measured":
            return build(spec, target, draft or target)
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
        target = ModelShape.from_dict(study["pair"]["target"]["shape"])
        draft = study["pair"]["draft"].get("shape")
        shapes = target, draft and ModelShape.from_dict(draft)
        return Finished(folder, study, config, _material(folder, study, config), shapes)
    except (KeyError, ValueError, TypeError, AttributeError) as error:  # ValidationError is a ValueError
        raise SpecqError(
            f"{folder} was written by another version of specq ({first_line(error)}): run the study again"
        ) from error


def _material(folder: Path, study: dict, config: StudyConfig) -> Material:
    sets = _texts(files.read_parquet(folder / "texts.parquet"), study["prompts"]["kept"])
    columns = COLUMNS if "shape" in study["pair"]["draft"] else (*COLUMNS, *DEPTH_COLUMNS)
    path = folder / "positions.parquet"
    groups = files.arm_row_groups(path, columns)
    names = (NULL, *config.dtypes) if config.text in ("own", "both") else ()
    shapes = [
        {arm: files.ArmRows(path, found, columns) for (text, arm), found in groups.items()
         if text == kind and (fmt is None or arm.split("+")[0] == fmt)}
        for kind, fmt in [(study["text"], None), *(("own", name) for name in names)]
    ]  # fmt: skip
    if len(sets) != len(shapes) or not all(shapes):
        raise SpecqError(f"{folder} is damaged: {len(sets)} sets of texts where {len(shapes)} were scored")
    done = [_analyse(texts, columns, config) for texts, columns in zip(sets, shapes, strict=True)]
    own = dict(zip(names, done[1:], strict=True))
    return Material(study["text"], done[0], shapes[0], own)


def _texts(table: Mapping[str, np.ndarray], kept: int) -> list[list[Text]]:
    """The texts of every set, `kept` at a time, in the order they were written."""
    names = ("prompt", "document", "group", "arm", "ended_by_eos", "prompt_token_ids", "response_token_ids")
    texts = [
        Text(Prompt(p, d, g, tuple(t.tolist())), tuple(r.tolist()), arm, bool(ended))
        for p, d, g, arm, ended, t, r in zip(*(table[n] for n in names), strict=True)
    ]
    return [texts[i : i + kept] for i in range(0, len(texts), kept)]


def _analyse(texts: list[Text], columns: dict[str, Columns], config: StudyConfig) -> Analysis:
    """As the study did: the first arm sampled the texts."""
    rule = Rule(config.draft_sampling, config.verify)
    return analyse(texts, columns, next(iter(columns)), rule, config.k_max, seed=config.seed, draws=DRAWS)


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
