"""The bus, which may not be there yet: the gateway serves before it, and without it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from polymorph.bus.errors import BusError, Unavailable
from polymorph.bus.port import Bus

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0


class Link:
    """Connects in the background for as long as it takes."""

    def __init__(self, connect: Callable[[], Awaitable[Bus]]) -> None:
        self._connect = connect
        self._bus: Bus | None = None
        self._there = asyncio.Event()

    @property
    def bus(self) -> Bus | None:
        """None until the first connection; later the bus itself tells whether its server is away."""
        return self._bus

    async def wait(self) -> Bus:
        await self._there.wait()
        if self._bus is None:
            raise Unavailable("the bus was closed")
        return self._bus

    async def run(self) -> None:
        """Ends with the first connection: from then on the bus reconnects by itself."""
        while self._bus is None:
            try:
                self._bus = await self._connect()
            except BusError as error:
                _log.warning("no bus yet: %s", error)
                await asyncio.sleep(_AGAIN_S)
        self._there.set()

    async def close(self) -> None:
        if self._bus is not None:
            await self._bus.close()
