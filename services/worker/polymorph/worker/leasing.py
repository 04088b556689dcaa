"""Pauses of the engine that the evaluator asks for: short, self-ending, accounted for."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from polymorph.bus.errors import BusError, Poison
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.events.requests import LeaseAnswer, LeaseHost
from polymorph.events.types import HostLeased
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.domain.lease import HostLease
from polymorph.worker.seats import Engines
from polymorph.worker.tries import again_and_again, tried

_log = logging.getLogger(__name__)
_ENDS_AFTER_S = 3.0
_STEP_S = 5.0
_RESUME_AGAIN_S = (0.05, 0.1, 0.2, 0.5)
_TASK = "a lease of the host"
_UNTOLD = 64


class HostLeasing:
    """Grants one burst at a time; the worker's own timer ends it, whatever becomes of the evaluator."""

    def __init__(
        self,
        pool: str,
        worker_id: str,
        engines: Engines,
        clock: Clock,
        busy: Callable[[], bool],
        standing: asyncio.Lock | None = None,
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._engines = engines
        self._clock = clock
        self._busy = busy
        self._lease: HostLease | None = None
        self._untold: deque[HostLease] = deque(maxlen=_UNTOLD)
        self._burst: asyncio.Task[None] | None = None
        self._release = asyncio.Event()
        self._granting = asyncio.Lock()
        self._standing = standing or asyncio.Lock()
        self._last_paused_s = 0.0
        self._resumed_at = clock.monotonic()

    async def ask(self, request: LeaseHost) -> LeaseAnswer:
        """Grants a burst, or ends the one that runs."""
        if request.release:  # waits for no grant: it ends a burst that runs
            return self._held_by_another(request) or await self._end()
        async with self._granting:  # while one breathes, no other is granted the host
            return self._held_by_another(request) or await self._grant(request)

    def _held_by_another(self, request: LeaseHost) -> LeaseAnswer | None:
        if self._lease is None or self._burst is None or self._lease.lease_id == request.lease_id:
            return None
        return LeaseAnswer(granted=False, reason=f"lease {self._lease.lease_id} has the host")

    async def _grant(self, request: LeaseHost) -> LeaseAnswer:
        await self._end()
        if self._standing.locked():
            return LeaseAnswer(granted=False, reason="the engine is being changed; ask again")
        await self._breathe()
        if self._lease is None or self._lease.lease_id != request.lease_id:
            self._retire()
            self._lease = HostLease(request.lease_id)
        self._release.clear()
        granted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._burst = asyncio.create_task(self._run_burst(self._lease, request.burst_s, granted))
        if not await granted:
            return LeaseAnswer(granted=False, reason="the engine is in a long step; ask again")
        return LeaseAnswer(granted=True, paused_s=self._last_paused_s)

    async def watch(self, bus: Bus) -> None:
        """Runs until cancelled: reports a lease when no burst has come for a while."""
        await again_and_again(_TASK, lambda: self._look(bus), self._clock, _ENDS_AFTER_S / 3)

    async def _look(self, bus: Bus) -> None:
        silent = self._clock.monotonic() - self._resumed_at > _ENDS_AFTER_S
        if self._burst is None and silent:
            self._retire()
        await self._tell(bus)

    async def close(self, bus: Bus | None) -> None:
        """Ends a burst that runs, since a worker that drains needs its engine, and reports what is unreported."""
        await self._end()
        self._retire()
        if bus is not None:
            await self._tell(bus)

    def _retire(self) -> None:
        """The lease is over: it stays to be reported, also where another lease takes the host at once."""
        if self._lease is not None:
            self._untold.append(self._lease)
            self._lease = None

    async def _end(self) -> LeaseAnswer:
        if self._burst is not None:
            self._release.set()
            await asyncio.shield(self._burst)
        return LeaseAnswer(granted=False, reason="released", paused_s=self._last_paused_s)

    async def _breathe(self) -> None:
        """Between two bursts requests get as long as the burst took, where there are any."""
        since = self._clock.monotonic() - self._resumed_at
        if self._busy() and since < self._last_paused_s:
            await self._clock.sleep(self._last_paused_s - since)

    async def _run_burst(self, lease: HostLease, burst_s: float, granted: "asyncio.Future[bool]") -> None:
        async with self._standing:
            await tried(_TASK, lambda: self._stand(lease, burst_s, granted))

    async def _stand(self, lease: HostLease, burst_s: float, granted: "asyncio.Future[bool]") -> None:
        stopped: float | None = None
        engine: Engine | None = None
        try:
            engine = self._engines.engine
            async with asyncio.timeout(_STEP_S):
                await engine.pause()
            stopped = self._clock.monotonic()
            granted.set_result(True)
            async with asyncio.timeout(burst_s):
                await self._release.wait()
        except (TimeoutError, BusError):
            if stopped is None:
                _log.warning("the engine did not stop between two steps within %.0f s", _STEP_S)
        finally:
            if engine is not None:
                await self._resume(engine)
            self._resumed_at = self._clock.monotonic()
            self._burst = None
            if stopped is not None:
                self._last_paused_s = self._resumed_at - stopped
                lease.ended(self._last_paused_s)
            if not granted.done():
                granted.set_result(False)

    async def _resume(self, engine: Engine) -> None:
        failures = 0
        while not await tried("the end of a lease", engine.resume) and engine.alive:
            await asyncio.sleep(_RESUME_AGAIN_S[min(failures, len(_RESUME_AGAIN_S) - 1)])
            failures += 1

    async def _tell(self, bus: Bus) -> None:
        """Reports leases that ended; what the bus does not take now waits for the next time."""
        while self._untold:
            lease = self._untold[0]
            try:
                await bus.publish(
                    HostLeased(
                        pool=self._pool,
                        worker_id=self._worker_id,
                        lease_id=lease.lease_id,
                        bursts=lease.bursts,
                        stolen_s=lease.stolen_s,
                    )
                )
            except Poison as error:  # its id is who asked's, and may be too long for an event
                _log.error("a lease took %.3f s, which cannot be told: %s", lease.stolen_s, error)
            except BusError as error:
                _log.warning(
                    "lease %s took %.3f s, to be told later: %s", lease.lease_id, lease.stolen_s, error
                )
                return
            if self._untold and self._untold[0] is lease:
                self._untold.popleft()
