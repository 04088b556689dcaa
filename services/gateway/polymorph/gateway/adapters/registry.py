"""Keeps the fleet: from the registry, from direct probes, and from a file that outlives both."""

import asyncio
import contextlib
import logging
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import KeyValue
from polymorph.config.clock import Clock
from polymorph.events.state import WorkerRecord
from polymorph.gateway.adapters.connection import ConnectFailed, UpstreamError
from polymorph.gateway.adapters.forwarding import sends_elsewhere
from polymorph.gateway.adapters.link import Link
from polymorph.gateway.adapters.static import StaticWorkers
from polymorph.gateway.adapters.upstream import Upstreams, origin
from polymorph.gateway.domain.fleet import Fleet

_log = logging.getLogger(__name__)
_RECORDS = TypeAdapter(list[WorkerRecord])
_AGAIN_S = 0.5


class Registry:
    """Runs beside the requests; the fleet is all that they see of it."""

    def __init__(
        self,
        fleet: Fleet,
        link: Link,
        upstreams: Upstreams,
        static: StaticWorkers,
        clock: Clock,
        *,
        file: Path,
        probe_interval_s: float,
        probe_timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._link = link
        self._upstreams = upstreams
        self._static = static
        self._clock = clock
        self._file = file
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s
        self._look = asyncio.Event()
        self._changed = asyncio.Event()

    def doubt(self, worker_id: str) -> None:
        """A request could not reach this worker: probe it now."""
        self._fleet.doubt(worker_id, self._clock.monotonic())
        self._look.set()

    def load(self) -> None:
        """Remembers the workers of an earlier run."""
        try:
            records = _RECORDS.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            _log.warning("%s is of no use: %s", self._file, error)
            return
        for record in records:
            self._fleet.remember(record, self._clock.monotonic())

    async def watch(self) -> None:
        """Follows the registry for ever."""
        while True:
            bus = await self._link.wait()
            try:
                async for entry in bus.kv_watch(topology.WORKERS):
                    self._take(entry)
            except BusError as error:
                _log.info("the registry is away: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def probe(self) -> None:
        """Looks at suspects and at workers that only settings name, for ever."""
        while True:
            self._look.clear()
            await self._static.learn(self._fleet, self._upstreams, self._probe_timeout_s)
            await asyncio.gather(*map(self._probe_one, self._fleet.to_probe(self._clock.monotonic())))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._probe_interval_s):
                    await self._look.wait()

    async def save(self) -> None:
        """Writes the fleet to disk after each change, outside the event loop's thread."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            content = _RECORDS.dump_json(self._fleet.records())
            try:
                await asyncio.to_thread(_write, self._file, content)
            except OSError as error:
                _log.warning("the workers could not be kept in %s: %s", self._file, error)
            await asyncio.sleep(_AGAIN_S)

    def _take(self, entry: KeyValue) -> None:
        now = self._clock.monotonic()
        if entry.value is None:
            self._fleet.depart(entry.key, now)
            self._look.set()
            return
        try:
            record = WorkerRecord.model_validate_json(entry.value)
        except ValidationError as error:
            _log.warning("worker %s has a record that is none: %s", entry.key, error)
            return
        if self._fleet.put(record, now):
            self._changed.set()

    async def _probe_one(self, worker: WorkerRecord) -> None:
        try:
            head, _ = await self._upstreams.get(worker.url, "/health", self._probe_timeout_s)
        except (UpstreamError, ValueError) as error:
            refused = isinstance(error, ConnectFailed) and error.refused
            _log.info("worker %s failed its probe: %s", worker.worker_id, error)
            self._refute(worker, refused=refused)
            return
        if head.status == 200:
            self._fleet.confirm(worker.worker_id, self._clock.monotonic())
        elif sends_elsewhere(head):
            _log.info("worker %s lives and is without an engine", worker.worker_id)  # suspect, and not dead
        else:
            self._refute(worker, refused=False)

    def _refute(self, worker: WorkerRecord, *, refused: bool) -> None:
        dead = self._fleet.refute(worker.worker_id, self._clock.monotonic(), refused=refused)
        # One that refuses new connections may be draining: its host ends what it does not finish.
        if dead and not refused:
            self._upstreams.give_up(origin(worker.url), self._probe_timeout_s)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(file)
