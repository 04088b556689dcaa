"""The bus, which may not be there yet: the gateway serves before it, and without it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0


class Connected(Bus, Protocol):
    """A bus over one connection."""

    async def lost(self) -> None:
        """Waits until the connection is closed for good, and raises `Fatal` then."""
        ...


class Link:
    """Connects in the background for as long as it takes, and anew where a connection is closed for good."""

    def __init__(self, connect: Callable[[], Awaitable[Connected]]) -> None:
        self._connect = connect
        self._bus: Connected | None = None
        self._there = asyncio.Event()

    @property
    def bus(self) -> Bus | None:
        """None without a connection; with one the bus itself tells whether its server is away."""
        return self._bus

    async def wait(self) -> Bus:
        """The bus of now; whoever keeps it longer than a call asks again when it fails."""
        while self._bus is None:
            await self._there.wait()
        return self._bus

    async def run(self) -> None:
        """Connects for ever. A server that is away is the bus's own business; a connection closed for good is ours."""
        while True:
            try:
                await self._use(await self._connect())
            except BusError as error:
                _log.warning("no bus, trying again in %g s: %s", _AGAIN_S, error)
            await asyncio.sleep(_AGAIN_S)

    async def _use(self, bus: Connected) -> None:
        self._bus = bus
        self._there.set()
        _log.info("the bus is there")
        try:
            await bus.lost()
        except BusError:
            self._bus = None
            self._there.clear()
            await bus.close()
            raise

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()
