"""The error budget of the class "reordered": no more error against float64 than the incumbent's own."""

from dataclasses import dataclass, field

import numpy as np

from polymorph.evaluator.domain.number import Floats
from polymorph.evaluator.domain.operation import Expected

# The incumbent's error is itself a sample: how far above it a candidate's may lie, in mean square and at its worst.
MEAN_MARGIN = 1.5
WORST_MARGIN = 3.0
# In units of error; below this both are as exact as the format.
FLOOR_MEAN = 0.1
FLOOR_WORST = 1.0
# Where the incumbent does not serve the call at all.
WITHOUT_INCUMBENT = 16.0
_ASTRAY = 64.0


@dataclass(slots=True)
class Errors:
    """Errors in units (see `expected`), gathered over cases."""

    count: int = 0
    squares: float = 0.0
    worst: float = 0.0
    where: str = ""
    by_case: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return float(np.sqrt(self.squares / self.count)) if self.count else 0.0

    def add(self, case: str, output: Floats, expected: Expected) -> None:
        """Adds one output (all columns). Where the unit is 0 only the exact value has no error."""
        error = np.abs(output[:, expected.columns].astype(np.float64) - expected.value)
        with np.errstate(divide="ignore", invalid="ignore"):
            units = np.where(expected.unit > 0, error / expected.unit, np.where(error > 0, np.inf, 0.0))
        units = np.where(np.isfinite(output[:, expected.columns]), units, np.inf)
        worst = float(np.max(units, initial=0.0))
        self.count += units.size
        self.squares += float(np.sum(units * units))
        self.by_case[case] = max(self.by_case.get(case, 0.0), worst)
        if worst > self.worst:
            self.worst, self.where = worst, case

    def merge(self, other: "Errors") -> None:
        """Adds what was gathered elsewhere."""
        self.count += other.count
        self.squares += other.squares
        self.by_case.update(other.by_case)
        if other.worst > self.worst:
            self.worst, self.where = other.worst, other.where


def beyond(candidate: Errors, incumbent: Errors) -> str | None:
    """Why the candidate's errors are not within the budget, or None.

    Judged case by case at its worst and over all cases in mean square: a case where it is wrong is not diluted by those
    where it is right.
    """
    for case, worst in candidate.by_case.items():
        own = incumbent.by_case.get(case)
        allowed = WITHOUT_INCUMBENT if own is None else WORST_MARGIN * own + FLOOR_WORST
        if not worst <= allowed:
            return f"case {case}: error of {worst:.3g} units, {allowed:.3g} allowed by the incumbent's own"
    allowed = MEAN_MARGIN * incumbent.mean + FLOOR_MEAN
    if not candidate.mean <= allowed:
        return f"mean error of {candidate.mean:.3g} units, {allowed:.3g} allowed by the incumbent's own"
    return None


def astray(output: Floats, incumbent: Floats, scale: Floats) -> int:
    """How many elements lie far from the incumbent's, for columns that no reference covers.

    `scale` is the sum of absolute products; two honest sums of any order differ by a small multiple of its roundoff.
    """
    allowed = scale.astype(np.float64) * _ASTRAY * 2.0**-24
    difference = np.abs(output.astype(np.float64) - incumbent.astype(np.float64))
    return int(np.count_nonzero(~(difference <= allowed)))
