"""Block-paired ratios: what end-to-end replays in one engine give."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polymorph.events.values import Ratio
from polymorph.stats.student import t975

_RESAMPLES = 2000
# Below this many blocks a percentile bootstrap is too narrow; Student's t keeps its word.
_FEW = 12


def paired_ratio(a: Sequence[float], b: Sequence[float], rng: np.random.Generator) -> Ratio:
    """The ratio b / a with its 95 % interval, from blocks that were run in pairs.

    The point is the geometric mean of the blocks' ratios. With at least 12 pairs the interval is the wider of a
    percentile bootstrap over pairs and Student's t on log ratios; with fewer it is Student's t alone.

    Raises:
        ValueError: lengths that differ, fewer than two pairs, or a value that is not positive and finite.
    """
    logs = _logs(a, b)
    centre = float(np.mean(logs))
    half = t975(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    low, high = centre - half, centre + half
    if len(logs) >= _FEW:
        draws = rng.integers(0, len(logs), size=(_RESAMPLES, len(logs)))
        means = np.mean(logs[draws], axis=1)
        low = min(low, float(np.quantile(means, 0.025)))
        high = max(high, float(np.quantile(means, 0.975)))
    return Ratio(point=math.exp(centre), low=math.exp(low), high=math.exp(high))


def median_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The median of the ratios b / a of paired blocks, with its interval of at least 95 %, or the range of fewer than six.

    For blocks where one in ten takes twice as long for reasons of the machine's, which would widen the interval of a mean
    beyond use. The interval is that of order statistics, whatever the ratios' distribution is; only that the pairs are
    independent is assumed.

    Raises:
        ValueError: as `paired_ratio`.
    """
    ratios = np.exp(np.sort(_logs(a, b)))
    out = _left_out(len(ratios))
    return Ratio(point=float(np.median(ratios)), low=float(ratios[out]), high=float(ratios[-1 - out]))


def _left_out(count: int) -> int:
    """How many of `count` sorted values may be left out at each end so that the median lies between the others in 95 %."""
    out, tail = 0, 1
    while 2 * tail / 2**count <= 0.05:  # both tails of the binomial distribution
        out += 1
        tail += math.comb(count, out)
    return max(0, out - 1)


def _logs(a: Sequence[float], b: Sequence[float]) -> npt.NDArray[np.float64]:
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{len(a)} and {len(b)} blocks: paired blocks come in equal numbers, at least 2")
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    for values in (first, second):
        if not bool(np.all(np.isfinite(values) & (values > 0))):
            raise ValueError(f"blocks {values.tolist()}: every value must be positive and finite")
    return np.asarray(np.log(second / first), dtype=np.float64)
