"""Folds what gateways and workers saw into one window of one pool's traffic."""

import datetime as dt
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from polymorph.events.base import Message
from polymorph.events.types import (
    RequestFinished,
    RequestStarted,
    StepsCounted,
    TokensCounted,
    TrafficShapeObserved,
)
from polymorph.events.values import Operation, StepTime, TrafficShape
from polymorph.traffic.operations import Operations
from polymorph.traffic.sketch import ZERO, Sketch
from polymorph.traffic.step_time import StepTimes

_FORGOTTEN_AFTER_S = 900.0
_MAX_GAPS = 8192


class Window:
    """What happened in a pool since `start`. Pure: times come with the messages, the end with `close`."""

    def __init__(
        self, pool: str, start: dt.datetime, carried: Mapping[str, dt.datetime] | None = None
    ) -> None:
        self.pool = pool
        self.start = start
        self._in_flight: dict[str, dt.datetime] = dict(carried or {})
        self._last_arrival: dt.datetime | None = max(self._in_flight.values(), default=None)
        self._arrivals = 0
        self._gaps: list[float] = []
        self._busy_s = 0.0
        self._prompt, self._output, self._ttft, self._tpot = Sketch(), Sketch(), Sketch(), Sketch()
        self._prompt_sum = self._cached_sum = self._output_sum = 0
        self._domains: Counter[str] = Counter()
        self._steps = _Steps()

    @property
    def empty(self) -> bool:
        """Nothing arrived, ran or ended."""
        return not any(
            (self._arrivals, self._in_flight, self._busy_s, self._prompt.count, self._steps.step_s)
        )

    def take(self, message: Message) -> None:
        """Folds one message in; messages of other kinds are none of a window's business."""
        match message:
            case RequestStarted():
                self._started(message)
            case RequestFinished():
                self._finished(message)
            case TokensCounted():
                self._counted(message)
            case StepsCounted():
                self._steps.take(message)
            case _:
                pass

    def close(self, end: dt.datetime, *, model: str, workers: int) -> TrafficShapeObserved:
        """The window that ends at `end` as an event."""
        seconds = max((end - self.start).total_seconds(), 1e-3)
        return TrafficShapeObserved(
            pool=self.pool,
            model=model,
            window_start=self.start,
            window_s=seconds,
            shape=self._shape(end, seconds),
            ttft_s=self._ttft.quantiles(),
            tpot_s=self._tpot.quantiles(),
            output_tokens_per_s=(self._steps.output_tokens or self._output_sum) / seconds,
            step_s=self._steps.step_s,
            operations=self._steps.operations(),
            step_time=self._steps.step_time(),
            workers=workers,
            revision=self._steps.revision,
        )

    def next(self, start: dt.datetime) -> "Window":
        """The window that follows; what is still in flight goes on in it."""
        fresh = {
            placement_id: at
            for placement_id, at in self._in_flight.items()
            if (start - at).total_seconds() < _FORGOTTEN_AFTER_S
        }
        following = Window(self.pool, start, fresh)
        following._last_arrival = self._last_arrival
        return following

    def _started(self, message: RequestStarted) -> None:
        if message.placement_id in self._in_flight:
            return  # sent again to another worker: one request, one arrival
        self._in_flight[message.placement_id] = message.at
        self._arrivals += 1
        if self._last_arrival is not None and len(self._gaps) < _MAX_GAPS:
            self._gaps.append(max(0.0, (message.at - self._last_arrival).total_seconds()))
        self._last_arrival = message.at

    def _finished(self, message: RequestFinished) -> None:
        started = self._in_flight.pop(message.placement_id, None)
        if started is not None:
            self._busy_s += max(0.0, (message.at - max(started, self.start)).total_seconds())

    def _counted(self, message: TokensCounted) -> None:
        self._prompt.add(message.prompt_tokens)
        self._output.add(message.output_tokens)
        self._prompt_sum += message.prompt_tokens
        self._cached_sum += message.cached_tokens
        self._output_sum += message.output_tokens
        self._domains[message.domain] += 1
        if message.ttft_s is not None:
            self._ttft.add(message.ttft_s)
        if message.tpot_s is not None:
            self._tpot.add(message.tpot_s)

    def _shape(self, end: dt.datetime, seconds: float) -> TrafficShape:
        still = sum(max(0.0, (end - max(at, self.start)).total_seconds()) for at in self._in_flight.values())
        counted = self._prompt.count
        return TrafficShape(
            requests=counted,
            arrival_rate=self._arrivals / seconds,
            burstiness=_burstiness(self._gaps),
            concurrency=(self._busy_s + still) / seconds,
            prompt_tokens=self._prompt.quantiles() or ZERO,
            output_tokens=self._output.quantiles() or ZERO,
            prefix_hit_rate=self._cached_sum / self._prompt_sum if self._prompt_sum else 0.0,
            tokens_per_step=self._steps.shares(),
            domains={domain: count / counted for domain, count in sorted(self._domains.items())},
        )


class _Steps:
    """What the engines of a pool did in a window; shares weigh by the time of their steps."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.output_tokens = 0
        self.revision = "empty"
        self._by_m: defaultdict[str, float] = defaultdict(float)
        self._operations = Operations()
        self._step_times = StepTimes()

    def take(self, message: StepsCounted) -> None:
        self.step_s += message.step_s
        self.output_tokens += message.output_tokens
        self.revision = message.revision
        for m, seconds in message.step_s_by_m.items():
            self._by_m[m] += seconds
        self._operations.add(message.operations, message.step_s)
        self._step_times.add(message.sampled_by_m)

    def shares(self) -> dict[str, float]:
        total = sum(self._by_m.values())
        return {m: s / total for m, s in sorted(self._by_m.items(), key=_by_number)} if total else {}

    def operations(self) -> tuple[Operation, ...]:
        return self._operations.shares()

    def step_time(self) -> StepTime | None:
        return self._step_times.told(self._by_m)


def _by_number(item: tuple[str, float]) -> tuple[int, str]:
    return (int(item[0]) if item[0].isdigit() else 0, item[0])


def _burstiness(gaps: Sequence[float]) -> float:
    """The squared coefficient of variation of the gaps; 1 (Poisson) where fewer than two gaps say nothing."""
    if len(gaps) < 2:
        return 1.0
    mean = statistics.fmean(gaps)
    return statistics.pvariance(gaps, mean) / mean**2 if mean else 0.0
