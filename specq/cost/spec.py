"""What `--cost` means, in one place.

measured                     step times of this pair on this machine
roofline:GPU                 data-sheet estimate on one GPU: a name of gpus.toml, or a file GPU.toml of your own
roofline:NxGPU               the same over N tensor-parallel GPUs
roofline:NxGPU@TIMINGS.json  with efficiency factors calibrated on timings of this pair
TIMINGS.json                 timings, looked up
"""

from dataclasses import dataclass
from pathlib import Path

from specq.capacity import Server
from specq.cost.base import CostModel
from specq.cost.calibration import fit
from specq.cost.gpus import Gpu, get_gpu, split_gpus
from specq.cost.roofline import Roofline
from specq.cost.table import TableCost, Timing, read_file, read_timings
from specq.errors import SpecqError
from specq.shape import ModelShape


@dataclass(frozen=True)
class CostSpec:
    """A parsed `--cost`. `gpu` is set for a roofline; `timings` for a file, or what a roofline is calibrated on."""

    kind: str
    gpu: Gpu | None = None
    gpus: int = 1
    timings: str | None = None
    files: tuple[str, ...] = ()

    @property
    def server(self) -> Server | None:
        """The GPUs of a roofline, for what fits on them."""
        return Server(self.gpu.name, self.gpus, self.gpu.memory) if self.gpu else None

    def native_fp8(self, measured_on: bool | None) -> bool | None:
        """Whether the accelerator decided for has FP8 units, given whether the one that measures has.

        None where that is not known: the times of a file may be of any machine.
        """
        if self.gpu:
            return self.gpu.fp8
        return measured_on if self.kind == "measured" else None


def parse_cost(text: str) -> CostSpec:
    """Raises SpecqError with what is accepted when `text` is no cost or names a file that is not there."""
    if text == "measured":
        return CostSpec("measured")
    if text.startswith("roofline:"):
        which, _, timings = text.removeprefix("roofline:").partition("@")
        count, name = split_gpus(which)
        if timings and not Path(timings).is_file():
            raise SpecqError(f"--cost {text!r}: no timings file {timings} to calibrate on")
        files = [f for f in (name if name.endswith(".toml") else "", timings) if f]
        return CostSpec("roofline", get_gpu(name), count, timings or None, tuple(files))
    if not Path(text).is_file():
        raise SpecqError(f"--cost {text!r} is neither measured, nor roofline:GPU, nor a file of timings")
    return CostSpec("file", timings=text, files=(text,))


def build(spec: CostSpec, target: ModelShape, draft: ModelShape) -> CostModel:
    """The cost model of a roofline or a file; measuring needs models and lives in `specq.cost.measured`.

    Raises SpecqError for timings that no efficiency of this pair's roofline explains (`Calibration.check`).
    """
    if spec.kind == "file":
        return read_timings(spec.timings)
    if spec.kind != "roofline":
        raise ValueError("measured step times cannot be built without models")
    if not spec.timings:
        return Roofline(spec.gpu, target, draft, spec.gpus)
    file = read_file(spec.timings)
    shapes = {"target": target, "draft": draft}
    found = fit(file.records, shapes, spec.gpu, spec.gpus, Path(spec.timings).name, file.share_of)
    found.check(spec.timings)
    return Roofline(spec.gpu, target, draft, spec.gpus, found, file.fixed)


def from_study(cost: dict) -> TableCost:
    """The measured table that a study left in its study.json (`cost` block)."""
    details = cost["details"]
    return TableCost([Timing(**r) for r in details["records"]], cost["source"], details, cost["fixed_seconds"])
