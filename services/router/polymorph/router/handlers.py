"""What the router does with what it hears: questions, heartbeats of workers, telemetry."""

import logging
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from polymorph.bus.errors import BusError
from polymorph.bus.port import KeyValue
from polymorph.config.clock import Clock
from polymorph.events.base import Message
from polymorph.events.requests import Held, Placed, PlaceRequest, Unplaceable
from polymorph.events.state import WorkerRecord
from polymorph.events.types import RequestFinished, RequestStarted
from polymorph.router.adapters import metrics
from polymorph.router.domain.desk import Desk
from polymorph.router.domain.windows import Windows

_log = logging.getLogger(__name__)
Reply = Callable[[bytes], Awaitable[None]]


class Placing:
    """Answers PlaceRequest and keeps those it holds informed."""

    def __init__(self, desk: Desk, clock: Clock) -> None:
        self._desk = desk
        self._clock = clock
        self._replies: dict[str, Reply] = {}

    async def respond(self, body: bytes, reply: Reply) -> None:
        try:
            request = PlaceRequest.model_validate_json(body)
        except ValidationError as error:
            _log.warning("a placement request that is none: %s", error)
            await reply(_encode(Unplaceable(reason="not a PlaceRequest", retry_after_s=1.0)))
            return
        answer = self._desk.arrive(request, self._clock.monotonic())
        metrics.PLACEMENTS.labels(answer.status).inc()
        if isinstance(answer, Held):
            self._replies[request.placement_id] = reply
            metrics.HELD.set(len(self._replies))
        await reply(_encode(answer))

    async def settle(self) -> None:
        """Tells whoever got room, or waited too long."""
        for placement_id, answer in self._desk.settle(self._clock.monotonic()):
            metrics.PLACEMENTS.labels(f"held-then-{answer.status}").inc()
            await self._tell(placement_id, answer)
            self.forget(placement_id)

    async def beat(self) -> None:
        """Tells everyone in line that they are not forgotten."""
        self._desk.tick(self._clock.monotonic())
        await self.settle()
        for placement_id, held in self._desk.beats(self._clock.monotonic()):
            await self._tell(placement_id, held)

    def forget(self, placement_id: str) -> None:
        self._replies.pop(placement_id, None)
        metrics.HELD.set(len(self._replies))

    async def _tell(self, placement_id: str, answer: Placed | Held | Unplaceable) -> None:
        reply = self._replies.get(placement_id)
        if reply is None:
            return
        try:
            await reply(_encode(answer))
        except BusError as error:
            _log.info("placement %s did not hear its answer: %s", placement_id, error)


class Hearing:
    """Keeps the desk and the windows up to date."""

    def __init__(self, desk: Desk, windows: Windows, placing: Placing, clock: Clock) -> None:
        self._desk = desk
        self._windows = windows
        self._placing = placing
        self._clock = clock

    async def telemetry(self, subject: str, message: Message) -> None:
        del subject
        self._windows.take(message)
        if isinstance(message, RequestStarted):
            now = self._clock.monotonic()
            self._desk.started(message.placement_id, message.worker_id, now)
            if message.program_id and message.placed_by != "router":
                self._desk.served_elsewhere(message.pool, message.program_id, message.worker_id, now)
        elif isinstance(message, RequestFinished) and self._desk.finished(message.placement_id):
            self._placing.forget(message.placement_id)
            await self._placing.settle()

    async def worker(self, entry: KeyValue) -> None:
        """One entry of the bucket `workers`; None is a worker that left or expired."""
        if entry.value is None:
            self._desk.worker_gone(entry.key)
        else:
            try:
                record = WorkerRecord.model_validate_json(entry.value)
            except ValidationError as error:
                _log.warning("worker %s has a record that is none: %s", entry.key, error)
                return
            self._desk.worker_seen(record, self._clock.monotonic())
        await self._placing.settle()


def _encode(answer: Placed | Held | Unplaceable) -> bytes:
    return answer.model_dump_json().encode()
