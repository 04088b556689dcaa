"""What the engine counted, on its way to the bus; lost without harm while there is none."""

import collections
from collections.abc import Callable

from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.engine.loading.counters import NOTHING, Counters
from polymorph.events.types import TokensCounted
from polymorph.worker.adapters.stats import FinishedRequest, StatSink
from polymorph.worker.domain.request_ids import client_request_id
from polymorph.worker.domain.steps import Load, StepTally

_KEPT_REQUESTS = 10_000
FLUSH_S = 0.25
REPORT_S = 1.0


class EngineSink:
    """The `StatSink` of one engine, which may live beside another."""

    def __init__(self, telling: "Telling") -> None:
        self._telling = telling
        self.load = Load()

    def stepped(self, tokens: int, seconds: float) -> None:
        self._telling.stepped(tokens, seconds)

    def produced(self, tokens: int) -> None:
        self._telling.produced(tokens)

    def loaded(self, load: Load) -> None:
        self.load = load
        self._telling.weigh()

    def finished(self, request: FinishedRequest) -> None:
        self._telling.finished(request)


class Telling:
    """What all engines counted: each finished request is told within a quarter of a second, steps every second."""

    def __init__(self, pool: str, worker_id: str, clock: Clock, revision: Callable[[], str]) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._clock = clock
        self._revision = revision
        self._tally = StepTally()
        self._requests: collections.deque[TokensCounted] = collections.deque(maxlen=_KEPT_REQUESTS)
        self._sinks: list[EngineSink] = []
        self._before = NOTHING
        self.counted = NOTHING
        """As read last."""
        self._reported_at = clock.monotonic()

    @property
    def load(self) -> Load:
        return self._tally.load

    @property
    def idle(self) -> bool:
        """Whether the engine did nothing since the last report."""
        return self._tally.steps == 0

    def stepped(self, tokens: int, seconds: float) -> None:
        self._tally.step(tokens, seconds)

    def produced(self, tokens: int) -> None:
        self._tally.output_tokens += tokens

    def open(self) -> EngineSink:
        """For an engine that starts."""
        sink = EngineSink(self)
        self._sinks.append(sink)
        return sink

    def close(self, sink: StatSink) -> None:
        """That engine is gone."""
        self._sinks = [each for each in self._sinks if each is not sink]
        self.weigh()

    def weigh(self) -> None:
        """The load of the worker is that of all its engines; the cache counted is the fullest."""
        loads = [sink.load for sink in self._sinks]
        self._tally.load = Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_used=max((load.kv_used for load in loads), default=0.0),
        )

    def renew(self) -> None:
        """The counters read from now on are another engine's, which began at nothing."""
        self._before = NOTHING

    def finished(self, request: FinishedRequest) -> None:
        request_id = client_request_id(request.engine_id)
        if request_id is None:
            return
        self._requests.append(
            TokensCounted(
                pool=self._pool,
                worker_id=self._worker_id,
                request_id=request_id,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
                output_tokens=request.output_tokens,
                ttft_s=request.ttft_s,
                tpot_s=request.tpot_s,
                at=self._clock.now(),
            )
        )

    async def flush(self, bus: Bus) -> None:
        while self._requests:
            await bus.tell(self._requests.popleft())

    async def flush_last(self, bus: Bus | None) -> None:
        """Before the worker goes."""
        if bus is not None:
            await self.flush(bus)

    async def report(self, bus: Bus, counters: Counters | None) -> None:
        """Tells the steps since the last report; `counters` is None where nothing was computed since."""
        now = self._clock.monotonic()
        counted = NOTHING if counters is None else counters.since(self._before)
        self._before = counters or self._before
        self.counted = self._before
        report = self._tally.report(
            pool=self._pool,
            worker_id=self._worker_id,
            at=self._clock.now(),
            interval_s=now - self._reported_at,
            counted=counted,
            revision=self._revision(),
        )
        self._reported_at = now
        await bus.tell(report)
