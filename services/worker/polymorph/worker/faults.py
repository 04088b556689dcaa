"""What crashed here, kept over restarts of the worker, told when there is a bus; and what is in quarantine anywhere."""

import datetime as dt
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import BusError, NotFound, Poison
from polymorph.bus.port import Bus, KeyValue
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import Quarantine
from polymorph.events.types import WorkerKernelFaulted
from polymorph.events.values import Revision

_log = logging.getLogger(__name__)
_TELL_S = 0.25
_AGAIN_S = 0.5
_MOST = 1000


class Fault(BaseModel, frozen=True):
    """One kernel that took an engine of this worker down."""

    artifact: str
    definition: str
    how: Literal["crash", "hang"]
    evidence: str
    revision: str
    generation: int
    at: dt.datetime
    told: bool = False


class _Kept(BaseModel):
    faults: list[Fault] = []
    left: dict[str, str] = {}


class Faults:
    """A kernel that is in here is not loaded. `on_news` is called when one comes in from elsewhere."""

    def __init__(self, path: Path, pool: str, worker_id: str, clock: Clock) -> None:
        self._path = path
        self._pool = pool
        self._worker_id = worker_id
        self._clock = clock
        self._kept = _read(path)
        self._heard: dict[str, Quarantine] = {}
        self.on_news: Callable[[], None] = lambda: None

    @property
    def artifacts(self) -> frozenset[str]:
        """What may not run here now."""
        now = self._clock.now()
        heard = {artifact for artifact, each in self._heard.items() if each.until is None or now < each.until}
        return frozenset({fault.artifact for fault in self._kept.faults} | heard)

    def banned(self, artifacts: Collection[str]) -> bool:
        return not self.artifacts.isdisjoint(artifacts)

    async def against(self, bus: Bus, revision: Revision, running: Revision) -> set[str]:
        """What of `revision` may not run; asks the bus of what does not run yet, which knows before the watch has told."""
        found = set(self.artifacts)
        runs = {kernel.artifact for kernel in running.kernels}
        for artifact in {kernel.artifact for kernel in revision.kernels} - runs:
            try:
                entry = await bus.kv_get(topology.QUARANTINE, artifact)
            except NotFound:
                continue
            if entry.value is not None and self._holds(_quarantine(artifact, entry.value, self._clock.now())):
                found.add(artifact)
        return found

    def left(self, revision: Revision) -> str | None:
        """Why this worker has left `revision`; None where it has not."""
        return self._kept.left.get(revision.revision)

    def check(self, revision: Revision) -> None:
        """Raises `Refused` for one that was left."""
        reason = self.left(revision)
        if reason is not None:
            raise Refused(reason)

    def add(self, fault: Fault) -> None:
        self._kept.faults = [*self._kept.faults, fault][-_MOST:]
        self._write()

    def leave(self, revision: str, reason: str) -> None:
        self._kept.left = {**self._kept.left, revision: reason}
        self._write()

    async def tell(self, bus: Bus) -> None:
        """Runs until cancelled: tells each fault once; how it goes on is the compiler's to say."""
        while True:
            try:
                for fault in [each for each in self._kept.faults if not each.told]:
                    await self._tell(bus, fault)
                    self._replace(fault, fault.model_copy(update={"told": True}))
            except BusError as error:
                _log.info("a fault is not told yet: %s", error)
            await self._clock.sleep(_TELL_S)

    async def _tell(self, bus: Bus, fault: Fault) -> None:
        try:
            await bus.publish(self._event(fault))
        except Poison as error:  # no try will do better, and the next fault is not kept waiting
            _log.error("the fault of %s cannot be told: %s", fault.artifact[:12], error)

    async def watch(self, bus: Bus) -> None:
        """Runs until cancelled: hears what is in quarantine for the whole fleet."""
        while True:
            try:
                async for entry in bus.kv_watch(topology.QUARANTINE):
                    self._hear(entry)
            except BusError as error:
                _log.warning("the watch on the quarantine ended and starts again: %s", error)
            await self._clock.sleep(_AGAIN_S)

    def _hear(self, entry: KeyValue) -> None:
        if entry.value is None:
            self._heard.pop(entry.key, None)
            self._kept.faults = [f for f in self._kept.faults if f.artifact != entry.key or not f.told]
            self._write()
        else:
            self._heard[entry.key] = _quarantine(entry.key, entry.value, self._clock.now())
        self.on_news()

    def _holds(self, entry: Quarantine) -> bool:
        return entry.until is None or self._clock.now() < entry.until

    def _event(self, fault: Fault) -> WorkerKernelFaulted:
        fields = fault.model_dump(exclude={"told"})
        return WorkerKernelFaulted(pool=self._pool, worker_id=self._worker_id, **fields)

    def _replace(self, old: Fault, new: Fault) -> None:
        self._kept.faults = [new if each is old else each for each in self._kept.faults]
        self._write()

    def _write(self) -> None:
        staged = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            staged.write_text(self._kept.model_dump_json(indent=1))
            staged.replace(self._path)
        except OSError as error:
            _log.error(
                "faults cannot be kept in %s, and are known until this worker ends: %s", self._path, error
            )


def _read(path: Path) -> _Kept:
    try:
        return _Kept.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return _Kept()
    except (OSError, ValidationError) as error:
        _log.error("%s is of no use, what crashed before is not known: %s", path, error)
        return _Kept()


def _quarantine(artifact: str, value: bytes, now: dt.datetime) -> Quarantine:
    """One that cannot be read counts as what its name says: somebody wanted to stop us."""
    try:
        return Quarantine.model_validate_json(value)
    except ValidationError as error:
        _log.error("the quarantine of %s cannot be read, and holds: %s", artifact[:12], error)
        return Quarantine(artifact=artifact, reason="unreadable", since=now)
