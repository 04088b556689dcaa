"""Says when traffic has left the shape that a revision was tuned for."""

import hashlib
from collections import deque
from dataclasses import dataclass

from polymorph.events.types import DriftDetected, TrafficShapeObserved
from polymorph.events.values import TrafficShape
from polymorph.traffic.distance import Distance, distance
from polymorph.traffic.merge import merge, merge_operations, merge_step_time
from polymorph.traffic.reason import never_tuned, why


@dataclass(frozen=True, slots=True)
class DriftRules:
    """When a difference counts.

    A shape is judged over the last windows that together hold `min_requests`, at most `max_windows` of them.
    `consecutive` judgements in a row, each with requests of its own, must stand beyond `threshold`; then it is quiet until the distance has been below
    `rearm` times the threshold, or the shape it is compared with changes.
    """

    threshold: float = 1.5
    rearm: float = 0.7
    consecutive: int = 3
    min_requests: int = 16
    max_windows: int = 24


class DriftDetector:
    """Watches the windows of one pool. Pure: it knows no time but that of the windows."""

    def __init__(self, rules: DriftRules | None = None) -> None:
        self._rules = rules or DriftRules()
        self._recent: deque[TrafficShapeObserved] = deque(maxlen=self._rules.max_windows)
        self._tuned_for: TrafficShape | None = None
        self._beyond = 0
        self._armed = True

    def observe(self, window: TrafficShapeObserved, tuned_for: TrafficShape | None) -> DriftDetected | None:
        """Judges one more window against `tuned_for` (None: never tuned)."""
        if tuned_for != self._tuned_for:
            self._tuned_for = tuned_for
            self._beyond, self._armed = 0, True
        if self._recent and window.window_start <= self._recent[-1].window_start:
            return None  # told again
        self._recent.append(window)
        if not window.shape.requests:
            return None  # the same requests are no further evidence
        evidence = self._evidence()
        if evidence is None:
            return None
        observed = merge(evidence)
        found = (
            self._untuned(window, observed) if tuned_for is None else self._judge(window, tuned_for, observed)
        )
        where = {"operations": merge_operations(evidence), "step_time": merge_step_time(evidence)}
        return found and found.model_copy(update=where)

    def _evidence(self) -> list[TrafficShapeObserved] | None:
        taken: list[TrafficShapeObserved] = []
        requests = 0
        for window in reversed(self._recent):
            taken.append(window)
            requests += window.shape.requests
            if requests >= self._rules.min_requests:
                return taken[::-1]
        return None

    def _untuned(self, window: TrafficShapeObserved, observed: TrafficShape) -> DriftDetected | None:
        self._beyond += 1
        if not self._armed or self._beyond < self._rules.consecutive:
            return None
        self._armed = False
        return self._event(window, None, observed, self._rules.threshold, never_tuned(observed))

    def _judge(
        self, window: TrafficShapeObserved, tuned_for: TrafficShape, observed: TrafficShape
    ) -> DriftDetected | None:
        parts: Distance = distance(tuned_for, observed)
        if parts.total < self._rules.threshold * self._rules.rearm:
            self._armed = True
        if parts.total < self._rules.threshold:
            self._beyond = 0
            return None
        self._beyond += 1
        if not self._armed or self._beyond < self._rules.consecutive:
            return None
        self._armed = False
        return self._event(window, tuned_for, observed, parts.total, why(tuned_for, observed, parts))

    def _event(
        self,
        window: TrafficShapeObserved,
        tuned_for: TrafficShape | None,
        observed: TrafficShape,
        how_far: float,
        reason: str,
    ) -> DriftDetected:
        name = f"{window.pool}\n{window.window_start.isoformat()}"
        return DriftDetected(
            pool=window.pool,
            drift_id=f"drift-{hashlib.sha256(name.encode()).hexdigest()[:12]}",
            window_start=window.window_start,
            distance=how_far,
            threshold=self._rules.threshold,
            windows=self._beyond,
            reason=reason,
            tuned_for=tuned_for,
            observed=observed,
        )
