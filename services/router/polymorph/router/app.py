"""The composition root of the router."""

import asyncio
import logging
import uuid

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.events.requests import PlaceRequest
from polymorph.events.types import TELEMETRY
from polymorph.router.adapters import metrics
from polymorph.router.adapters.lease import Lease
from polymorph.router.adapters.programs import SharedPrograms
from polymorph.router.domain.accounts import Accounts
from polymorph.router.domain.announcements import Announcements
from polymorph.router.domain.desk import Desk, DeskRules
from polymorph.router.domain.fleet import Fleet
from polymorph.router.domain.programs import Programs
from polymorph.router.domain.windows import Windows, next_end
from polymorph.router.handlers import Hearing, Placing
from polymorph.router.settings import RouterSettings
from polymorph.telemetry.health import HealthServer

_log = logging.getLogger(__name__)
_WINDOWS_LEASE = "router-windows"
_GROUP = "router"
_RETRY_S = 0.5


class Router:
    """Everything wired together; `run` serves until `stop` is set."""

    def __init__(self, settings: RouterSettings, bus: Bus, clock: Clock) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        fleet = Fleet(settings.worker_ttl_s)
        programs, self._shared = _programs(settings, clock)
        desk = Desk(_rules(settings), fleet, Accounts(settings.reservation_ttl_s), programs)
        self._windows = Windows(fleet, clock.now())
        self._placing = Placing(desk, clock)
        self._hearing = Hearing(desk, self._windows, self._placing, clock)
        self._lease = Lease(bus, _WINDOWS_LEASE, f"{settings.instance}-{uuid.uuid4().hex[:8]}")
        self._answering = False

    async def ready(self) -> bool:
        """Answers placement requests, and the bus is there."""
        return self._answering and await self._bus.ready()

    async def run(self, stop: asyncio.Event) -> None:
        health = HealthServer(self._settings.health_port, self.ready, host=self._settings.health_host)
        await health.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._watch_workers()),
                    tasks.create_task(self._beat()),
                    tasks.create_task(self._close_windows()),
                    tasks.create_task(self._renew_lease()),
                ]
                if self._shared is not None:
                    running.append(tasks.create_task(self._shared.run()))
                await self._answer_until(stop)
                for task in running:
                    task.cancel()
        finally:
            await self._lease.give_up()
            await health.stop()

    async def _answer_until(self, stop: asyncio.Event) -> None:
        ends = [await self._bus.listen(kind.wildcard(), self._hearing.telemetry) for kind in TELEMETRY]
        await self._know_workers()
        ends.append(await self._bus.respond(PlaceRequest, "*", self._placing.respond, group=_GROUP))
        self._answering = True
        _log.info("router %s answers", self._settings.instance)
        await stop.wait()
        self._answering = False
        for end in reversed(ends):
            await end()

    async def _know_workers(self) -> None:
        """Reads the registry before the first answer, so that a fresh router never says that there is no worker."""
        while True:
            try:
                for key in await self._bus.kv_keys(topology.WORKERS):
                    await self._hearing.worker(await self._bus.kv_get(topology.WORKERS, key))
            except BusError as error:
                _log.info("the registry of workers does not answer yet: %s", error)
                await self._clock.sleep(_RETRY_S)
            else:
                return

    async def _watch_workers(self) -> None:
        while True:
            try:
                async for entry in self._bus.kv_watch(topology.WORKERS):
                    await self._hearing.worker(entry)
            except BusError as error:
                _log.warning("the watch on workers ended and starts again: %s", error)
            await self._clock.sleep(_RETRY_S)

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._settings.hold_heartbeat_s / 2)
            await self._placing.beat()

    async def _close_windows(self) -> None:
        end = self._clock.now()
        while True:
            # Never the same end twice, even where a sleep wakes a little early.
            end = next_end(max(end, self._clock.now()), self._settings.window_s)
            await self._clock.sleep((end - self._clock.now()).total_seconds())
            for observed in self._windows.close(end):
                if not self._lease.held:
                    metrics.WINDOWS.labels("left-to-another").inc()
                    continue
                try:
                    await self._bus.publish(observed)
                    metrics.WINDOWS.labels("published").inc()
                except BusError as error:
                    metrics.WINDOWS.labels("lost").inc()
                    _log.warning("a window of pool %s is lost: %s", observed.pool, error)

    async def _renew_lease(self) -> None:
        while True:
            metrics.LEADS.set(await self._lease.renew())
            await self._clock.sleep(topology.LEASES_TTL_S / 5)


def _rules(settings: RouterSettings) -> DeskRules:
    return DeskRules(
        tokens_factor=settings.capacity_tokens_factor,
        seqs_factor=settings.capacity_seqs_factor,
        default_output_tokens=settings.default_output_tokens,
        hold_deadline_s=settings.hold_deadline_s,
        hold_heartbeat_s=settings.hold_heartbeat_s,
        hold_limit=settings.hold_limit,
        sticky_margin_tokens=settings.sticky_margin_tokens,
    )


def _programs(settings: RouterSettings, clock: Clock) -> tuple[Programs, SharedPrograms | None]:
    """The map of programs, and what shares it where that is configured and of use."""
    if settings.redis_url is None or not settings.sticky_margin_tokens:
        return Programs(), None
    announcements = Announcements()
    programs = Programs(announcements)
    return programs, SharedPrograms(settings.redis_url.get_secret_value(), programs, announcements, clock)
