"""Several windows of one pool as one shape, so that a few requests a window still add up to evidence."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from polymorph.events.types import TrafficShapeObserved
from polymorph.events.values import Operation, StepTime, TrafficShape
from polymorph.traffic.operations import Operations
from polymorph.traffic.sketch import mixture


def merge(windows: Sequence[TrafficShapeObserved]) -> TrafficShape:
    """One shape for consecutive windows.

    What describes requests weighs by requests, what describes time by seconds; a window without steps has no say in
    the time by tokens a step.

    Raises:
        ValueError: no windows.
    """
    if not windows:
        raise ValueError("a shape needs at least one window")
    seconds = sum(window.window_s for window in windows)
    requests = sum(window.shape.requests for window in windows)

    def by_time(value: Callable[[TrafficShape], float]) -> float:
        return sum(value(window.shape) * window.window_s for window in windows) / seconds

    def by_requests(value: Callable[[TrafficShape], float]) -> float:
        return sum(value(window.shape) * window.shape.requests for window in windows) / (requests or 1)

    return TrafficShape(
        requests=requests,
        arrival_rate=by_time(lambda shape: shape.arrival_rate),
        burstiness=by_time(lambda shape: shape.burstiness),
        concurrency=by_time(lambda shape: shape.concurrency),
        prompt_tokens=mixture([(w.shape.requests, w.shape.prompt_tokens) for w in windows]),
        output_tokens=mixture([(w.shape.requests, w.shape.output_tokens) for w in windows]),
        prefix_hit_rate=by_requests(lambda shape: shape.prefix_hit_rate),
        tokens_per_step=_shares([(w.window_s, w.shape.tokens_per_step) for w in windows]),
        domains=_shares([(w.shape.requests, w.shape.domains) for w in windows]),
    )


def merge_operations(windows: Sequence[TrafficShapeObserved]) -> tuple[Operation, ...]:
    """Where the engines' time went in all of these windows; one that tells no step time weighs by its length."""
    merged = Operations()
    for window in windows:
        if window.operations:
            merged.add(window.operations, window.step_s or window.window_s)
    return merged.shares()


def merge_step_time(windows: Sequence[TrafficShapeObserved]) -> StepTime | None:
    """Where profiled steps of all these windows spent their time; None where none was profiled."""
    told = [(window.step_s or window.window_s, window.step_time) for window in windows if window.step_time]
    if not told:
        return None
    shares = _shares([(weight, each.shares) for weight, each in told])
    total = sum(weight for weight, _ in told)
    return StepTime(
        shares=dict(sorted(shares.items(), key=lambda item: (-item[1], item[0]))),
        reachable=min(1.0, sum(weight * each.reachable for weight, each in told) / total),
        sampled_steps=sum(each.sampled_steps for _, each in told),
    )


def _shares(parts: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    total = 0.0
    for weight, shares in parts:
        if shares:
            total += weight
            for key, share in shares.items():
                sums[key] += weight * share
    return {key: value / total for key, value in sums.items()} if total else {}
