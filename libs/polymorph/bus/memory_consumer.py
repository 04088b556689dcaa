"""A durable consumer of an in-memory bus."""

import asyncio
import contextlib

from polymorph.bus import topology
from polymorph.bus.errors import Fatal
from polymorph.bus.memory_world import Kept, MemoryDurable, MemoryWorld
from polymorph.bus.outcome import Outcome, attempt_message
from polymorph.bus.port import Consumption, DeadLetter, Handler
from polymorph.bus.pullers import run_pullers
from polymorph.bus.waiting import within
from polymorph.config.clock import Clock


class MemoryConsumer:
    """One process's part in a durable consumer."""

    def __init__(self, world: MemoryWorld, clock: Clock, consumption: Consumption, handler: Handler) -> None:
        self._world = world
        self._clock = clock
        self._consumption = consumption
        self._handler = handler
        self._stream = topology.stream_of(consumption.subject)
        key = (self._stream, consumption.durable)
        self._durable = world.durables.setdefault(key, MemoryDurable())

    async def run(self) -> None:
        """Runs until cancelled; the first `Fatal` of a puller ends all."""
        await run_pullers(self._consumption.max_in_flight, self._pull)

    async def _pull(self) -> None:
        while True:
            changed = self._world.changed
            stream = self._world.streams[self._stream]
            now = self._clock.monotonic()
            if not self._world.available:
                await changed.wait()
                continue
            taken = self._durable.take(stream, self._consumption.subject, now)
            if taken is not None:
                await self._take(*taken)
                continue
            due = self._durable.next_due()
            with contextlib.suppress(TimeoutError):
                await within(self._clock, changed.wait(), None if due is None else due - now)

    async def _take(self, kept: Kept, attempt: int) -> None:
        try:
            outcome = await attempt_message(
                kept.body,
                attempt=attempt,
                sequence=kept.sequence,
                consumption=self._consumption,
                handler=self._handler,
            )
        except (asyncio.CancelledError, Fatal):
            self._again(kept, 0.0)
            raise
        self._settle(kept, attempt, outcome)

    def _settle(self, kept: Kept, attempt: int, outcome: Outcome) -> None:
        if outcome.verdict == "again":
            self._again(kept, outcome.delay_s)
            return
        if outcome.verdict == "dead":
            self._world.add_letter(self._letter(kept, attempt, outcome.reason))
        self._durable.attempts.pop(kept.sequence, None)
        if self._stream == topology.JOBS_STREAM:
            self._world.streams[self._stream].remove(kept.sequence)

    def _again(self, kept: Kept, delay_s: float) -> None:
        self._durable.due[kept.sequence] = self._clock.monotonic() + delay_s
        self._world.tell_change()

    def _letter(self, kept: Kept, attempt: int, reason: str) -> DeadLetter:
        return DeadLetter(
            letter_id="",
            subject=kept.subject,
            durable=self._consumption.durable,
            reason=reason,
            attempts=attempt,
            at=self._clock.now(),
            body=kept.body,
        )
