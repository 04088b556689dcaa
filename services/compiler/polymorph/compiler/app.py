"""The composition root of the compiler."""

import asyncio
import logging
import secrets
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus, Consumption, Delivery
from polymorph.compiler.adapters.floor import BusFloor
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.adapters.promotion_keys import PromotionKeys, Signer, read
from polymorph.compiler.adapters.reconciler import Reconciler
from polymorph.compiler.adapters.record import LoopRecord
from polymorph.compiler.domain.promotion.policy import POLICIES
from polymorph.compiler.domain.search import Budget, SearchMachine
from polymorph.compiler.domain.search_pool import LoopRules, PoolLoop
from polymorph.compiler.domain.search_state import Proposers
from polymorph.compiler.handlers import Tuning
from polymorph.compiler.settings import CompilerSettings
from polymorph.config.clock import Clock
from polymorph.events.base import Event
from polymorph.events.state import DesiredState
from polymorph.events.types import (
    CandidateEvaluated,
    PromotionCompleted,
    PromotionRolledBack,
    TrafficShapeObserved,
    WorkerKernelFaulted,
    WorkerLoaded,
    WorkerRefused,
)
from polymorph.ledger import migrations
from polymorph.ledger.database import Database, SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.relay import OutboxRelay
from polymorph.telemetry.health import HealthServer
from polymorph.traffic.drift import DriftDetector, DriftRules

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_PATIENT = 1000
"""Attempts at a message that must not be lost: the record may be away for a while."""


class Compiler:
    """Everything wired together; `run` works until `stop` is set."""

    def __init__(
        self,
        settings: CompilerSettings,
        bus: Bus,
        clock: Clock,
        database: Database,
        *,
        source: str,
        hardware: str,
        signer: Signer,
        proposers: Proposers,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        ledger = Ledger(database, clock, source=source)
        change = Change(PromotionKeys(bus, signer, clock), ledger)
        promoter = Promoter(change, lambda: uuid.uuid4().hex, policy=POLICIES[settings.policy])
        self._relay = OutboxRelay(bus, database, clock)
        controls = Controls(change, clock)
        self._reconciler = Reconciler(change, promoter, controls, clock, mode=settings.mode)
        self._tuning = Tuning(
            PoolLoop(_rules(settings, hardware), SearchMachine(_budget(settings), proposers, _fresh_seed)),
            LoopRecord(database, clock, source=source, hardware=hardware),
            BusFloor(bus, promoter, controls, default_mode=settings.mode or settings.default_mode),
            clock,
            detector=lambda: DriftDetector(_drift(settings)),
            window_age_s=settings.window_age_s,
            hardware=hardware,
        )
        self._started = False

    async def ready(self) -> bool:
        """It has read what it remembers, and the bus is there."""
        return self._started and await self._bus.ready()

    async def run(self, stop: asyncio.Event) -> None:
        """Raises `Fatal` where going on would do harm."""
        health = HealthServer(self._settings.health_port, self.ready, host=self._settings.health_host)
        await health.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                work = tasks.create_task(self._work())
                await stop.wait()
                work.cancel()
        finally:
            await health.stop()

    async def _work(self) -> None:
        await self._tuning.start()
        self._started = True
        async with asyncio.TaskGroup() as tasks:
            for task in (self._relay.run(), self._reconciler.run(), self._tick(), self._watch_desired()):
                tasks.create_task(task)
            for consumer in self._consumers():
                tasks.create_task(consumer)

    def _consumers(self) -> list[Coroutine[Any, Any, None]]:
        tuning = self._tuning
        return [
            self._consume("windows", TrafficShapeObserved, tuning.window, attempts=5),
            self._consume("evaluations", CandidateEvaluated, tuning.evaluated),
            self._consume("completed", PromotionCompleted, tuning.completed),
            self._consume("rolled-back", PromotionRolledBack, tuning.rolled_back),
            self._consume("loaded", WorkerLoaded, tuning.loaded, attempts=5),
            self._consume("refused", WorkerRefused, tuning.refused),
            self._consume("kernel-faulted", WorkerKernelFaulted, tuning.kernel_faulted),
        ]

    def _consume(
        self,
        name: str,
        kind: type[Event],
        handler: Callable[[Any], Awaitable[None]],
        *,
        attempts: int = _PATIENT,
    ) -> Coroutine[Any, Any, None]:
        async def handle(delivery: Delivery) -> None:
            await handler(delivery.message)

        return self._bus.consume(
            Consumption(durable=f"compiler-{name}", subject=kind.wildcard(), max_attempts=attempts), handle
        )

    async def _watch_desired(self) -> None:
        while True:
            try:
                async for entry in self._bus.kv_watch(topology.DESIRED):
                    if entry.value is not None:
                        await self._desired(entry.key, entry.value)
            except BusError as error:
                _log.warning("the watch on desired states ended and starts again: %s", error)
            await self._clock.sleep(_RETRY_S)

    async def _desired(self, pool: str, value: bytes) -> None:
        """One bad entry must not keep the others from being read."""
        try:
            await self._tuning.desired(read(topology.DESIRED, pool, value, DesiredState))
        except (ValueError, LookupError):
            _log.exception("pool %s: its desired state is left out", pool)

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(self._settings.tick_s)
            try:
                await self._tuning.tick()
            except (BusError, OperationalError) as error:
                _log.warning("a tick failed, the next one repeats it: %s", error)


async def open_record(settings: CompilerSettings, clock: Clock) -> SqlDatabase:
    """Waits for the database and brings its tables to this release."""
    url = database_url(settings)
    prepare_folder(url)
    while True:
        try:
            await migrations.upgrade(url)
        except (OperationalError, OSError) as error:
            _log.warning("the record does not answer yet: %s", error)
            await clock.sleep(_RETRY_S)
        else:
            return SqlDatabase(url)


def database_url(settings: CompilerSettings) -> str:
    """The URL with the password from its file."""
    url = make_url(settings.database_url)
    if settings.database_password_file is not None:
        url = url.set(password=settings.database_password_file.read_text().strip())
    return url.render_as_string(hide_password=False)


def prepare_folder(url: str) -> None:
    """SQLite makes its file, not the folder that it lies in."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)


def _rules(settings: CompilerSettings, hardware: str) -> LoopRules:
    return LoopRules(
        hardware=hardware,
        cooldown_s=settings.cooldown_s,
        least_gain=settings.least_gain,
        searches=settings.searches_per_drift,
        largest_m=settings.largest_m,
        candidates=settings.candidates_per_search,
    )


def _budget(settings: CompilerSettings) -> Budget:
    return Budget(
        candidates=settings.candidates_per_search,
        seconds=settings.search_seconds,
        in_flight=settings.in_flight,
        margin=settings.margin,
        answer_s=settings.evaluation_timeout_s,
    )


def _drift(settings: CompilerSettings) -> DriftRules:
    return DriftRules(
        threshold=settings.drift_threshold,
        consecutive=settings.drift_windows,
        min_requests=settings.min_requests,
    )


def _fresh_seed() -> int:
    return secrets.randbelow(2**31 - 1) + 1
