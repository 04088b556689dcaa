"""What to search: which operation, for which buckets of M, ordered by what it may win."""

from collections.abc import Callable, Iterable, Mapping

from polymorph.compiler.domain.search_share import Profiled, Share, measured
from polymorph.events.types import TrafficShapeObserved
from polymorph.events.values import Value
from polymorph.kernels.buckets import UPPER_BOUNDS, lower_bound

COVERAGE = 0.8
"""The share of step time that the chosen buckets must carry together."""
NEIGHBOUR = 0.02
"""A bucket beside a chosen one joins it from this share on: traffic breathes."""
WIDEST = 16
"""The largest ratio of M within one range: a kernel for one token is no kernel for a thousand."""

Headroom = Callable[[str, int, int], float]
"""(definition, min_m, max_m) -> the part of the operation's time that a better kernel may save, in [0, 1)."""


class Span(Value):
    """A contiguous range of buckets with the share of step time spent in it."""

    min_m: int
    max_m: int
    weight: float


class Target(Value):
    """One search to run."""

    definition: str
    min_m: int
    max_m: int
    share: float
    span_weight: float
    gain: float
    profiled: Profiled | None = None


def is_bucket(name: str) -> bool:
    return name in _NAMES


def spans(tokens_per_step: Mapping[str, float]) -> tuple[Span, ...]:
    """The bucket ranges that carry at least `COVERAGE` of the step time, heaviest first.

    `tokens_per_step` is that of a TrafficShape; entries that name no bucket are refused with ValueError.
    """
    weights = _normalised(tokens_per_step)
    chosen = _heaviest(weights)
    grown = {
        b for b in weights if b in chosen or (weights[b] >= NEIGHBOUR and any(_near(b, c) for c in chosen))
    }
    ranges = [_span(run, weights) for run in _runs(sorted(grown))]
    return tuple(sorted(ranges, key=lambda s: (-s.weight, s.min_m)))


def plan(
    window: TrafficShapeObserved, headroom: Headroom, *, least_gain: float, limit: int, largest_m: int
) -> tuple[Target, ...]:
    """The searches that this window asks for, by expected gain, those below `least_gain` left out.

    Ranges end at `largest_m`: what cannot be confirmed beyond it is not searched for.
    The gain is the part of all step time that goes away if the operation's headroom is won in that range: share of
    the operation x share of the range x headroom (Amdahl); so never more than the operation's share, as profiled steps
    tell it, or the slots' timers where none was profiled. Ranges are those of the operation's own M where the workers
    tell it, else those of the steps.
    """
    shares = measured(window.operations, window.step_time)
    found = [
        target
        for operation in window.operations
        if (by_m := operation.by_m or window.shape.tokens_per_step)
        for whole in spans(by_m)
        if (span := within(whole, by_m, largest_m)) is not None
        if (target := _target(operation.definition, shares[operation.definition], span, headroom)).gain
        >= least_gain
    ]
    return tuple(sorted(found, key=lambda t: (-t.gain, t.definition, t.min_m))[:limit])


def within(span: Span, tokens_per_step: Mapping[str, float], largest_m: int) -> Span | None:
    """The part of a range up to `largest_m`, with the step time of that part; None where there is none."""
    if span.max_m <= largest_m:
        return span
    weights = {
        upper: w for upper, w in _normalised(tokens_per_step).items() if span.min_m <= upper <= largest_m
    }
    if not weights:
        return None
    return Span(min_m=span.min_m, max_m=max(weights), weight=sum(weights.values()))


def _target(definition: str, share: Share, span: Span, headroom: Headroom) -> Target:
    return Target(
        definition=definition,
        min_m=span.min_m,
        max_m=span.max_m,
        share=share.share,
        span_weight=span.weight,
        gain=share.share * span.weight * headroom(definition, span.min_m, span.max_m),
        profiled=share.profiled,
    )


def _normalised(tokens_per_step: Mapping[str, float]) -> dict[int, float]:
    unknown = [name for name in tokens_per_step if name not in _NAMES]
    if unknown:
        raise ValueError(f"tokens_per_step names {unknown}: a bucket is one of {', '.join(_NAMES)}")
    total = sum(tokens_per_step.values())
    return {_NAMES[name]: weight / total for name, weight in tokens_per_step.items() if weight > 0}


def _heaviest(weights: Mapping[int, float]) -> set[int]:
    """The fewest buckets that reach the coverage."""
    chosen: set[int] = set()
    covered = 0.0
    for upper, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if covered >= COVERAGE - 1e-9:
            break
        chosen.add(upper)
        covered += weight
    return chosen


def _near(one: int, other: int) -> bool:
    """Neighbours, or with one bucket between them."""
    return 0 < abs(UPPER_BOUNDS.index(one) - UPPER_BOUNDS.index(other)) <= 2


def _runs(buckets: Iterable[int]) -> list[list[int]]:
    """Neighbouring buckets together (one empty bucket between them is bridged), none wider than `WIDEST`."""
    runs: list[list[int]] = []
    for upper in buckets:
        if runs and _near(runs[-1][-1], upper) and upper <= WIDEST * runs[-1][0]:
            runs[-1].append(upper)
        else:
            runs.append([upper])
    return runs


def _span(run: list[int], weights: Mapping[int, float]) -> Span:
    inside = sum(weight for upper, weight in weights.items() if run[0] <= upper <= run[-1])
    return Span(min_m=lower_bound(run[0]), max_m=run[-1], weight=inside)


_NAMES = {str(upper): upper for upper in UPPER_BOUNDS}
