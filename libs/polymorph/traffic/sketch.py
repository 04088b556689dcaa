"""Distributions in bounded memory: a deterministic sample, its quantiles, and mixtures of quantiles."""

import bisect
import math
from collections.abc import Callable, Iterable, Sequence

from polymorph.events.values import Quantiles

ZERO = Quantiles(mean=0.0, p10=0.0, p50=0.0, p90=0.0, p99=0.0)
_LEVELS = (0.1, 0.5, 0.9, 0.99)


def quantile(ordered: Sequence[float], level: float) -> float:
    """The `level` quantile of sorted values, linear between order statistics (Hyndman and Fan, type 7).

    Raises:
        ValueError: no values.
    """
    if not ordered:
        raise ValueError("a quantile needs at least one value")
    position = level * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class Sketch:
    """A sample of at most `capacity` values; when full it keeps every second one and halves its rate.

    Deterministic, so that a replayed log folds to the same window. The mean is exact.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._kept: list[float] = []
        self._stride = 1
        self._sum = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        if self.count % self._stride == 0:
            if len(self._kept) >= self._capacity:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self.count % self._stride == 0:
                self._kept.append(value)
        self.count += 1
        self._sum += value

    def quantiles(self) -> Quantiles | None:
        """None where nothing was added."""
        if not self.count:
            return None
        ordered = sorted(self._kept)
        p10, p50, p90, p99 = (quantile(ordered, level) for level in _LEVELS)
        return Quantiles(mean=self._sum / self.count, p10=p10, p50=p50, p90=p90, p99=p99)


def of(values: Iterable[float]) -> Quantiles:
    """The quantiles of `values`; zeros where there are none."""
    sketch = Sketch(capacity=1 << 20)
    for value in values:
        sketch.add(value)
    return sketch.quantiles() or ZERO


def mixture(parts: Sequence[tuple[float, Quantiles]]) -> Quantiles:
    """The quantiles of a mixture of weighted distributions, each known by its quantiles alone.

    Each part's distribution function is taken as linear between its quantiles, with as much room below p10 as lies
    between p10 and p50, at most down to 0; the mixture is inverted between the union of their knots.
    """
    weighted = [(weight, quantiles) for weight, quantiles in parts if weight > 0]
    total = sum(weight for weight, _ in weighted)
    if not total:
        return ZERO
    curves = [(weight / total, _knots(quantiles)) for weight, quantiles in weighted]
    line = [
        (x, sum(weight * _cdf(curve, x, find) for weight, curve in curves))
        for x in sorted({x for _, (points, _) in curves for x in points})
        for find in (bisect.bisect_left, bisect.bisect_right)
    ]
    p10, p50, p90, p99 = (_invert(line, level) for level in _LEVELS)
    mean = sum(weight * quantiles.mean for weight, quantiles in weighted) / total
    return Quantiles(mean=mean, p10=p10, p50=p50, p90=p90, p99=p99)


_Curve = tuple[list[float], list[float]]


def _knots(quantiles: Quantiles) -> _Curve:
    p10, p50, p90, p99 = quantiles.p10, quantiles.p50, quantiles.p90, quantiles.p99
    start, end = max(min(0.0, p10), 2 * p10 - p50), p99 + (p99 - p90) / 9
    return [start, p10, p50, p90, p99, end], [0.0, *_LEVELS, 1.0]


def _cdf(curve: _Curve, x: float, find: Callable[[list[float], float], int]) -> float:
    """The share at or below `x` (`bisect_right`), or below it (`bisect_left`): they differ where values repeat."""
    points, levels = curve
    index = find(points, x)
    if index == 0:
        return 0.0
    if index == len(points):
        return 1.0
    left, right = points[index - 1], points[index]
    return levels[index - 1] + (levels[index] - levels[index - 1]) * (x - left) / (right - left)


def _invert(line: Sequence[tuple[float, float]], level: float) -> float:
    index = bisect.bisect_left(line, level - 1e-12, key=lambda point: point[1])
    if index == 0:
        return line[0][0]
    if index == len(line):
        return line[-1][0]
    (x0, y0), (x1, y1) = line[index - 1], line[index]
    return x0 + (x1 - x0) * (level - y0) / (y1 - y0)
