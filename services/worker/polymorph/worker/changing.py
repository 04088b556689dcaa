"""Settings brought into force: planned, set live or by another engine, and read back from inside."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from polymorph.bus.errors import Retryable
from polymorph.engine.launch import EngineLaunch, on_cpu
from polymorph.engine.loading.admission import Refused
from polymorph.events.values import EngineSettings, Revision, Way
from polymorph.worker.adapters import memory
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.adapters.scheduler import InForce
from polymorph.worker.domain.change import (
    GIB,
    SUPPORTED,
    Plan,
    Room,
    Running,
    Settings,
    goal_settings,
    plan,
    settings_over,
)
from polymorph.worker.launching import launch_with, settings_of
from polymorph.worker.rolling import Rolling
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.waiting import Waiting, whatever_comes

_log = logging.getLogger(__name__)

_DRAFT = "speculative_model"
_LOOKS, _LOOK_S = 10, 0.03
_NOT_ASKED = Room(0, 0, known=False)

EngageOn = Callable[[Engine], Awaitable[None]]
"""Makes an engine run the kernels of a revision."""


@dataclass(frozen=True)
class Receipt:
    """What is in force, as the engine itself says; `stood_s` is how long streams stood still for it."""

    settings: EngineSettings
    way: Way
    stood_s: float


class Changes(Protocol):
    """How settings come into force."""

    async def now(self) -> Receipt | None: ...

    async def plan(self, revision: Revision, generation: int) -> Plan: ...

    async def live(self, plan: Plan) -> Receipt: ...

    async def back_to(self, revision: Revision) -> Receipt | None: ...

    async def read_back(self, engine: Engine, revision: Revision) -> Receipt: ...

    def launch_of(self, revision: Revision) -> EngineLaunch: ...

    async def beside(self, plan: Plan, revision: str, engage_on: EngageOn, waiting: Waiting) -> Receipt: ...

    async def restart(self, plan: Plan, waiting: Waiting) -> Receipt: ...

    def settled(self, waiting: Waiting) -> AbstractAsyncContextManager[object]: ...


class Changing:
    """Plans and brings about changes of settings, one at a time: the caller sees to that."""

    def __init__(
        self, seats: Seats, base: EngineLaunch, rolling: Rolling, spare_bytes: int = GIB // 2
    ) -> None:
        self._seats = seats
        self._base = base
        self._rolling = rolling
        self._spare_bytes = spare_bytes

    async def now(self) -> Receipt | None:
        """What is in force, whatever should be; None where the engine was started without our calls."""
        seat = self._serving()
        try:
            force = await seat.engine.scheduler.read()
        except Refused as refusal:
            _log.warning("settings cannot be read or changed live: %s", refusal)
            return None
        return Receipt(_in_force(settings_of(seat.launch), force), Way.NOTHING, 0.0)

    def launch_of(self, revision: Revision) -> EngineLaunch:
        """How an engine is launched that runs `revision`: what that does not name is the worker's own."""
        return launch_with(
            self._base, settings_over(settings_of(self._base), revision), self._slots(revision)
        )

    def settled(self, waiting: Waiting | None = None) -> AbstractAsyncContextManager[object]:
        """Inside, no request runs: others take newcomers where there are any, else they wait here.

        Raises:
            Retryable: requests in flight that take too long for newcomers to wait; `Overtaken` as `waiting` says.
        """
        return self._rolling.turn(self._seats, waiting or whatever_comes())

    async def plan(self, revision: Revision, generation: int) -> Plan:
        """What it would take to run the settings of `revision`; nothing is done.

        Raises:
            Refused: a setting that is not supported, or that this worker cannot have.
        """
        seat = self._serving()
        running = await self._running(seat)
        planned = self._planned(running, revision, _NOT_ASKED, generation)
        if not planned.new_engine:
            return planned
        # Only now: who counts an engine's pages keeps it from mapping memory, for as long as many steps take.
        room = await asyncio.to_thread(self._room, seat, planned.settings)
        return self._planned(running, revision, room, generation)

    def _planned(self, running: Running, revision: Revision, room: Room, generation: int) -> Plan:
        settings = goal_settings(settings_of(self._base), revision)
        return plan(running, settings, self._slots(revision), room=room, generation=generation)

    def _slots(self, revision: Revision) -> tuple[str, ...]:
        return self._base.slots if revision.slots is None else revision.slots

    def _serving(self) -> Seat:
        seat = self._seats.current
        if seat is None:
            raise Retryable("the engine is being restarted")
        return seat

    async def live(self, plan: Plan) -> Receipt:
        """Sets what changes between two steps, and reads it back after a step; nothing where nothing changes."""
        engine = self._seats.engine
        if not plan.live:
            return await self._told(engine.scheduler.known, plan.settings, plan.way, 0.0)
        stood_s = 0.0
        scheduled = {name: value for name, value in plan.live.items() if name != _DRAFT}
        if scheduled:
            stood_s += (await engine.scheduler.set(scheduled)).seconds
        if _DRAFT in plan.live:
            stood_s += await engine.draft_weights(plan.live[_DRAFT])
        force = await self._after_a_step(engine)
        _raise_for_difference(scheduled, force.settings)
        self._note(plan)
        return Receipt(_in_force(plan.settings, force), plan.way, stood_s)

    async def back_to(self, revision: Revision) -> Receipt | None:
        """Sets live what another revision has left behind; None where `revision` needs another engine."""
        running = await self._running(self._serving())
        back = self._planned(running, revision, _NOT_ASKED, 0)
        return None if back.new_engine else await self.live(back)

    async def read_back(self, engine: Engine, revision: Revision) -> Receipt:
        """What an engine says that takes no requests yet.

        Raises:
            Refused: that is not what `revision` asks for.
        """
        launch = self.launch_of(revision)
        seat = next((each for each in self._seats.living if each.engine is engine), None)
        if seat is not None and seat.launch != launch:  # what a launch leaves to vLLM tells nothing
            raise Refused(f"{revision.revision} needs an engine that is launched otherwise")
        return await self._told(engine.scheduler.read, settings_of(launch), Way.NOTHING, 0.0)

    async def beside(
        self, plan: Plan, revision: str, engage_on: EngageOn, waiting: Waiting | None = None
    ) -> Receipt:
        """Warms another engine with its kernels, hands newcomers over, and lets the old one drain.

        Raises:
            Refused: the new engine does not start, or is not what was asked for; the old one still serves.
            Overtaken: as `waiting` says, while one before that drains.
        """
        await (waiting or whatever_comes()).on(self._seats.retired())
        launch = launch_with(self._base, plan.settings, plan.slots)
        try:
            seat = await self._seats.open(launch)
        except EngineNotStarted as error:
            raise Refused(f"{error}; the engine before it serves on") from error
        try:
            receipt = await self._told(seat.engine.scheduler.read, plan.settings, plan.way, 0.0)
            await engage_on(seat.engine)
            seat.revision = revision
        except BaseException:
            self._seats.retire(seat)
            raise
        before = self._seats.seat(seat)
        if before is not None:
            self._seats.retire(before)
        return receipt

    async def restart(self, plan: Plan, waiting: Waiting | None = None) -> Receipt:
        """Drains and restarts the engine, one worker of the pool at a time; the new one runs no kernels yet.

        Raises:
            Refused: the new engine does not start; one like the old has been started again, and runs no kernels.
            Retryable: another worker restarts, or requests in flight take too long; `Overtaken` as `waiting` says.
        """
        async with self._rolling.turn(self._seats, waiting or whatever_comes()) as turn:
            old = self._seats.current
            try:
                seat = await self._seats.replace(old, launch_with(self._base, plan.settings, plan.slots))
            except EngineNotStarted as error:
                await self._seats.replace(None, old.launch if old is not None else self._base)
                raise Refused(f"{error}; the engine runs as before") from error
        return await self._told(seat.engine.scheduler.read, plan.settings, plan.way, turn.stood_s)

    async def _running(self, seat: Seat) -> Running:
        settings = settings_of(seat.launch)
        try:
            force = await seat.engine.scheduler.known()
        except Refused as refusal:
            _log.warning("settings cannot be changed live: %s", refusal)
            return Running(settings, seat.launch.slots)
        for name, why in force.missing.items():
            _log.warning("%s cannot be set live: %s", name, why)
        live = set(force.settings)
        if settings["speculative_method"] == "draft_model":
            live.add(_DRAFT)
        return Running({**settings, **force.settings}, seat.launch.slots, frozenset(live), force.envelope)

    def _room(self, seat: Seat, settings: Mapping[str, Any]) -> Room:
        if not on_cpu():
            return Room(0, 0, known=False)
        # Cache that nothing has been written to is not held yet: the new engine's is counted in full.
        needed = memory.held_by(seat.engine.processes) + int(settings["kv_gib"]) * GIB + self._spare_bytes
        # One that still drains will be gone: it is waited for before another starts.
        leaving = [other for other in self._seats.living if other is not seat]
        freed = sum(memory.held_by(other.engine.processes) for other in leaving if other.engine.alive)
        return Room(needed, memory.available() + freed)

    async def _told(
        self, ask: Callable[[], Awaitable[InForce]], settings: Settings, way: Way, stood_s: float
    ) -> Receipt:
        """What the engine itself says that it runs, which must be `settings`."""
        try:
            force = await ask()
        except Refused:  # started without our calls: what it was started with is all that can be told
            return Receipt(EngineSettings(**settings), way, stood_s)
        wanted = {
            name: settings[name] for name in SUPPORTED if name in force.config or name in force.settings
        }
        _raise_for_difference(_comparable(wanted), {**force.config, **force.settings})
        return Receipt(_in_force(settings, force), way, stood_s)

    async def _after_a_step(self, engine: Engine) -> InForce:
        """A step of the traffic or, where there is none, of a request of our own: among others that would wait."""
        first = await engine.scheduler.read()
        for _ in range(_LOOKS):
            await asyncio.sleep(_LOOK_S)
            force = await engine.scheduler.read()
            if force.step > first.step:
                return force
        await engine.exercise(1)
        force = await engine.scheduler.read()
        if force.step <= first.step:
            raise Refused("the engine made no step with the new settings")
        return force

    def _note(self, plan: Plan) -> None:
        """A seat that is replaced from now on, for whatever reason, is replaced by one with these settings."""
        seat = self._seats.current
        if seat is not None and plan.live:
            seat.launch = launch_with(seat.launch, plan.settings, plan.slots)


def _in_force(settings: Mapping[str, Any], force: InForce) -> EngineSettings:
    told = {name: value for name, value in {**force.config, **force.settings}.items() if name in SUPPORTED}
    return EngineSettings(**{**settings, **told})


def _comparable(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Where None leaves the choice to vLLM, any answer is right."""
    return {name: value for name, value in wanted.items() if value is not None}


def _raise_for_difference(wanted: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if told.get(name) != value:
            raise Refused(f"the engine was given {name}={value!r} and says {told.get(name)!r}")
