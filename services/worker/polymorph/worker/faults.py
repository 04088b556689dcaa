"""What crashed here, kept over restarts of the worker, told when there is a bus; and what is in quarantine anywhere."""

import datetime as dt
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import BusError, NotFound, Poison
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import Quarantine
from polymorph.events.types import WorkerKernelFaulted
from polymorph.events.values import Revision
from polymorph.worker.tries import again_and_again

_log = logging.getLogger(__name__)
_TELL_S = 0.25
_AGAIN_S = 0.5
_COMPARE_S = 30.0
_MOST = 1000


class Fault(BaseModel, frozen=True):
    """One kernel that took an engine of this worker down.

    `held` once the fleet was seen to have it in quarantine: from then on what the fleet says of it is what counts here.
    """

    artifact: str
    definition: str
    how: Literal["crash", "hang"]
    evidence: str
    revision: str
    generation: int
    at: dt.datetime
    told: bool = False
    held: bool = False


class _Kept(BaseModel):
    faults: list[Fault] = []
    left: dict[str, str] = {}


class Faults:
    """A kernel that is in here is not loaded. `on_news` is called when one comes in from elsewhere, or is lifted."""

    def __init__(self, path: Path, pool: str, worker_id: str, clock: Clock) -> None:
        self._path = path
        self._pool = pool
        self._worker_id = worker_id
        self._clock = clock
        self._kept = _read(path)
        self._heard: dict[str, Quarantine] = {}
        self._kept_out: frozenset[str] = frozenset()
        self.on_news: Callable[[], None] = lambda: None

    @property
    def artifacts(self) -> frozenset[str]:
        """What may not run here now."""
        heard = {artifact for artifact, each in self._heard.items() if self._in_force(each)}
        own = {
            fault.artifact
            for fault in self._kept.faults
            if not (fault.held and fault.artifact in self._heard)
        }
        return frozenset(own | heard)

    def banned(self, artifacts: Collection[str]) -> bool:
        return not self.artifacts.isdisjoint(artifacts)

    async def against(self, bus: Bus, revision: Revision, running: Revision) -> set[str]:
        """What may not run, of `revision` too: asks the bus of what does not run yet, which knows before the watch has told."""
        asked = {kernel.artifact for kernel in revision.kernels}
        for artifact in asked - {kernel.artifact for kernel in running.kernels}:
            before = self._heard.get(artifact)
            try:
                value = (await bus.kv_get(topology.QUARANTINE, artifact)).value
            except NotFound:
                value = None
            if self._heard.get(artifact) is before:  # what was heard meanwhile is newer
                self._learn(artifact, value)
        self._kept_out = self.artifacts & asked
        return set(self.artifacts)

    @property
    def lifted(self) -> bool:
        """Whether something may run here again of the revision that was asked of last: what was refused may be right."""
        return not self._kept_out <= self.artifacts

    def left(self, revision: Revision) -> str | None:
        """Why this worker has left `revision`; None where it has not."""
        return self._kept.left.get(revision.revision)

    def check(self, revision: Revision) -> None:
        """Raises `Refused` for one that was left."""
        reason = self.left(revision)
        if reason is not None:
            raise Refused(reason)

    def add(self, fault: Fault) -> None:
        self._keep([*self._kept.faults, fault][-_MOST:])

    def leave(self, revision: str, reason: str) -> None:
        self._kept.left = {**self._kept.left, revision: reason}
        self._write()

    async def tell(self, bus: Bus) -> None:
        """Runs until cancelled: tells each fault once; how it goes on is the compiler's to say."""
        await again_and_again("the telling of faults", lambda: self._tell_all(bus), self._clock, _TELL_S)

    async def _tell_all(self, bus: Bus) -> None:
        errors = []
        for fault in [each for each in self._kept.faults if not each.told]:
            try:
                await self._tell(bus, fault)
            except BusError as error:
                _log.info("a fault is not told yet: %s", error)
            except Exception as error:  # noqa: BLE001 - raised once the others were told
                errors.append(error)
        if errors:
            raise errors[0]

    async def _tell(self, bus: Bus, fault: Fault) -> None:
        try:
            await bus.publish(self._event(fault))
        except Poison as error:  # no try will do better, and the next fault is not kept waiting
            _log.error("the fault of %s cannot be told: %s", fault.artifact[:12], error)
        told = self._as_held(fault.model_copy(update={"told": True}))
        self._keep([told if each is fault else each for each in self._kept.faults])

    async def watch(self, bus: Bus) -> None:
        """Runs until cancelled: hears what is in quarantine for the whole fleet."""
        await again_and_again("the watch on the quarantine", lambda: self._follow(bus), self._clock, _AGAIN_S)

    async def _follow(self, bus: Bus) -> None:
        async for entry in bus.kv_watch(topology.QUARANTINE):
            self._learn(entry.key, entry.value)
            self.on_news()

    async def reconcile(self, bus: Bus) -> None:
        """Runs until cancelled: lifts what the fleet has no more, which a watch does not tell of what was lifted before."""
        await again_and_again(
            "the comparison of the quarantine", lambda: self._compare(bus), self._clock, _COMPARE_S
        )

    async def _compare(self, bus: Bus) -> None:
        before = dict(self._heard)
        held = set(await bus.kv_keys(topology.QUARANTINE))
        known = set(before) | {fault.artifact for fault in self._kept.faults if fault.held}
        gone = {each for each in known - held if self._heard.get(each) is before.get(each)}
        for artifact in gone:
            self._learn(artifact, None)
        if gone:
            self.on_news()

    def _learn(self, artifact: str, value: bytes | None) -> None:
        """What the fleet says of `artifact`: with None it is in quarantine no more."""
        faults = self._kept.faults
        if value is None:
            self._heard.pop(artifact, None)
            faults = [each for each in faults if not (each.held and each.artifact == artifact)]
        else:
            self._heard[artifact] = _quarantine(artifact, value, self._clock.now())
            faults = [self._as_held(each) for each in faults]
        self._keep(faults)

    def _as_held(self, fault: Fault) -> Fault:
        entry = self._heard.get(fault.artifact)
        if fault.held or not fault.told or entry is None or not self._in_force(entry):
            return fault
        return fault.model_copy(update={"held": True})

    def _in_force(self, entry: Quarantine) -> bool:
        return entry.until is None or self._clock.now() < entry.until

    def _event(self, fault: Fault) -> WorkerKernelFaulted:
        fields = fault.model_dump(exclude={"told", "held"})
        return WorkerKernelFaulted(pool=self._pool, worker_id=self._worker_id, **fields)

    def _keep(self, faults: list[Fault]) -> None:
        if faults != self._kept.faults:
            self._kept.faults = faults
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
