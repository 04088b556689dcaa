"""What a pool shall run, as heard: believed where a promoter signed it, else refused in words; what ran goes on."""

import asyncio
import hashlib

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.port import Bus, KeyValue
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Fence, Refused
from polymorph.events.state import DesiredState
from polymorph.worker.reports import Reports
from polymorph.worker.tries import again_and_again

_AGAIN_S = 0.5
_NO_GENERATION, _NO_REVISION = -1, "?"


class Hearing:
    """Follows the desired state; `news` is set whenever there is a newer one. `desired` is the newest believed."""

    def __init__(self, pool: str, fence: Fence, reports: Reports, news: asyncio.Event, clock: Clock) -> None:
        self._pool = pool
        self._fence = fence
        self._reports = reports
        self._news = news
        self._clock = clock
        self._unreadable = ""
        self.desired: DesiredState | None = None

    @property
    def generation(self) -> int:
        return self.desired.generation if self.desired is not None else 0

    async def watch(self, bus: Bus) -> None:
        """Runs until cancelled."""
        await again_and_again(
            "the watch on the desired state", lambda: self._follow(bus), self._clock, _AGAIN_S
        )

    async def _follow(self, bus: Bus) -> None:
        async for entry in bus.kv_watch(topology.DESIRED, self._pool):
            await self._hear(bus, entry)

    async def _hear(self, bus: Bus, entry: KeyValue) -> None:
        if entry.value is None or entry.key != self._pool:
            return
        try:
            desired = DesiredState.model_validate_json(entry.value)
        except ValidationError as error:
            await self._misheard(bus, entry.value, error)
            return
        self._unreadable = ""
        try:
            # A signature and a file: milliseconds that the event loop has for tokens.
            await asyncio.to_thread(self._fence.admit, desired)
        except Refused as refusal:
            await self._reports.refused(bus, desired.generation, desired.stable.revision, str(refusal))
            return
        if self.desired is None or desired.generation > self.desired.generation:
            self.desired = desired
            self._news.set()

    async def _misheard(self, bus: Bus, value: bytes, error: ValidationError) -> None:
        """The same bytes come again with each new watch: they are told once."""
        digest = hashlib.sha256(value).hexdigest()
        if digest == self._unreadable:
            return
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        reason = (
            f"the desired state of {self._pool} ({len(value)} bytes, sha256 {digest[:12]}) cannot be read: {place}: "
            f"{first['msg']}; right would be a DesiredState in JSON: pool, generation, stable, and a promoter's signature"
        )
        await self._reports.refused(bus, _NO_GENERATION, _NO_REVISION, reason)
        self._unreadable = digest
