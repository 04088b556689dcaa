"""Block-paired ratios: what end-to-end replays in one engine give."""

import math
from collections.abc import Sequence

import numpy as np

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
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{len(a)} and {len(b)} blocks: paired blocks come in equal numbers, at least 2")
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    for values in (first, second):
        if not bool(np.all(np.isfinite(values) & (values > 0))):
            raise ValueError(f"blocks {values.tolist()}: every value must be positive and finite")
    logs = np.log(second / first)
    centre = float(np.mean(logs))
    half = t975(len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    low, high = centre - half, centre + half
    if len(logs) >= _FEW:
        draws = rng.integers(0, len(logs), size=(_RESAMPLES, len(logs)))
        means = np.mean(logs[draws], axis=1)
        low = min(low, float(np.quantile(means, 0.025)))
        high = max(high, float(np.quantile(means, 0.975)))
    return Ratio(point=math.exp(centre), low=math.exp(low), high=math.exp(high))
