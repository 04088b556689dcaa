"""Everything of a worker that needs the bus. It comes and goes with the bus; serving does not."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from polymorph.bus.errors import BusError, Fatal
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.config.settings import NatsSettings
from polymorph.engine.loading.counters import Counters
from polymorph.events.requests import CaptureInputs, ControlSlots, LeaseHost, PlanChange
from polymorph.worker.capturing import Capturing
from polymorph.worker.convergence import Convergence
from polymorph.worker.faults import Faults
from polymorph.worker.handlers import Asked
from polymorph.worker.leasing import HostLeasing
from polymorph.worker.registry import Registry
from polymorph.worker.seat import Seat
from polymorph.worker.seats import Seats
from polymorph.worker.telling import FLUSH_S, REPORT_S, Telling
from polymorph.worker.tries import again_and_again, cancelled

_log = logging.getLogger(__name__)
_AGAIN_S = 2.0


class Serving:
    """What a started engine adds to the control plane; `tuned` is False where POLYMORPH_DISABLE is set."""

    def __init__(
        self,
        seats: Seats,
        convergence: Convergence,
        faults: Faults,
        leasing: HostLeasing,
        telling: Telling,
        capturing: Capturing,
        *,
        tuned: bool,
    ) -> None:
        self.seats = seats
        self.convergence = convergence
        self.faults = faults
        self.leasing = leasing
        self.telling = telling
        self.capturing = capturing
        self.tuned = tuned
        self._counted: Seat | None = None

    async def run(self, bus: Bus, worker_id: str, clock: Clock) -> None:
        """Runs until cancelled or the bus is lost."""
        async with asyncio.TaskGroup() as tasks, self._answering(bus, worker_id):
            flush, report = "the telling of requests", "the telling of steps"
            tasks.create_task(again_and_again(flush, lambda: self.telling.flush(bus), clock, FLUSH_S))
            tasks.create_task(again_and_again(report, lambda: self._report(bus), clock, REPORT_S))
            if self.tuned:
                tasks.create_task(self.leasing.watch(bus))
                tasks.create_task(self.faults.tell(bus))
                tasks.create_task(self.faults.watch(bus))
                tasks.create_task(self.faults.reconcile(bus))
                tasks.create_task(self.convergence.watch(bus))
                tasks.create_task(self.convergence.run(bus))
            await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def _answering(self, bus: Bus, worker_id: str) -> AsyncIterator[None]:
        asked = Asked(self.leasing, self.convergence, self.capturing)
        ends = []
        if self.tuned:
            ends.append(await bus.respond(LeaseHost, worker_id, asked.lease))
            ends.append(await bus.respond(ControlSlots, worker_id, asked.control))
            ends.append(await bus.respond(PlanChange, worker_id, asked.plan))
            ends.append(await bus.respond(CaptureInputs, worker_id, asked.capture))
        try:
            yield
        finally:
            for end in ends:
                with contextlib.suppress(BusError):
                    await end()

    async def _report(self, bus: Bus) -> None:
        await self.telling.report(bus, await self._counters())

    async def _counters(self) -> Counters | None:
        """None where nothing was computed, and while the engine cannot tell."""
        seat = self.seats.current
        if self.telling.idle or seat is None:
            return None
        if seat is not self._counted:
            self._counted = seat
            self.telling.renew()
        try:
            return await seat.engine.counters()
        except BusError as error:
            _log.info("the engine does not tell its counts: %s", error)
            return None


class ControlPlane:
    """Connects to NATS as long as it takes, and again when the connection is lost for good."""

    def __init__(self, settings: NatsSettings, worker_id: str, clock: Clock, registry: Registry) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._clock = clock
        self._registry = registry
        self._serving: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        self.bus: Bus | None = None

    def serve(self, serving: Serving) -> None:
        """The engine is there."""
        self._serving.set_result(serving)

    async def run(self) -> None:
        """Runs until cancelled."""
        source = f"/polymorph/worker/{self._worker_id}"
        while True:
            try:
                bus = await NatsBus.connect(self._settings, source, self._clock)
            except (Fatal, BusError) as error:
                _log.error("no bus, serving without it: %s", error)
            else:
                try:
                    await self._with(bus)
                except Exception:  # noqa: BLE001 - serving must outlive whatever tuning does
                    if cancelled():
                        return
                    _log.exception("the control plane failed and starts again; serving goes on")
            await self._clock.sleep(_AGAIN_S)

    async def _with(self, bus: NatsBus) -> None:
        self.bus = bus
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(bus.lost())
                tasks.create_task(self._registry.keep(bus))
                serving = await asyncio.shield(self._serving)
                self._registry.news()
                tasks.create_task(serving.run(bus, self._worker_id, self._clock))
        except* (Fatal, BusError) as errors:
            _log.error("the bus is lost, serving without it: %s", errors.exceptions[0])
        finally:
            self.bus = None
            await bus.close()
