"""Slots emptied for a paired measurement, or in the middle of a change: whatever becomes of it, they come back."""

import asyncio
import logging

from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import EMPTY
from polymorph.worker.domain.numerics import identity
from polymorph.worker.seats import Engines
from polymorph.worker.service import InService

_log = logging.getLogger(__name__)
AGAIN_S = 0.5


class Switching:
    """`change` is held while kernels change, `standing` while the engine that serves is changed or paused."""

    def __init__(
        self, service: InService, engines: Engines, change: asyncio.Lock, standing: asyncio.Lock, clock: Clock
    ) -> None:
        self._service = service
        self._engines = engines
        self._change = change
        self._standing = standing
        self._clock = clock
        self._return: asyncio.Task[None] | None = None

    async def switch(self, *, empty: bool, ttl_s: float) -> int:
        """Empty slots, or those of the revision again, for a paired measurement; goes back by itself after `ttl_s`.

        Returns the calls that the revision's kernels have served so far.
        """
        self._check()
        async with self._change:
            async with self._standing:  # only now: a new engine may have come, with a revision of before
                self._check()
                loaded, engine = self._service.loaded, self._engines.engine
                self.return_after(ttl_s if empty else AGAIN_S)
                await engine.engage(() if empty else loaded.bindings, keep_packed=True)
                self._engines.runs(EMPTY.revision if empty else loaded.revision.revision)
                if self._service.loaded is not loaded:  # who retreats does not wait for this
                    self._service.unsure = True
                if not empty:
                    self.stay()
            counters = await engine.counters()
        return sum(counters.served.get(each, 0) for each in {b.artifact for b in loaded.bindings})

    def _check(self) -> None:
        if identity(self._service.revision) is not None:
            raise Refused(
                "a lossy revision is not switched for a measurement: requests would meet two numerics"
            )

    def return_after(self, seconds: float) -> None:
        """Begun before the slots change: whatever becomes of the change, they come back."""
        self.stay()
        self._return = asyncio.create_task(self._until_restored(seconds))

    def stay(self) -> None:
        """The slots run what they should."""
        if self._return is not None:
            self._return.cancel()

    async def restore(self) -> None:
        """Engages what is loaded, whatever the slots run now."""
        async with self._change, self._standing:
            await self._service.put_back()

    async def _until_restored(self, pause_s: float) -> None:
        while self._engines.alive:
            await self._clock.sleep(pause_s)
            try:
                await self.restore()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task, and the slots must come back
                revision, kind = self._service.revision.revision, type(error).__name__
                _log.error("the slots are not back to %s, trying again: %s: %s", revision, kind, error)
                pause_s = AGAIN_S
            else:
                return
