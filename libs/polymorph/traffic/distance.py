"""How far two traffic shapes are apart, as far as tuning is concerned."""

import math
from dataclasses import dataclass

from polymorph.events.values import Quantiles, TrafficShape

_WEIGHTS = {"prompt": 1.0, "output": 1.0, "concurrency": 0.5, "steps": 4.0, "prefix": 1.0}
_CONCURRENCY_FLOOR = 0.5


@dataclass(frozen=True, slots=True)
class Distance:
    """The parts of a distance, each at least 0, and the whole: the root of their weighted squares.

    `prompt`, `output` and `concurrency` are mean log ratios (0.69 is a factor of 2), `steps` is the total variation of
    the time by tokens a step and `prefix` the difference of hit rates, both in [0, 1]. `steps` is None where one side
    has not been measured in an engine.
    """

    prompt: float
    output: float
    concurrency: float
    prefix: float
    steps: float | None

    @property
    def total(self) -> float:
        squares = (weight * (getattr(self, part) or 0.0) ** 2 for part, weight in _WEIGHTS.items())
        return math.sqrt(sum(squares))


def distance(one: TrafficShape, other: TrafficShape) -> Distance:
    """Symmetric, 0 for equal shapes. Arrival rate and burstiness have no part of their own: they act through
    concurrency and the time by tokens a step.
    """
    return Distance(
        prompt=_lengths(one.prompt_tokens, other.prompt_tokens),
        output=_lengths(one.output_tokens, other.output_tokens),
        concurrency=_log_ratio(one.concurrency, other.concurrency, _CONCURRENCY_FLOOR),
        prefix=abs(one.prefix_hit_rate - other.prefix_hit_rate),
        steps=_total_variation(one.tokens_per_step, other.tokens_per_step),
    )


def _lengths(one: Quantiles, other: Quantiles) -> float:
    pairs = ((one.p10, other.p10, 1.0), (one.p50, other.p50, 2.0), (one.p90, other.p90, 1.0))
    return sum(weight * _log_ratio(a, b, 1.0) for a, b, weight in pairs) / 4.0


def _log_ratio(a: float, b: float, floor: float) -> float:
    return abs(math.log((a + floor) / (b + floor)))


def _total_variation(one: dict[str, float], other: dict[str, float]) -> float | None:
    if not one or not other:
        return None
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys()) / 2
