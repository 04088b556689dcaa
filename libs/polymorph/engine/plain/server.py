"""From the settings of a plain server to the watch of its folder, in one of its processes."""

import fcntl
import hashlib
import logging
import os
import socket
from pathlib import Path
from typing import Any

from polymorph.config.clock import Clock, SystemClock
from polymorph.engine.flight import FLIGHT_VARIABLE, Flight, in_flight, path_of
from polymorph.engine.launch import EXTENSION
from polymorph.engine.loading.admission import Fence
from polymorph.engine.loading.engine import SlottedEngine
from polymorph.engine.loading.generation import GenerationFile
from polymorph.engine.loading.libraries import Libraries
from polymorph.engine.loading.loader import Loader
from polymorph.engine.plain.folder import KernelFolder
from polymorph.engine.plain.settings import KERNELS_VARIABLE, PlainSettings
from polymorph.engine.plain.watch import POLL_S, Watch
from polymorph.engine.provenance import RUNNING
from polymorph.events.subjects import is_token, pool_id
from polymorph.kernels.isa import Cpu
from polymorph.kernels.signing import Trust

_log = logging.getLogger(__name__)


async def serve(settings: PlainSettings, llm: Any, args: Any) -> None:
    """Runs as long as the engine lives. Of several front processes one watches, the others name what it says."""
    if settings.folder is None:
        return
    extension = str(llm.vllm_config.parallel_config.worker_extension_cls)
    if extension != EXTENSION:
        _log.error(
            "%s is set and the engine has no slots: add --worker-extension-cls %s",
            KERNELS_VARIABLE,
            EXTENSION,
        )
        return
    folder = KernelFolder(settings.folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    with _lock_file(folder, llm).open("a") as lock:
        while not _locked(lock.fileno()):
            _follow(folder)
            await clock.sleep(POLL_S)
        await _lead(settings, folder, llm, args, clock)


async def _lead(settings: PlainSettings, folder: KernelFolder, llm: Any, args: Any, clock: Clock) -> None:
    pool = settings.pool or pool_id(_served_name(args))
    if not is_token(pool):
        _log.error("POLYMORPH_POOL %r: use only A-Z a-z 0-9 _ and -", pool)
        return
    flights = OwnFlights(Path(os.environ.get(FLIGHT_VARIABLE, settings.flights)), llm)
    _quarantine(folder, flights)
    watch = _wired(settings, pool, folder, llm, clock)
    departure = Departure(llm, flights)
    try:
        await watch.run()
    finally:
        if llm.errored and not departure.meant:
            _quarantine(folder, flights)
        else:
            flights.forget()


class OwnFlights:
    """Flight records of the engines behind this front: of one folder, those of other data-parallel engines are others'."""

    def __init__(self, folder: Path, llm: Any) -> None:
        self._folder = folder
        world = llm.vllm_config.parallel_config.world_size
        self._ranks = [engine * world + rank for engine in _engines(llm) for rank in range(world)]

    def in_flight(self) -> tuple[Flight, ...]:
        return tuple(flight for flight in in_flight(self._folder) if flight.rank in self._ranks)

    def forget(self) -> None:
        """What runs from here on is no witness: the engine's processes go on writing to files without a name."""
        for rank in self._ranks:
            path_of(self._folder, rank).unlink(missing_ok=True)


class Departure:
    """Tells an engine that is ended from one that died: vLLM ends it before the application that stands over it."""

    def __init__(self, llm: Any, flights: OwnFlights) -> None:
        self.meant = False
        native = llm.shutdown

        def shutdown(*arguments: Any, **named: Any) -> Any:
            if not llm.errored:
                self.meant = True
                flights.forget()
            return native(*arguments, **named)

        llm.shutdown = shutdown


def _wired(settings: PlainSettings, pool: str, folder: KernelFolder, llm: Any, clock: Clock) -> Watch:
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - only a server has vLLM

    trust = Trust.load(settings.trust_file) if settings.trust_file is not None else Trust()
    seen = GenerationFile(settings.state / f"generation-{pool}")
    cpu = Cpu.read()
    loader = Loader(
        engine=SlottedEngine(llm, slotted=True, dead=EngineDeadError),
        artifacts=folder,
        trust=trust,
        hardware=cpu.fingerprint,
        isa=cpu.isa,
        scratch=settings.state / "selftest",
        libraries=Libraries(),
        min_isolation=settings.min_isolation,
        toolchains=settings.toolchains,
    )
    return Watch(
        pool, socket.gethostname(), folder, Fence(pool, trust, seen.read(), seen.write), loader, clock
    )


def _served_name(args: Any) -> str:
    """The name that clients send, or the model's folder."""
    names = getattr(args, "served_model_name", None)
    return str(names[0]) if names else Path(str(args.model)).resolve().name


def _lock_file(folder: KernelFolder, llm: Any) -> Path:
    """Fronts of one engine, or of one set of data-parallel engines, elect one of them."""
    group = hashlib.sha256(repr(_engines(llm)).encode()).hexdigest()[:8]
    return folder.path / f".front-{group}.lock"


def _engines(llm: Any) -> list[int]:
    """Data-parallel engines behind this front, of which there is one where nothing is said."""
    return list(getattr(llm.engine_core, "engine_ranks_managed", [0]))


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _follow(folder: KernelFolder) -> None:
    status = folder.status()
    if status is not None:
        RUNNING.revision = status.revision


def _quarantine(folder: KernelFolder, flights: OwnFlights) -> None:
    """An engine that ended within a kernel would end there again."""
    for flight in flights.in_flight():
        _log.error(
            "kernel %s was being called when the engine ended: it is quarantined", flight.artifact[:12]
        )
        folder.quarantine(flight.artifact, f"the engine ended in call {flight.calls} of rank {flight.rank}")
    flights.forget()
