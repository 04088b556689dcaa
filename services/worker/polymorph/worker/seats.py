"""Engines of one worker: opened, seated, drained, stopped, and replaced."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from polymorph.bus.errors import Retryable
from polymorph.config.clock import Clock
from polymorph.engine.launch import EngineLaunch
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.seat import Seat
from polymorph.worker.switchboard import Switchboard
from polymorph.worker.waiting import News

_log = logging.getLogger(__name__)
_TOLD_EVERY_S = 15.0

Opener = Callable[[EngineLaunch], Awaitable[Seat]]
Closer = Callable[[Seat], Awaitable[None]]


class Engines(Protocol):
    """Whoever knows the engine that takes new requests."""

    @property
    def engine(self) -> Engine:
        """Raises `Retryable` where none does at this moment."""
        ...

    @property
    def alive(self) -> bool:
        """Whether an engine takes requests, or soon will."""
        ...

    def runs(self, revision: str) -> None:
        """Says which revision that engine runs from now on."""
        ...


class EngineNotStarted(RuntimeError):
    """An engine does not start with these settings; the text says why."""


class Seats:
    """All engines that live, of which one takes new requests. One engine starts at a time."""

    def __init__(self, switchboard: Switchboard, opener: Opener, closer: Closer, clock: Clock) -> None:
        self._switchboard = switchboard
        self._opener = opener
        self._closer = closer
        self._clock = clock
        self._opening = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        self._bare = False
        self.living: list[Seat] = []
        self.changes = 0
        """How often newcomers went to another seat."""
        self.moved = News()
        """Set when another seat takes requests, or none any more."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when another seat takes requests, or none any more."""

    @property
    def current(self) -> Seat | None:
        return self._switchboard.current

    @property
    def engine(self) -> Engine:
        """The engine that takes new requests.

        Raises:
            Retryable: none does at this moment.
        """
        if self.current is None:
            raise Retryable("the engine is being restarted")
        return self.current.engine

    @property
    def alive(self) -> bool:
        return not self._bare and (self.current is None or self.current.engine.alive)

    def runs(self, revision: str) -> None:
        if self.current is not None:
            self.current.revision = revision

    async def open(self, launch: EngineLaunch) -> Seat:
        """Starts another engine beside those that live; no request goes to it yet.

        Raises:
            EngineNotStarted: it does not start.
        """
        opening = asyncio.create_task(self._open(launch))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(self._unwanted)  # an engine cannot be stopped while it starts
            raise

    async def _open(self, launch: EngineLaunch) -> Seat:
        async with self._opening:
            seat = await self._opener(launch)
            self.living.append(seat)
        return seat

    def _unwanted(self, opening: "asyncio.Task[Seat]") -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.retire(opening.result())

    def seat(self, seat: Seat) -> Seat | None:
        """Newcomers go to `seat`; returns the seat that had them before, which is now to be drained."""
        self.changes += 1
        return self._switch(seat)

    def vacate(self) -> None:
        """No seat takes requests, so that newcomers wait."""
        self._switch(None)

    def _switch(self, seat: Seat | None) -> Seat | None:
        before = self._switchboard.seat(seat)
        self.moved.set()
        self.on_change()
        return before

    def in_flight(self, seat: Seat) -> int:
        """Requests that the engine of `seat` runs, or may be handed."""
        return sum(each.in_flight for each in self._served_by(seat))

    def _served_by(self, seat: Seat) -> list[Seat]:
        """Itself and, where its engine lives, those whose engine died: their requests go on in one that lives."""
        died = [each for each in self.living if each is not seat and not each.engine.alive]
        return [seat, *died] if seat.engine.alive else [seat]

    async def drained(self, seat: Seat, limit_s: float | None = None) -> bool:
        """Waits until nothing is in flight in the engine of `seat`; False where that took longer than `limit_s`.

        No request is ever cut here: who gives up waiting lets the engine live.
        """
        began = self._clock.monotonic()
        while (busy := next((each for each in self._served_by(seat) if each.in_flight), None)) is not None:
            left = _TOLD_EVERY_S
            if limit_s is not None:
                left = min(left, limit_s - (self._clock.monotonic() - began))
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await busy.idle()
                    continue
            _log.info("%d requests are still in flight in the engine that leaves", self.in_flight(seat))
        return True

    async def stop(self, seat: Seat) -> None:
        """Ends the engine of `seat`, dead or alive. Idempotent."""
        if seat not in self.living:
            return
        self.living.remove(seat)
        if self.current is seat:
            self._switch(None)
        await self._closer(seat)

    async def _ended(self, seat: Seat) -> None:
        """Whatever ends with an error there, requests wait for the next one."""
        try:
            await self.stop(seat)
        except Exception:  # noqa: BLE001 - an engine, its application and its folder all end here
            _log.exception("the engine that leaves has not ended as it should; the next one starts")

    def retire(self, seat: Seat) -> None:
        """Drains `seat` for as long as its requests take, then ends its engine."""
        task = asyncio.create_task(self._retire(seat))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def retired(self) -> None:
        """Returns when no seat is being drained: the memory of two engines is all that a change may take."""
        if self._draining:
            await asyncio.wait(set(self._draining))

    async def _retire(self, seat: Seat) -> None:
        await self.drained(seat)
        await self.stop(seat)
        _log.info("the engine that was replaced has ended")

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Newcomers wait meanwhile."""
        self._switchboard.hold()
        try:
            yield
        finally:
            self._switchboard.release()

    async def replace(self, seat: Seat | None, launch: EngineLaunch) -> Seat:
        """Ends `seat`, whatever state its engine is in, and seats a new engine; newcomers wait meanwhile.

        Raises:
            EngineNotStarted: the new engine does not start, and no seat takes requests now.
        """
        self._bare = False
        with self.holding():
            if seat is not None:
                await self._ended(seat)
            try:
                new = await self.open(launch)
            except EngineNotStarted:
                self._bare = True
                raise
            before = self.seat(new)
            if before is not None and before is not seat:  # recovery has seated one meanwhile
                self.retire(before)
            return new

    async def close(self) -> None:
        """Ends every engine."""
        for task in self._draining:
            task.cancel()
        async with self._opening:  # one that starts is waited for: it cannot be stopped before
            for seat in list(self.living):
                await self.stop(seat)
