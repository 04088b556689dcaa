"""A seat: one engine, its HTTP application, and the requests that are in flight in it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from polymorph.engine.launch import EngineLaunch
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.adapters.stats import StatSink

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(eq=False)
class Seat:
    """Made by `Seats.open`. `revision` is what the engine runs now: whoever engages it writes it here."""

    engine: Engine
    app: Application
    launch: EngineLaunch
    sink: StatSink
    definitions: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    revision: str = "empty"
    in_flight: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Counts a request for as long as it runs."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no request is in flight; the caller bounds the wait."""
        while self.in_flight:
            await self._idle.wait()
