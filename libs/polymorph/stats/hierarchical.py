"""The hierarchical paired design: pairs within loads within processes, each nesting with a bias of its own."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from polymorph.events.values import Ratio
from polymorph.stats.student import t975

# log(incumbent seconds / candidate seconds), one for each pair; above 0 the candidate is faster.
Pairs = Sequence[float]
Loads = Sequence[Pairs]


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations of log ratios by level, to see where the noise comes from."""

    between_processes: float
    between_loads: float
    within_load: float


def log_ratio(incumbent_s: float, candidate_s: float) -> float:
    """The log of the speed-up of one pair.

    Raises:
        ValueError: a time that is not positive and finite.
    """
    for seconds in (incumbent_s, candidate_s):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{seconds} s is no time a call can take: positive and finite")
    return math.log(incumbent_s / candidate_s)


def speedup(processes: Sequence[Loads]) -> Ratio:
    """The speed-up with its 95 % interval from log ratios by process, load and pair.

    Pairs are medians within a load, since an interruption strikes one arm and not the other; loads are means within a
    process. The interval is Student's t over process means: the process is the unit that was drawn independently, and
    a bias of a load or a process is not averaged away by more pairs.

    Raises:
        ValueError: fewer than two processes, or an empty level.
    """
    means = [_process_mean(loads) for loads in processes]
    if len(means) < 2:
        raise ValueError(f"{len(means)} process: an interval needs at least 2")
    centre = statistics.fmean(means)
    half = t975(len(means) - 1) * statistics.stdev(means) / math.sqrt(len(means))
    return Ratio(point=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half))


def spread(processes: Sequence[Loads]) -> Spread:
    """How log ratios vary between processes, between loads of one process, and between pairs of one load."""
    return Spread(
        between_processes=_deviation([_process_mean(loads) for loads in processes]),
        between_loads=_mean_deviation([[_load_centre(load) for load in loads] for loads in processes]),
        within_load=_mean_deviation([load for loads in processes for load in loads]),
    )


def _process_mean(loads: Loads) -> float:
    if not loads:
        raise ValueError("a process without loads: every process measures at least one")
    return statistics.fmean(_load_centre(load) for load in loads)


def _load_centre(pairs: Pairs) -> float:
    if not pairs:
        raise ValueError("a load without pairs: every load measures at least one")
    return statistics.median(pairs)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _mean_deviation(groups: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(_deviation(group) for group in groups) if groups else 0.0
