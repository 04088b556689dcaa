"""Restarts of a pool's engines, one worker at a time: capacity is never below all but one."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import BusError, Conflict, NotFound, Retryable
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.events.state import WorkerRecord
from polymorph.worker import tries
from polymorph.worker.registry import HEARTBEAT_S
from polymorph.worker.seat import Seat
from polymorph.worker.seats import Seats
from polymorph.worker.waiting import Waiting

_log = logging.getLogger(__name__)
_RENEW_S = topology.LEASES_TTL_S / 3
_TURN_POLL_S = 1.0
_HELD_DRAIN_SHARE = 0.1
_BETWEEN_TRIES_S = 60.0


@dataclass
class Turn:
    """`stood_s` is how long newcomers were held, in the end."""

    stood_s: float = 0.0


class Rolling:
    """A worker's part in a rolling restart.

    `leaving(True)` makes the registry say that this worker drains, so that the router sends elsewhere.
    """

    def __init__(
        self,
        pool: str,
        worker_id: str,
        clock: Clock,
        bus: Callable[[], Bus | None],
        leaving: Callable[[bool], Awaitable[None]],
        hold_s: float,
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._clock = clock
        self._bus = bus
        self._leaving = leaving
        self._hold_s = hold_s
        self._again_at = clock.monotonic()

    @contextlib.asynccontextmanager
    async def turn(self, seats: Seats, waiting: Waiting) -> AsyncIterator[Turn]:
        """Inside, this worker alone of its pool is drained and may be restarted; newcomers wait.

        Raises:
            Retryable: no bus to take turns by, another worker without an engine at this moment, or requests in flight
                that take too long for newcomers to wait.
            Overtaken: something else should come than what the turn is for, or the engine died.
        """
        turn = Turn()
        await waiting.on(self._clock.sleep(max(0.0, self._again_at - self._clock.monotonic())))
        async with self._lease(waiting):
            others = await self._others()
            try:
                await self._leaving(True)
                if others:
                    await waiting.on(self._clock.sleep(HEARTBEAT_S))  # until the router knows
                    await waiting.on(self._emptied(seats))
                held = self._clock.monotonic()
                with seats.holding():
                    await waiting.on(self._drained(seats, others))
                    yield turn
                    turn.stood_s = self._clock.monotonic() - held
            finally:
                await self._leaving(False)

    async def _emptied(self, seats: Seats) -> None:
        """Others take what comes: the requests here may take as long as they like."""
        if seats.current is not None:
            await _while_it_serves(seats, seats.current, None)

    async def _drained(self, seats: Seats, others: int) -> None:
        seat = seats.current
        limit_s = self._hold_s * _HELD_DRAIN_SHARE
        if seat is not None and not await _while_it_serves(seats, seat, limit_s):
            self._again_at = self._clock.monotonic() + _BETWEEN_TRIES_S
            raise Retryable(
                f"{seats.in_flight(seat)} requests did not end within {limit_s:.0f} s, and {others} other workers "
                "could take newcomers: the restart waits for a quieter moment"
            )

    async def _others(self) -> int:
        """Ready workers of this pool beside this one. One that will be ready again soon is waited for."""
        others = [each for each in await self._records() if each.worker_id != self._worker_id]
        restarting = [each.worker_id for each in others if each.holds]
        if restarting:
            raise Retryable(f"{', '.join(restarting)} has no engine at this moment: one restarts at a time")
        return sum(each.state == "ready" for each in others)

    async def _records(self) -> list[WorkerRecord]:
        bus = self._needed()
        found = []
        for key in await bus.kv_keys(topology.WORKERS):
            try:
                value = (await bus.kv_get(topology.WORKERS, key)).value or b""
                found.append(WorkerRecord.model_validate_json(value))
            except NotFound:
                continue
            except ValidationError as error:  # of another release, say: it is no worker that could take over
                _log.warning("the record of worker %s cannot be read: %s", key, error.errors()[0]["msg"])
        return [each for each in found if each.pool == self._pool]

    @contextlib.asynccontextmanager
    async def _lease(self, waiting: Waiting) -> AsyncIterator[None]:
        revision = await self._taken(waiting)
        renewing = asyncio.create_task(self._renewed(revision))
        try:
            yield
        finally:
            renewing.cancel()
            with contextlib.suppress(BusError):
                await self._given_back()

    async def _taken(self, waiting: Waiting) -> int:
        told = False
        while True:
            try:
                return await self._needed().kv_create(topology.RESTARTS, self._pool, self._worker_id.encode())
            except Conflict:
                if not told:
                    _log.info("another worker of the pool restarts; this one waits for its turn")
                told = True
                # Not the call: a lease that is taken while nobody waits for it would be held for its whole TTL.
                await waiting.on(self._clock.sleep(_TURN_POLL_S))

    async def _given_back(self) -> None:
        """One that ran out meanwhile may be another worker's by now."""
        bus = self._needed()
        if (await bus.kv_get(topology.RESTARTS, self._pool)).value == self._worker_id.encode():
            await bus.kv_delete(topology.RESTARTS, self._pool)

    async def _renewed(self, revision: int) -> None:
        async def renew() -> None:
            nonlocal revision
            try:
                revision = await self._needed().kv_update(
                    topology.RESTARTS, self._pool, self._worker_id.encode(), revision
                )
            except BusError as error:
                # The engine may be down already: what was begun is finished, and the lease ends by itself.
                _log.warning("the restart's lease is not renewed: %s", error)

        while True:
            await self._clock.sleep(_RENEW_S)
            await tries.tried("the lease of a restart", renew)

    def _needed(self) -> Bus:
        bus = self._bus()
        if bus is None:
            raise Retryable("a restart takes turns over the bus, and there is none")
        return bus


async def _while_it_serves(seats: Seats, seat: Seat, limit_s: float | None) -> bool:
    """As `Seats.drained`. Where its engine dies, the requests go on in the next, which is not the one to be changed."""
    gone = f"the engine that {seats.in_flight(seat)} requests were to end in takes no requests any more"
    here = Waiting(seats.moved, lambda: None if seats.current is seat else gone)
    return await here.on(seats.drained(seat, limit_s))
