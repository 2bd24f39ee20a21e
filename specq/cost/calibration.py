"""Efficiency factors of a roofline from measured step times, and how far the roofline stays from them.

    specq cost timings.json --pair llama8b-1b --gpus h200 --out my-h200.toml

`fit` finds the factors of `specq.cost.gpus.Efficiency` by least squares of log(roofline / measured), every timing alike.
Rates enter as logarithms, times as square roots, so that none becomes negative and a time may be 0. A weak pull towards the
factors assumed so far decides those that the timings say nothing about; which ones they hardly tell from the others, and so
mean little by themselves, is said. A roofline's error is of its form and no noise, so no interval is given: the residuals are.

Timings of one GPU's share of N (`TimingFile.share_of`) are compared with the roofline without communication; the link's
factors stay as assumed. Beside whole steps they tell communication from the rest, which whole steps alone do badly: two
all-reduces a layer look like a layer's own waiting, and a slow link like slow products.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from specq.cost.gpus import Efficiency, Gpu
from specq.cost.roofline import Roofline, Terms
from specq.cost.table import Timing
from specq.errors import SpecqError
from specq.shape import ModelShape

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

PULL = 0.01  # residual of one unit of distance from the assumed factors: of a rate e-fold, of a time see SCALE
SCALE = {"layer_seconds": 10e-6, "step_seconds": 100e-6, "reduce_seconds": 10e-6}
STARTS = ((0.8,), (0.6, 0.15), (1.0, 5.0))  # bandwidth; matrix; square roots of all times in SCALE
OTHER = float(np.log(2))  # rms of log(roofline / measured) beyond which times are of another model
RATES = ("bandwidth", "matrix", "attention")
LINK = ("link", "reduce_seconds")
OWN = 0.5  # a factor is the timings' own where they give more than this share of what is known about it


@dataclass(frozen=True)
class Calibration:
    """Fitted factors, what they rest on, and the roofline beside every timing.

    share: how much of each factor comes from the timings, 0..1, the rest being the pull to what was assumed.
    seconds: the calibrated roofline's for every timing. share_of: N where both are of one GPU's share of N, without
    communication. beside: roofline over measured of the timings of a share that were given beside whole steps.
    """

    file: str
    assumed: Efficiency
    efficiency: Efficiency
    share: dict[str, float]
    timings: tuple[Timing, ...]
    seconds: np.ndarray
    share_of: int | None = None
    beside: np.ndarray = field(default_factory=lambda: np.ones(0))

    @property
    def residuals(self) -> np.ndarray:
        """log(roofline / measured) of every timing."""
        return np.log(self.seconds / np.array([t.seconds for t in self.timings]))

    @property
    def undetermined(self) -> list[str]:
        """Factors that the timings hardly tell from the others: by themselves their values mean little."""
        return [name for name, share in self.share.items() if share < OWN]

    @property
    def impossible(self) -> list[str]:
        """Rates found above the data sheet's: timings of another GPU or model, or of one that a cache holds."""
        return [n for n in self.share if n not in SCALE and getattr(self.efficiency, n) > 1]

    def check(self, path: object) -> None:
        """Raises SpecqError where the best factors still miss the times of the target or of the draft by a factor of 2.

        Each by itself: free factors bend to the model with more timings, and the other shows that they do not fit.
        """
        kinds = np.array([t.kind for t in self.timings])
        miss, kind = max((_rms(self.residuals[kinds == kind]), kind) for kind in set(kinds))
        if miss > OTHER:
            raise SpecqError(
                f"the roofline of this pair misses the {kind}'s times of {path} by a factor of {np.exp(miss):.1f}: they are of"
                f" another model; `specq cost {path} --pair NAME --gpus NxGPU --out mine.toml` gives factors that serve any"
                " pair"
            )

    def groups(self) -> list[dict]:
        """Per kind and format: records, the middle roofline/measured, the error's root mean square, and the worst case."""
        keys = dict.fromkeys((t.kind, t.kv_format) for t in self.timings)
        return [self._group(*key) for key in keys]

    def _group(self, kind: str, kv_format: str) -> dict:
        mine = np.array([(t.kind, t.kv_format) == (kind, kv_format) for t in self.timings])
        errors = np.where(mine, self.residuals, 0.0)
        worst = int(np.abs(errors).argmax())
        return {
            "kind": kind,
            "kv_format": kv_format,
            "records": int(mine.sum()),
            "roofline_over_measured": float(np.exp(np.median(errors[mine]))),
            "relative_error_rms": _rms(errors[mine]),
            "worst": self.row(worst),
        }

    def row(self, i: int) -> dict:
        """One timing beside the roofline."""
        t = self.timings[i]
        case = t.model_dump(include={"kind", "batch", "context", "new_tokens", "kv_format", "seconds"})
        return case | {"roofline": float(self.seconds[i]), "roofline_over_measured": float(self.seconds[i] / t.seconds)}

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "file": self.file,
            "records": len(self.timings),
            "share_of": self.share_of,
            "relative_error_rms": _rms(self.residuals),
            "relative_error_largest": float(np.abs(self.residuals).max()),
            "share_relative_error_rms": _rms(np.log(self.beside)) if len(self.beside) else None,
            "undetermined": self.undetermined,
            "share_from_timings": self.share,
            "groups": self.groups(),
        }


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt((errors**2).mean()))


def fit(
    timings: Sequence[Timing],
    shapes: Mapping[str, ModelShape],
    gpu: Gpu,
    gpus: int = 1,
    file: str = "timings",
    share_of: int | None = None,
    share: Sequence[Timing] = (),
) -> Calibration:
    """Efficiency factors of `gpus` x `gpu` from timings of the models of `shapes` ("target" and, where timed, "draft").

    With `share_of` (= gpus) the timings are of one GPU's share, without communication; `share` are such timings beside whole
    steps, and tell what in a step is communication. Raises SpecqError for timings of a kind without a shape or of a share of
    another number of GPUs, and for formats that the models cannot have.
    """
    if missing := sorted({t.kind for t in (*timings, *share)} - shapes.keys()):
        raise SpecqError(f"{file} holds timings of a {missing[0]}, whose shape is not given")
    if share_of not in (None, gpus):
        raise SpecqError(
            f"{file} holds times of one GPU's share of {share_of}: they calibrate {share_of}x{gpu.name}, not {gpus}"
        )
    roofline = Roofline(gpu, shapes["target"], shapes.get("draft", shapes["target"]), gpus)
    parts = [roofline.terms(t.kind, t.batch, t.context, t.new_tokens, t.kv_format) for t in (*timings, *share)]
    terms, whole = _together(parts), 0 if share_of else len(timings)
    measured = np.log([t.seconds for t in (*timings, *share)])

    def predicted(e: Efficiency) -> np.ndarray:
        return terms.alone(e) + np.where(np.arange(len(parts)) < whole, terms.communication(e), 0.0)

    names = [*RATES, "layer_seconds", "step_seconds", *(LINK if gpus > 1 and whole else ())]
    best, known = _solved(names, gpu.efficiency, predicted, measured, terms)
    source = f"calibrated on {file}"
    if share_of:
        source += f", one GPU's share of {share_of}, but link and reduce_seconds {gpu.efficiency.source}"
        known |= dict.fromkeys(LINK, 0.0)
    found = replace(best, source=source)
    seconds = predicted(found)
    n = len(timings)
    return Calibration(
        file, gpu.efficiency, found, known, tuple(timings), seconds[:n], share_of, (seconds / np.exp(measured))[n:]
    )


def _solved(
    names: Sequence[str], assumed: Efficiency, predicted: Callable, measured: np.ndarray, terms: Terms
) -> tuple[Efficiency, dict[str, float]]:
    """(factors `names` by least squares, the others as assumed; how much of each the timings determine)."""
    from scipy.optimize import least_squares

    middle = _coordinates(assumed, names)

    def cost(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted(_efficiency(assumed, names, x))) - measured, PULL * (x - middle)])

    def solve(bandwidth: float, matrix: float, waits: float) -> "OptimizeResult":
        rates = {"bandwidth": bandwidth, "matrix": matrix, "attention": matrix, "link": assumed.link}
        return least_squares(cost, [np.log(rates[n]) if n in rates else waits for n in names], x_scale=0.3)

    # the larger of two bounds makes several valleys
    best = min((solve(*start) for start in product(*STARTS)), key=lambda result: result.cost)
    found = _efficiency(assumed, names, best.x)
    return found, _shares(best.jac[: len(measured)], names, best.x, terms, predicted(found))


def _shares(
    jac: np.ndarray, names: Sequence[str], x: np.ndarray, terms: Terms, seconds: np.ndarray
) -> dict[str, float]:
    """How much of each factor the timings determine: 1 - (spread with them / spread of the pull alone)^2."""
    counts = {"layer_seconds": terms.layers, "step_seconds": 1.0, "reduce_seconds": terms.reduces}
    slopes = jac.copy()
    for i, n in enumerate(names):
        if n in SCALE:  # a square root is flat at 0; half a unit away it is not
            slopes[:, i] = counts[n] * 2 * max(x[i], 0.5) * SCALE[n] / seconds
    known = np.linalg.inv(slopes.T @ slopes + PULL**2 * np.eye(len(names)))
    return {n: float(1 - PULL**2 * v) for n, v in zip(names, np.diag(known), strict=True)}


def _coordinates(e: Efficiency, names: Sequence[str]) -> np.ndarray:
    return np.array([np.sqrt(getattr(e, n) / SCALE[n]) if n in SCALE else np.log(getattr(e, n)) for n in names])


def _efficiency(e: Efficiency, names: Sequence[str], x: np.ndarray) -> Efficiency:
    values = {n: float(SCALE[n] * v**2 if n in SCALE else np.exp(v)) for n, v in zip(names, x, strict=True)}
    return replace(e, **values)


def _together(parts: Iterable[Terms]) -> Terms:
    return Terms(*np.array([astuple(t) for t in parts]).T)
