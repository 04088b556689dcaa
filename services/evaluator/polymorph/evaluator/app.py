"""The composition root of the evaluator."""

import asyncio
import logging
import os
from pathlib import Path

from polymorph.bus.port import Bus, Consumption
from polymorph.config.clock import Clock
from polymorph.engine.launch import EngineLaunch, openmp_library
from polymorph.evaluator.adapters.engine_lane import EngineGone, EngineLane
from polymorph.evaluator.adapters.lease import HostLease
from polymorph.evaluator.adapters.records import Records
from polymorph.evaluator.adapters.sandbox.compiler import build_harness, confined
from polymorph.evaluator.adapters.sandbox.lane import Lane, Machine
from polymorph.evaluator.domain.roofline import Peaks
from polymorph.evaluator.gates.building import Builder
from polymorph.evaluator.gates.correctness import Correctness
from polymorph.evaluator.gates.end_to_end import EngineGate
from polymorph.evaluator.gates.findings import Design
from polymorph.evaluator.gates.host import FreeHost, Host
from polymorph.evaluator.gates.micro import Micro
from polymorph.evaluator.gates.peaks import measure
from polymorph.evaluator.gates.pipeline import EndToEnd, NoEngine, Pipeline
from polymorph.evaluator.handlers import Evaluating, Identity
from polymorph.evaluator.settings import EvaluatorSettings
from polymorph.events.subjects import subject
from polymorph.events.types import EvaluateCandidate
from polymorph.kernels.isa import CACHES, Cpu
from polymorph.kernels.signing import Signer
from polymorph.kernels.toolchain import detect_toolchain
from polymorph.sandbox import isolation
from polymorph.telemetry.health import HealthServer

_log = logging.getLogger(__name__)
_DEFAULT_CACHE = 32 << 20


class Evaluator:
    """Everything wired together; `run` serves until `stop` is set."""

    def __init__(self, settings: EvaluatorSettings, bus: Bus, clock: Clock) -> None:
        self._settings, self._bus, self._clock = settings, bus, clock
        cpu = Cpu.read()
        level = isolation.require(settings.isolation())
        toolchain = detect_toolchain()
        self._hardware = cpu.hardware_class if settings.hardware == "auto" else settings.hardware
        harness = build_harness(toolchain, settings.data_dir / "harness")
        cpus = sorted(os.sched_getaffinity(0))[: settings.threads or None]
        machine = Machine(
            harness.absolute(), cpu.isa.name, int(cpu.isa), tuple(cpus), level, openmp_library()
        )
        self._lane = Lane(machine)
        builder = Builder(toolchain, confined(level), cpu.isa, settings.data_dir / "builds")
        design = Design(settings.processes, settings.loads, settings.pairs, settings.margin)
        micro = Micro(self._lane, self._peaks, design, last_cache(CACHES), self._host)
        self._engine: EngineLane | None = None
        self._end_to_end = self._engine_gate()
        pipeline = Pipeline(builder, self._lane, Correctness(self._lane), micro, self._end_to_end)
        identity = Identity(self._hardware, cpu.fingerprint, toolchain.digest, isolation.describe(level))
        signer = Signer.load_or_generate(settings.signing_key)
        self._evaluating = Evaluating(
            bus, pipeline, signer, Records(settings.data_dir / "evaluations"), identity
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._known_peaks: Peaks | None = None
        self._serving = False

    async def ready(self) -> bool:
        """The sandbox is up, or is started anew by the next job; and the bus is there."""
        return self._serving and self._lane.ready and await self._bus.ready()

    async def run(self, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        health = HealthServer(self._settings.health_port, self.ready, host=self._settings.health_host)
        await health.start()
        warming: asyncio.Task[None] | None = None
        try:
            await asyncio.to_thread(self._lane.start)
            if self._lane.native_problem:
                _log.warning("no incumbent to compare with: %s", self._lane.native_problem)
            warming = asyncio.create_task(self._warm())
            await self._consume_until(stop)
        finally:
            self._serving = False
            if self._engine is not None:
                await asyncio.to_thread(self._engine.stop)
                await asyncio.gather(*(task for task in (warming,) if task), return_exceptions=True)
            await asyncio.to_thread(self._lane.stop)
            await health.stop()

    async def _consume_until(self, stop: asyncio.Event) -> None:
        where = subject("cmd", EvaluateCandidate.DOMAIN, EvaluateCandidate.NAME, 1, self._hardware)
        consumption = Consumption(durable=f"evaluator-{self._hardware}", subject=where, max_in_flight=1)
        consuming = asyncio.ensure_future(self._bus.consume(consumption, self._evaluating.handle))
        stopped = asyncio.ensure_future(stop.wait())
        self._serving = True
        _log.info("evaluator %s takes jobs for %s", self._settings.instance, self._hardware)
        await asyncio.wait({consuming, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if consuming.done():
            consuming.result()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)

    def _engine_gate(self) -> EndToEnd:
        if not self._settings.engine or self._settings.model is None:
            return NoEngine(lambda: "this evaluator has no engine: set POLYMORPH_EVALUATOR_MODEL and _ENGINE")
        launch = EngineLaunch(
            model=self._settings.model.absolute(),
            dtype=self._settings.engine_dtype,
            max_model_len=self._settings.engine_max_model_len,
            threads=self._settings.threads,
        )
        self._engine = EngineLane(launch, self._settings.data_dir / "engine", self._settings.engine_start_s)
        return EngineGate(
            self._engine, self._host, self._settings.data_dir / "artifacts",
            blocks=self._settings.engine_blocks, margin=self._settings.end_to_end_margin,
        )  # fmt: skip

    async def _warm(self) -> None:
        """Starts the engine beside the first evaluations; one that fails is tried again when it is needed."""
        if self._engine is None:
            return
        try:
            await asyncio.to_thread(self._engine.start)
        except EngineGone as error:
            _log.warning("%s", error)

    def _host(self) -> Host:
        """A lease of its own for each measurement."""
        if not self._settings.host_lease or self._loop is None:
            return FreeHost()
        return HostLease(self._bus, self._loop, self._settings.host_lease, self._settings.host_wait_s)

    def _peaks(self) -> Peaks:
        """The best that was ever seen: measured anew each time, since a busy host only reads too low."""
        now = measure(self._lane)
        self._known_peaks = now if self._known_peaks is None else self._known_peaks.best_of(now)
        return self._known_peaks


def last_cache(folder: Path) -> int:
    """Bytes of the largest cache of this processor."""
    sizes = []
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=_DEFAULT_CACHE)
