"""A lease in key-value: of several routers, one publishes windows."""

import logging
from collections.abc import Awaitable

from polymorph.bus import topology
from polymorph.bus.errors import BusError, Conflict, NotFound
from polymorph.bus.port import Bus

_log = logging.getLogger(__name__)


class Lease:
    """Held by whoever put its name there last within the bucket's time to live; renewed by compare-and-set."""

    def __init__(self, bus: Bus, key: str, holder: str) -> None:
        self._bus = bus
        self._key = key
        self._holder = holder.encode()
        self.held = False

    async def renew(self) -> bool:
        """Takes or keeps the lease; whether it is ours now. Without an answer it is not."""
        try:
            self.held = await self._renew()
        except BusError as error:
            _log.info("lease %s: %s", self._key, error)
            self.held = False
        return self.held

    async def give_up(self) -> None:
        """Lets the next one have it at once."""
        if self.held:
            self.held = False
            try:
                await self._bus.kv_delete(topology.LEASES, self._key)
            except BusError as error:
                _log.info("lease %s stays until it expires: %s", self._key, error)

    async def _renew(self) -> bool:
        try:
            entry = await self._bus.kv_get(topology.LEASES, self._key)
        except NotFound:
            return await self._won(self._bus.kv_create(topology.LEASES, self._key, self._holder))
        if entry.value == self._holder:
            return await self._won(
                self._bus.kv_update(topology.LEASES, self._key, self._holder, entry.revision)
            )
        if entry.value is None:
            return await self._won(self._bus.kv_create(topology.LEASES, self._key, self._holder))
        return False

    async def _won(self, attempt: Awaitable[int]) -> bool:
        try:
            await attempt
        except Conflict:
            return False
        return True
