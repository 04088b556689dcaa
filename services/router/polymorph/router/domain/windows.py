"""One traffic window a pool, folded from telemetry and closed in a steady rhythm."""

import datetime as dt

from polymorph.events.base import Message
from polymorph.events.types import (
    RequestFinished,
    RequestStarted,
    StepsCounted,
    TokensCounted,
    TrafficShapeObserved,
)
from polymorph.router.domain.fleet import Fleet
from polymorph.traffic.fold import Window


class Windows:
    """Pure: the ends come from outside."""

    def __init__(self, fleet: Fleet, start: dt.datetime) -> None:
        self._fleet = fleet
        self._start = start
        self._open: dict[str, Window] = {}
        self._models: dict[str, str] = {}

    def take(self, message: Message) -> None:
        if isinstance(message, RequestStarted | RequestFinished | TokensCounted | StepsCounted):
            window = self._open.get(message.pool)
            if window is None:
                window = self._open[message.pool] = Window(message.pool, self._start)
            window.take(message)

    def close(self, end: dt.datetime) -> list[TrafficShapeObserved]:
        """The windows that end now, without idle ones; the next ones begin."""
        observed: list[TrafficShapeObserved] = []
        for pool, window in list(self._open.items()):
            if window.empty:
                del self._open[pool]
                continue
            observed.append(window.close(end, model=self._model(pool), workers=self._fleet.count(pool)))
            self._open[pool] = window.next(end)
        self._start = end
        return observed

    def _model(self, pool: str) -> str:
        """The model's name, remembered while its workers are gone."""
        known = self._fleet.model_of(pool)
        if known is not None:
            self._models[pool] = known
        return self._models.get(pool, pool)


def next_end(now: dt.datetime, window_s: float) -> dt.datetime:
    """The next multiple of `window_s` since the epoch: every router closes at the same instants."""
    stamp = now.timestamp()
    return dt.datetime.fromtimestamp((stamp // window_s + 1) * window_s, dt.UTC)
