"""What a finished study says about one KV format, with everything that may be absent resolved in one place.

A study on own text only scores its formats under `arms_own_text`; the baseline as the format under test has no shift; one
document gives no intervals. Plots and page ask a `FormatView` and need not know.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from specq.analysis import BASE

UNKNOWN = {"value": None, "se": None, "ci95": [None, None]}
MAIN_TEXTS = ("same", "given")
Row = tuple[str, ...]


@dataclass(frozen=True)
class FormatView:
    """One format of a study: `study` is study.json, `recommendation` the format's recommendation.json."""

    study: dict
    recommendation: dict

    @property
    def name(self) -> str:
        """Name of the target's KV format."""
        return self.recommendation["target_kv_dtype"]

    @property
    def label(self) -> str:
        """The format's name for people."""
        return "BF16" if self.is_baseline else self.name

    @property
    def arm(self) -> str:
        """The headline arm: only the target's cache is in the format."""
        return f"{self.name}+bf16"

    @property
    def inherited_arm(self) -> str:
        """The arm whose draft has the format too."""
        return f"{self.name}+{self.name}"

    @property
    def is_baseline(self) -> bool:
        """Whether the format under test is BF16 itself."""
        return self.arm == BASE

    @property
    def own_text_only(self) -> bool:
        """Whether the format was scored on text of its own only, so that nothing is paired position by position."""
        return self.arm not in self.study["arms"]

    @property
    def k_max(self) -> int:
        """Largest K measured."""
        return self.study["configuration"]["k_max"]

    @property
    def current(self) -> int:
        """num_speculative_tokens in use."""
        return self.recommendation["current_num_speculative_tokens"]

    @property
    def recommended(self) -> int:
        """num_speculative_tokens recommended."""
        return self.recommendation["recommended_num_speculative_tokens"]

    @property
    def withheld(self) -> bool:
        """Whether nothing is recommended, since the weights are random."""
        return any(v["code"] == "random_weights" for v in self.recommendation["verdicts"])

    @property
    def parting(self) -> str:
        """Where own texts part from the baseline's, and what that does to the standard error; empty without own text."""
        found = self.study.get("own_text_coupling", {}).get(self.arm)
        if not found:
            return ""
        last = found["beginnings"][-1]
        said = f"; texts part after {found['shared_tokens_median']:.0f} tokens (median), {100 * last['texts_parted']:.0f} % do"
        same, own = (last["same"] or {}).get("se"), last["own"]["se"]
        return f"{said}; standard error {own / same:.1f} times the same text's" if same and own else said

    @property
    def shown_k(self) -> int:
        """The K at which mu is quoted: the current one, or, where that is 0, the recommended one or k_max."""
        return self.current or self.recommended or self.k_max

    @property
    def alpha_column(self) -> str:
        """The column of positions.parquet that holds alpha under the study's rule."""
        config = self.study["configuration"]
        if config["draft_sampling"] == "greedy":
            return "alpha_greedy"
        return "alpha_strict" if config["verify"] == "strict" else "alpha"

    @property
    def decision(self) -> dict:
        """What was decided for the format, with its curves, groups and sensitivity."""
        return self.study["decisions"][self.name]

    @property
    def curves(self) -> list[dict]:
        """Speedup curves, the first being the operating point of the recommendation."""
        return self.decision["curves"]

    def summary(self, arm: str) -> dict:
        """An arm's block of study.json, on own text where that is the only one; empty when there is none."""
        return self.study["arms"].get(arm) or self.study["arms_own_text"].get(arm) or {}

    def mu(self, arm: str) -> dict[int, dict]:
        """Mean accepted per cycle by K: value, se, ci95."""
        found = self.summary(arm).get("mu_accepted")
        if found:
            return by_k(found)
        name = "baseline_mu_accepted" if arm == BASE else "mu_accepted"
        return {int(k): UNKNOWN | {"value": v} for k, v in self.recommendation[name].items()}

    def shifts(self, arm: str) -> dict[int, dict]:
        """Shift of mu by K (value, se, ci95, minus_null, significant); empty for the baseline."""
        return by_k(self.study["shifts"].get(arm) or self.study["shifts_own_text"].get(arm) or {})

    @property
    def shift(self) -> dict:
        """The headline arm's shift of mu at `shown_k`."""
        return {"minus_null": UNKNOWN, "significant": False} | UNKNOWN | self.shifts(self.arm).get(self.shown_k, {})

    @property
    def own_shift(self) -> dict | None:
        """The shift on own text at `shown_k`, where the study has both kinds of text: also `k` and `significant`."""
        if self.own_text_only or self.is_baseline:
            return None
        at = self.study["shifts_own_text"].get(self.arm, {}).get(str(self.shown_k))
        return at | {"k": self.shown_k} if at else self.recommendation["mu_shift_own"]

    def null_shifts(self) -> dict[int, dict]:
        """The null arm's shift of mu by K."""
        return by_k(self.study["null_arm"])

    def survival(self, arm: str) -> tuple[np.ndarray, np.ndarray]:
        """(marginal S_k, conditional S_k / S_(k-1)) for k = 1..shown_k at K = shown_k; NaN where not defined."""
        found = self.summary(arm).get("marginal_survival", {}).get(str(self.shown_k))
        marginal = np.array(found if found else [np.nan] * self.shown_k, dtype=float)
        before = np.concatenate([[1.0], marginal[:-1]])
        return marginal, np.divide(marginal, before, out=np.full_like(marginal, np.nan), where=before > 0)

    def rows(self, positions: Mapping[str, np.ndarray], arm: str) -> np.ndarray:
        """Indices of an arm's rows in positions.parquet: the shared text, own text where there is no other."""
        mine = positions["arm"] == arm
        shared = mine & np.logical_or.reduce([positions["text"] == kind for kind in MAIN_TEXTS])
        return np.flatnonzero(shared if shared.any() else mine)


def by_k(values: Mapping[str, dict]) -> dict[int, dict]:
    """JSON's string keys as numbers."""
    return {int(k): v for k, v in values.items()}


def series(entries: Mapping[int, dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(K, value, low, high) of entries with value and ci95, as float arrays with NaN for null."""
    values = _floats(e["value"] for e in entries.values())
    low, high = (_floats(e["ci95"][i] for e in entries.values()) for i in (0, 1))
    return np.array(list(entries), dtype=float), values, low, high


def _floats(values: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def number(value: float | None, digits: int = 4, sign: bool = True) -> str:
    """A figure for people: fixed decimals, n/a for null and NaN."""
    if value is None or not np.isfinite(value):
        return "n/a"
    return f"{value + 0.0:{'+' if sign else ''}.{digits}f}"


def interval(bounds: Iterable[float | None], digits: int = 4, sign: bool = True) -> str:
    """A 95 % interval for people; n/a where neither end can be given."""
    ends = [number(b, digits, sign) for b in bounds]
    return "n/a" if set(ends) == {"n/a"} else f"[{', '.join(ends)}]"


def percent(share: float | None) -> str:
    """A share as a signed percentage; n/a for null."""
    return "n/a" if share is None else f"{number(100 * share, 1)} %"


def percents(bounds: Iterable[float | None]) -> str:
    """A 95 % interval of shares as percentages."""
    return interval([None if b is None else 100 * b for b in bounds], 1)


def with_interval(entry: dict, digits: int = 4, sign: bool = True) -> Row:
    """(value, 95 % interval) of an entry."""
    return number(entry["value"], digits, sign), interval(entry["ci95"], digits, sign)
