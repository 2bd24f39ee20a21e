"""How a decision moves when its inputs do: acceptance, the draft's cost, the batch size."""

import numpy as np

from specq.analysis import Analysis
from specq.cost import CostModel
from specq.decision import SCHEDULER_LIMIT, Decision, Speeds, StudyFacts
from specq.errors import SpecqError
from specq.kv import KVFormat
from specq.tune import Curve, quantile_interval, tokens_ratio

SHIFTS = tuple(np.round(np.linspace(-0.2, 0.2, 17), 3).tolist())
FACTORS = tuple(float(2 ** (i / 2)) for i in range(-4, 5))


def sensitivity(facts: StudyFacts, analysis: Analysis, fmt: KVFormat, cost: CostModel, made: Decision) -> dict:
    """How the decision moves with the format's acceptance, the draft's cost and the batch size, all else equal.

    alpha: every conditional acceptance rate of the format's arm moved by a number of points, BF16 left alone.
    draft_cost: the draft's step times of both multiplied. batch: other batch sizes at the first context, where the cost
    model knows them. Each entry: x, the format's recommended K, BF16's, tokens per second over BF16 with interval.
    """
    speeds = Speeds(facts, analysis, fmt, cost)
    survival = analysis.survival(speeds.arm)

    def entry(x: float, mine: Curve, base: Curve) -> dict:
        value, draws = tokens_ratio(mine, base, mine.best, base.best)
        bounds = quantile_interval(draws)
        return {"x": x, "recommended": mine.best, "recommended_bf16": base.best, "over_bf16": value, "ci95": bounds}

    def batch_entry(batch: int) -> dict | None:
        point = (batch, made.at[1])
        try:
            return entry(batch, speeds.curve(point), speeds.curve(point, baseline=True))
        except SpecqError:
            return None

    largest = max(*facts.config.batch, SCHEDULER_LIMIT)
    batches = sorted({*facts.config.batch, *(2**i for i in range(int(np.log2(largest)) + 1))})
    return {
        "at": {"batch": made.at[0], "context": made.at[1]},
        "alpha": [entry(x, speeds.curve(made.at, factor=shifted(survival, x)), made.base_curve) for x in SHIFTS],
        "draft_cost": [
            entry(x, speeds.curve(made.at, draft=x), speeds.curve(made.base_at, True, draft=x)) for x in FACTORS
        ],
        "batch": [e for e in map(batch_entry, batches) if e is not None],
    }


def shifted(survival: np.ndarray, by: float) -> np.ndarray:
    """Factor on emitted(K), [k_max + 1], when every conditional rate S_k / S_(k-1) moves by `by`, kept within 0..1.

    survival [k_max, k_max] at [K-1, k-1], as `chain.survival` gives it.
    """
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    rates = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    moved = np.cumprod(np.clip(rates + by, 0.0, 1.0), axis=1) * np.tri(len(survival))
    return np.concatenate([[1.0], (1 + moved.sum(1)) / (1 + survival.sum(1))])
