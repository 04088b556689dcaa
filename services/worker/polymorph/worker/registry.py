"""The worker's entry among the live workers: put anew every two seconds, gone by itself when we are."""

import contextlib
import logging
from collections.abc import Callable

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.events.state import WorkerRecord

_log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0


class Registry:
    """Keeps `record()` in the bucket of workers."""

    def __init__(self, record: Callable[[], WorkerRecord], clock: Clock) -> None:
        self._record = record
        self._clock = clock

    async def keep(self, bus: Bus) -> None:
        """Runs until cancelled."""
        while True:
            await self.put(bus)
            await self._clock.sleep(HEARTBEAT_S)

    async def put(self, bus: Bus) -> None:
        record = self._record()
        try:
            await bus.kv_put(topology.WORKERS, record.worker_id, record.model_dump_json().encode())
        except BusError as error:
            _log.info("not registered: %s", error)

    async def remove(self, bus: Bus) -> None:
        with contextlib.suppress(BusError):
            await bus.kv_delete(topology.WORKERS, self._record().worker_id)
