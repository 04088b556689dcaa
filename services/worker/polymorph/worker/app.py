"""The composition root of a worker."""

import asyncio
import contextlib
import dataclasses
import logging
import socket

from polymorph.bus.errors import Fatal
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.engine.disable import Disabled
from polymorph.engine.loading.admission import Fence
from polymorph.engine.loading.counters import hits
from polymorph.engine.loading.generation import GenerationFile
from polymorph.engine.loading.libraries import Libraries
from polymorph.engine.loading.loader import Loader
from polymorph.events.state import WorkerRecord
from polymorph.kernels.isa import Cpu
from polymorph.kernels.schema import Manifest
from polymorph.kernels.signing import Trust
from polymorph.worker.adapters.artifacts import ArtifactFolder
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.adapters.seating import Seating
from polymorph.worker.adapters.server import HttpServer, listen
from polymorph.worker.capturing import Capturing
from polymorph.worker.changing import Changing
from polymorph.worker.control_plane import ControlPlane, Serving
from polymorph.worker.convergence import Convergence
from polymorph.worker.domain.change import GIB
from polymorph.worker.elsewhere import Elsewhere
from polymorph.worker.faults import Faults
from polymorph.worker.leasing import HostLeasing
from polymorph.worker.recovery import Recovery
from polymorph.worker.registry import HEARTBEAT_S, Registry
from polymorph.worker.rolling import Rolling
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.settings import WorkerSettings
from polymorph.worker.switchboard import Switchboard
from polymorph.worker.telling import Telling
from polymorph.worker.tries import tried

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 5.0


class Worker:
    """One engine, served over HTTP, tuned over the bus; `run` ends when `stop` is set and all requests are done."""

    def __init__(self, settings: WorkerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._tuned = not Disabled.read().everything
        self._cpu = Cpu.read()
        self._pool = settings.pool_name()
        self._state = "starting"
        self._ending = False
        self._started_at = clock.now()
        self._convergence: Convergence | None = None
        self._telling = Telling(self._pool, settings.worker_id, clock, self._revision)
        self._switchboard = Switchboard(settings.hold_timeout_s)
        self._elsewhere = Elsewhere(self._switchboard)
        flights = settings.data_dir / "flights" / settings.worker_id
        seating = Seating(self._telling, clock, settings.log_level, flights)
        self._seats = Seats(self._switchboard, seating.open, seating.close, clock)
        launch = settings.launch()
        self._launch = launch if self._tuned else launch.without_slots()

    async def run(self, stop: asyncio.Event) -> None:
        """Raises `Fatal` where the engine cannot start or dies."""
        sock = listen(self._settings.host, self._settings.port)
        registry = Registry(self._record, self._clock)
        self._seats.on_change = registry.news
        plane = ControlPlane(self._settings.nats, self._settings.worker_id, self._clock, registry)
        connecting = asyncio.create_task(plane.run())
        try:
            self._seats.seat(await self._first())
            if not stop.is_set():
                await self._serve(sock, plane, registry, stop)
        finally:
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            sock.close()
            await self._seats.close()

    async def _first(self) -> Seat:
        try:
            return await self._seats.open(self._launch)
        except EngineNotStarted as error:
            raise Fatal(str(error)) from error

    async def _serve(
        self, sock: socket.socket, plane: ControlPlane, registry: Registry, stop: asyncio.Event
    ) -> None:
        serving = await self._wired(plane, registry)
        server = HttpServer(self._elsewhere, sock, self._settings.drain_timeout_s)
        running = asyncio.create_task(server.run())
        recovering = asyncio.create_task(self._recovery(serving).run())
        stopping = asyncio.create_task(stop.wait())
        await server.started()
        self._state = "ready"
        plane.serve(serving)
        _log.info("%s serves %s", self._settings.url(), self._settings.served_name())
        await asyncio.wait({running, recovering, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not stop.is_set():
            server.stop()
            await asyncio.wait({running}, timeout=_LAST_WORDS_S)
            await _ended(recovering)
            raise Fatal("the HTTP server ended")
        await self._drain(plane.bus, registry, serving.leasing)
        server.stop()
        await running
        await _ended(recovering)
        await serving.telling.flush_last(plane.bus)
        if plane.bus is not None:
            await registry.remove(plane.bus)
        _log.info("drained")

    async def _drain(self, bus: Bus | None, registry: Registry, leasing: HostLeasing) -> None:
        """Says that we leave, and takes what is on its way until that is known."""
        self._ending = True
        self._state = "draining"
        _log.info("draining: %d requests run", self._telling.load.running)
        await tried("the end of leases", lambda: leasing.close(bus))
        if bus is not None:
            await tried("the entry in the registry", lambda: registry.put(bus))
            await self._clock.sleep(HEARTBEAT_S / 2)

    async def _wired(self, plane: ControlPlane, registry: Registry) -> Serving:
        settings = self._settings
        trust = Trust.load(settings.trust_file) if settings.trust_file is not None else Trust()
        seen = GenerationFile(settings.data_dir / f"generation-{self._pool}")
        fence = Fence(self._pool, trust, seen.read(), seen.write)

        tested: set[tuple[str, str, int, int]] = set()
        inspected: set[tuple[str, bool, str]] = set()
        admitted: dict[str, Manifest] = {}
        libraries = Libraries()

        def loader_for(bus: Bus, engine: Engine) -> Loader:
            return Loader(
                engine=engine,
                artifacts=ArtifactFolder(settings.data_dir / "kernels", bus),
                trust=trust,
                hardware=self._cpu.fingerprint,
                isa=self._cpu.isa,
                scratch=settings.data_dir.resolve() / "selftest",
                tested=tested,
                inspected=inspected,
                admitted=admitted,
                libraries=libraries,
                min_isolation=settings.isolation(),
                toolchains=settings.trusted_toolchains(),
            )

        async def leaving(yes: bool) -> None:
            if self._ending:
                return
            self._state = "draining" if yes else "ready"
            if plane.bus is not None:
                await registry.put(plane.bus)

        rolling = Rolling(
            self._pool, settings.worker_id, self._clock, lambda: plane.bus, leaving, settings.hold_timeout_s
        )
        changing = Changing(self._seats, self._launch, rolling, int(settings.spare_gib * GIB))
        faults = Faults(
            settings.data_dir / f"faults-{settings.worker_id}.json",
            self._pool,
            settings.worker_id,
            self._clock,
        )
        self._convergence = Convergence(
            self._pool, settings.worker_id, fence, self._seats, changing, faults, loader_for, self._clock
        )
        service = self._convergence.service
        service.loaded = dataclasses.replace(
            service.loaded, receipt=await changing.now() if self._tuned else None
        )
        leasing = HostLeasing(
            self._pool,
            settings.worker_id,
            self._seats,
            self._clock,
            lambda: self._telling.load.running > 0,
            self._convergence.standing,
        )
        capturing = Capturing(
            settings.capture,
            settings.served_name(),
            self._seats,
            self._convergence.change,
            settings.data_dir.resolve() / "captures",
            self._clock,
        )
        return Serving(
            self._seats, self._convergence, faults, leasing, self._telling, capturing, tuned=self._tuned
        )

    def _recovery(self, serving: Serving) -> Recovery:
        return Recovery(
            self._seats,
            serving.convergence,
            serving.faults,
            self._clock,
            hang_timeout_s=self._settings.hang_timeout_s,
            send_back=self._elsewhere.send_back,
        )

    def _revision(self) -> str:
        return self._convergence.revision.revision if self._convergence is not None else "empty"

    def _told_state(self) -> str:
        """As others see it: where an engine died and the next one starts, the worker is as one that starts."""
        without = self._state == "ready" and self._seats.current is None
        return "starting" if without else self._state

    def _holds(self) -> bool:
        """Whether requests that come now are kept until an engine serves: not before the first, nor at the end."""
        return self._told_state() != "ready" and self._state != "starting" and not self._ending

    def _record(self) -> WorkerRecord:
        load = self._telling.load
        seat = self._seats.current
        loaded = self._convergence.loaded if self._convergence is not None else None
        receipt = loaded.receipt if loaded is not None else None
        engaged = [(each.definition, each.artifact) for each in loaded.bindings] if loaded is not None else []
        return WorkerRecord.model_validate(
            {
                "worker_id": self._settings.worker_id,
                "pool": self._pool,
                "model": self._settings.served_name(),
                "url": self._settings.url(),
                "state": self._told_state(),
                "holds": self._holds(),
                "generation": max(0, self._convergence.generation) if self._convergence else 0,
                "revision": self._revision(),
                "hardware": self._cpu.fingerprint,
                "slots": seat.definitions if seat is not None else (),
                "missing": seat.missing if seat is not None else {},
                "running": load.running,
                "waiting": load.waiting,
                "kv_used": load.kv_used,
                "kv_capacity_tokens": seat.engine.kv_capacity_tokens if seat is not None else 0,
                "max_num_seqs": receipt.settings.max_num_seqs if receipt else self._settings.max_num_seqs,
                "started_at": self._started_at,
                "features": (
                    {each.name: each.told() for each in seat.engine.features} if seat is not None else {}
                ),
                "settings": receipt.settings if receipt else None,
                "way": receipt.way if receipt else None,
                "stood_s": receipt.stood_s if receipt else None,
                "kernels": tuple(dict.fromkeys(artifact for _, artifact in engaged)),
                "hits": hits(self._telling.counted, engaged),
            }
        )


async def _ended(recovering: "asyncio.Task[None]") -> None:
    """Raises what it ended with."""
    recovering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await recovering
