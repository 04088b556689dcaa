"""The composition root of a worker."""

import asyncio
import contextlib
import logging
import os
import socket

from polymorph.bus.errors import Fatal
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.engine.dispatcher.build import DispatcherBuildError, ensure_built
from polymorph.engine.launch import EngineLaunch
from polymorph.events.state import WorkerRecord
from polymorph.kernels.isa import Cpu
from polymorph.kernels.signing import Trust
from polymorph.telemetry.log import configure
from polymorph.worker.adapters.artifacts import ArtifactFolder
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.adapters.server import HttpServer, application, listen
from polymorph.worker.control_plane import ControlPlane, Serving
from polymorph.worker.convergence import Convergence, GenerationFile
from polymorph.worker.domain.admission import Fence
from polymorph.worker.domain.patience import start_told
from polymorph.worker.leasing import HostLeasing
from polymorph.worker.loading import Loader
from polymorph.worker.registry import HEARTBEAT_S, Registry
from polymorph.worker.settings import WorkerSettings
from polymorph.worker.telling import Telling

_log = logging.getLogger(__name__)
_PROGRESS_S = 15.0
_HEALTH_S = 1.0


class Worker:
    """One engine, served over HTTP, tuned over the bus; `run` ends when `stop` is set and all requests are done."""

    def __init__(self, settings: WorkerSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._tuned = os.environ.get("POLYMORPH_DISABLE", "") not in {"1", "true"}
        self._cpu = Cpu.read()
        self._pool = settings.pool_name()
        self._state = "starting"
        self._started_at = clock.now()
        self._definitions: tuple[str, ...] = ()
        self._engine: Engine | None = None
        self._convergence: Convergence | None = None
        self._telling = Telling(self._pool, settings.worker_id, clock, self._revision)

    async def run(self, stop: asyncio.Event) -> None:
        """Raises `Fatal` where the engine cannot start or dies."""
        sock = listen(self._settings.host, self._settings.port)
        registry = Registry(self._record, self._clock)
        plane = ControlPlane(self._settings.nats, self._settings.worker_id, self._clock, registry)
        connecting = asyncio.create_task(plane.run())
        try:
            launch = await asyncio.to_thread(self._launch)
            engine = await self._started(launch, stop)
            if engine is not None:
                await self._serve(engine, launch, sock, plane, registry, stop)
        finally:
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await connecting
            sock.close()
            if self._engine is not None:
                await asyncio.to_thread(self._engine.stop)

    def _launch(self) -> EngineLaunch:
        launch = self._settings.launch()
        os.environ.update(launch.environment())
        if self._tuned and launch.slots:
            try:
                ensure_built()
            except DispatcherBuildError as error:
                raise Fatal(str(error)) from error
        return launch if self._tuned else launch.without_slots()

    async def _started(self, launch: EngineLaunch, stop: asyncio.Event) -> Engine | None:
        """The engine, or None where `stop` came first."""
        starting = asyncio.ensure_future(asyncio.to_thread(Engine.start, launch, self._telling))
        stopping = asyncio.ensure_future(stop.wait())
        began = self._clock.monotonic()
        while not starting.done() and not stopping.done():
            _log.info("%s", start_told(self._clock.monotonic() - began))
            await asyncio.wait({starting, stopping}, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        try:
            engine = await starting
        except Exception as error:
            raise Fatal(f"the engine does not start: {error}") from error
        configure("worker", self._settings.log_level)  # vLLM has set levels of its own meanwhile
        self._engine = engine
        return None if stop.is_set() else engine

    async def _serve(
        self,
        engine: Engine,
        launch: EngineLaunch,
        sock: socket.socket,
        plane: ControlPlane,
        registry: Registry,
        stop: asyncio.Event,
    ) -> None:
        self._definitions = await engine.definitions()
        serving = self._wired(engine)
        server = HttpServer(await application(engine, launch), sock, self._settings.drain_timeout_s)
        running = asyncio.create_task(server.run())
        dying = asyncio.create_task(self._until_dead(engine))
        stopping = asyncio.create_task(stop.wait())
        await server.started()
        self._state = "ready"
        plane.serve(serving)
        _log.info("%s serves %s", self._settings.url(), self._settings.served_name())
        await asyncio.wait({running, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not stop.is_set():
            server.stop()
            raise Fatal("the engine died" if dying.done() else "the HTTP server ended")
        dying.cancel()
        await self._drain(plane.bus, registry, serving.leasing)
        server.stop()
        await running
        await serving.telling.flush_last(plane.bus)
        if plane.bus is not None:
            await registry.remove(plane.bus)
        _log.info("drained")

    async def _drain(self, bus: Bus | None, registry: Registry, leasing: HostLeasing) -> None:
        """Says that we leave, and takes what is on its way until that is known."""
        self._state = "draining"
        _log.info("draining: %d requests run", self._telling.load.running)
        await leasing.close(bus)
        if bus is not None:
            await registry.put(bus)
            await self._clock.sleep(HEARTBEAT_S / 2)

    def _wired(self, engine: Engine) -> Serving:
        settings = self._settings
        trust = Trust.load(settings.trust_file) if settings.trust_file is not None else Trust()
        seen = GenerationFile(settings.data_dir / f"generation-{self._pool}")
        fence = Fence(self._pool, trust, seen.read(), seen.write)

        def loader_for(bus: Bus) -> Loader:
            return Loader(
                engine=engine,
                artifacts=ArtifactFolder(settings.data_dir / "kernels", bus),
                trust=trust,
                hardware=self._cpu.fingerprint,
                isa=self._cpu.isa,
                scratch=settings.data_dir.resolve() / "selftest",
            )

        self._convergence = Convergence(
            self._pool, settings.worker_id, fence, engine, loader_for, self._clock
        )
        leasing = HostLeasing(
            self._pool, settings.worker_id, engine, self._clock, lambda: self._telling.load.running > 0
        )
        return Serving(engine, self._convergence, leasing, self._telling, tuned=self._tuned)

    async def _until_dead(self, engine: Engine) -> None:
        while engine.alive:
            await self._clock.sleep(_HEALTH_S)

    def _revision(self) -> str:
        return self._convergence.revision.revision if self._convergence is not None else "empty"

    def _record(self) -> WorkerRecord:
        load = self._telling.load
        engine = self._engine
        return WorkerRecord.model_validate(
            {
                "worker_id": self._settings.worker_id,
                "pool": self._pool,
                "model": self._settings.served_name(),
                "url": self._settings.url(),
                "state": self._state,
                "generation": max(0, self._convergence.generation) if self._convergence else 0,
                "revision": self._revision(),
                "hardware": self._cpu.fingerprint,
                "slots": self._definitions,
                "running": load.running,
                "waiting": load.waiting,
                "kv_used": load.kv_used,
                "kv_capacity_tokens": engine.kv_capacity_tokens if engine is not None else 0,
                "max_num_seqs": self._settings.max_num_seqs,
                "started_at": self._started_at,
            }
        )
