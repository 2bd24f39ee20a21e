"""Replay of the texts that vLLM emitted, under the arm that vLLM ran: a and b of every position, kept beside the cell."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specq.config import StudyConfig
from specq.engines.vllm.agreement import counted
from specq.engines.vllm.plan import Cell
from specq.engines.vllm.protocol import CellRequest, CellResult, RequestLog
from specq.inputs import Models, load_models
from specq.ngram import NgramLookup
from specq.progress import Reporter
from specq.prompts import Prompt, Text
from specq.replay import Arm, Setting, score_texts
from specq.rules import Rule, Transform, acceptance_terms


class Replayer:
    """Scores cells one after another; the models are loaded when the first one needs them, after the engine is gone.

    As vLLM does it: the draft gets the temperature only, the query is rounded to FP8 for per-tensor FP8, scales are the
    checkpoint's or 1.0, and the texts are those of the arm that sampled them, so that its own b applies.
    """

    def __init__(self, config: StudyConfig, transform: Transform, version: str, reporter: Reporter) -> None:
        self.config, self.transform, self.version, self.reporter = config, transform, version, reporter
        self._models: Models | None = None

    def terms(
        self, folder: Path, cell: Cell, request: CellRequest, result: CellResult
    ) -> tuple[np.ndarray, np.ndarray]:
        """(a, b) of every position of `counted(result.requests)`, each [sum of positions], with a second axis of K for n-gram
        lookup; from the cell's file when it is there."""
        logs = counted(result.requests)
        key = f"{request.digest} {self.version} {[log.tokens for log in logs]}"
        digest = hashlib.sha256(key.encode()).hexdigest()
        path = folder / f"{cell.name}.replay.npz"
        if path.is_file():
            try:
                with np.load(path) as kept:
                    if str(kept["digest"]) == digest:
                        return kept["a"], kept["b"]
            except (OSError, ValueError, KeyError):
                pass  # damaged by a machine that went away: score again
        a, b = self._score(cell, request, logs)
        np.savez(path, digest=digest, a=a, b=b)
        return a, b

    def _score(self, cell: Cell, request: CellRequest, logs: Sequence[RequestLog]) -> tuple[np.ndarray, np.ndarray]:
        if self._models is None:
            _, self._models = load_models(self.config, self.reporter)
        models = self._models
        rule = Rule("greedy" if isinstance(models.draft, NgramLookup) else cell.drafting)
        draft_fmt = cell.draft_fmt(self.version)
        arm = Arm.of(cell.fmt, draft_fmt)
        texts = [
            Text(
                Prompt(f"{r.prompt}", request.documents[r.prompt], None, tuple(request.prompts[r.prompt])),
                tuple(r.tokens), arm.name, r.finish_reason == "stop",
            )
            for r in logs
        ]  # fmt: skip
        setting = Setting(
            self.transform, self.transform.without_truncation(), rule, models.vocabulary, self.config.seed,
            round_query=lambda fmt: fmt.rounds_query, depth=cell.k,
        )  # fmt: skip
        total = len(models.by_role) * sum(len(t.prompt.tokens) + t.positions for t in texts)
        with self.reporter.task(f"replaying {cell.name}", total) as done:
            scored = score_texts(models.target, models.draft, texts, [arm], setting, done)
        tokens = np.concatenate([np.array(t.response[1:]) for t in texts])
        return acceptance_terms(scored.arms[arm.name].columns, tokens, rule)
