"""Step times as `studies/step_times.py` keeps them, as a cost: to one GPU's share the communication is added."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specq.cost.gpus import parse_gpus
from specq.cost.roofline import Roofline
from specq.cost.table import TableCost, Timing, TimingFile, read_file
from specq.shape import ModelShape


def key(r: Timing) -> tuple:
    """What a timing is of."""
    return r.kind, r.kv_format, r.batch, r.context, r.new_tokens


def communication(roofline: Roofline, records: Sequence[Timing]) -> np.ndarray:
    """Seconds that a roofline gives all-reduces and gather in each timed step."""
    terms = [roofline.terms(r.kind, r.batch, r.context, r.new_tokens, r.kv_format) for r in records]
    return np.array([t.communication(roofline.efficiency) for t in terms])


def whole_steps(file: TimingFile, roofline: Roofline) -> list[Timing]:
    """The timings of a file as whole steps: as they are, or a share's with the roofline's communication added."""
    if not file.share_of:
        return list(file.records)
    added = communication(roofline, file.records)
    return [_longer(r, float(s)) for r, s in zip(file.records, added, strict=True)]


def _longer(r: Timing, by: float) -> Timing:
    """A timing and each of its repeats, `by` seconds longer."""
    return r.model_copy(update={"seconds": r.seconds + by, "repeats": r.repeats and [t + by for t in r.repeats]})


def drift(records: Iterable[Timing]) -> float:
    """How far two points that were not timed together are off at least: the largest share by which a plain step of one row at
    the second context lies below that at the first, where it should lie above; 0 where none does."""
    plain = {
        (r.kv_format, r.context): r.seconds for r in records if (r.kind, r.batch, r.new_tokens) == ("target", 1, 1)
    }
    first, second = [*sorted({c for _, c in plain}), None, None][:2]
    return max([0.0, *(1 - t / plain[f, first] for (f, c), t in plain.items() if c == second and (f, first) in plain)])


@dataclass(frozen=True)
class Steps:
    """A timings file of `gpus` (2xh200) and the roofline that completes it; its link factors are the assumed ones."""

    file: TimingFile
    roofline: Roofline

    @classmethod
    def read(cls, path: Path, gpus: str, shapes: Mapping[str, ModelShape]) -> "Steps":
        """Raises SpecqError where the file cannot be read."""
        over, gpu = parse_gpus(gpus)
        return cls(read_file(str(path)), Roofline(gpu, shapes["target"], shapes["draft"], over))

    @property
    def cost(self) -> TableCost:
        """For speedups; nothing beyond the batches and contexts measured."""
        over, gpu = self.roofline.gpus, self.roofline.gpu.name
        source = f"steps measured on {gpu}" + (f", share of {over}" if self.file.share_of else f" x {over}")
        return TableCost(whole_steps(self.file, self.roofline), source, {})

    @property
    def told(self) -> str:
        """In words what the times are."""
        over = self.roofline.gpus
        if self.file.share_of:
            return f"{self.layers_told} on one GPU's share of {over}, to which is added {self.communication_told}"
        return f"{self.layers_told}, tensor parallel over {over} GPUs"

    @property
    def layers_told(self) -> str:
        """In words how steps were made of what was timed (studies.step_times)."""
        depth = {role: shape.depth for role, shape in self.roofline.shapes.items()}
        return f"one layer as timed x {depth['target']} (the draft's x {depth['draft']}), plus the LM head"

    @property
    def communication_told(self) -> str:
        """In words what was added."""
        e, gpu = self.roofline.efficiency, self.roofline.gpu
        return (
            f"two all-reduces a layer and the gather of the logits, each {1e6 * e.reduce_seconds:.0f} microseconds and its"
            f" bytes over {e.link:.2f} of the {gpu.link:.0f} GB/s of the data sheet: assumed latency and assumed share"
        )
