"""Brings the engine to the desired state, again and again: level-triggered, so a worker that joins late is right."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from weakref import WeakKeyDictionary

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus, KeyValue
from polymorph.config.clock import Clock
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Fence, Refused, check_named
from polymorph.engine.loading.loader import Loaded, Loader
from polymorph.engine.loading.target import target
from polymorph.events.state import EMPTY, DesiredState, Reordered
from polymorph.events.values import Revision, Way
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.changing import Changes
from polymorph.worker.domain.change import Plan
from polymorph.worker.domain.numerics import identity, waits_for
from polymorph.worker.faults import Faults
from polymorph.worker.loading import InForce
from polymorph.worker.reports import Reports
from polymorph.worker.seats import Engines
from polymorph.worker.served import AtWork, Served, kernels

_log = logging.getLogger(__name__)
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_LOOK_AGAIN_S = 30.0
_NOTHING = InForce(EMPTY, (), {}, 0.0)

LoaderFor = Callable[[Bus, Engine], Loader]


class Convergence:
    """Owns what the slots run. One change at a time, whoever asks for it."""

    def __init__(
        self,
        pool: str,
        worker_id: str,
        fence: Fence,
        engines: Engines,
        changes: Changes,
        faults: Faults,
        loader_for: LoaderFor,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._fence = fence
        self._engines = engines
        self._changes = changes
        self._faults = faults
        self._served = Served(faults)
        self._loader_for = loader_for
        self._clock = clock
        self._desired: DesiredState | None = None
        self._refused: set[tuple[int, str]] = set()
        self._reports = Reports(pool, worker_id, clock)
        self._told = -1
        self._news = asyncio.Event()
        faults.on_news = self._news.set
        self._change = asyncio.Lock()
        self.standing = asyncio.Lock()
        """Held by whoever changes or pauses the engine that serves."""
        self._moving: asyncio.Task[None] | None = None
        self._return: asyncio.Task[None] | None = None
        self._unsure = False  # whether the slots may run something else than `loaded`, and not by a switch
        self._salts: WeakKeyDictionary[Engine, str | None] = WeakKeyDictionary()
        self.loaded = _NOTHING

    @property
    def revision(self) -> Revision:
        return self.loaded.revision

    @property
    def change(self) -> asyncio.Lock:
        """Held while kernels change, so that nothing else does what would meet it."""
        return self._change

    @property
    def generation(self) -> int:
        return self._told

    async def watch(self, bus: Bus) -> None:
        """Runs until cancelled: hears of desired states."""
        while True:
            try:
                async for entry in bus.kv_watch(topology.DESIRED, self._pool):
                    await self._hear(bus, entry)
            except BusError as error:
                _log.warning("the watch on the desired state ended and starts again: %s", error)
            await self._clock.sleep(_RETRY_S[0])

    async def run(self, bus: Bus) -> None:
        """Runs until cancelled: converges whenever there is news, and after failures that may pass."""
        failures = 0
        while True:
            pause = _RETRY_S[min(failures, len(_RETRY_S)) - 1] if failures else _LOOK_AGAIN_S
            await self._wait(pause)
            try:
                await self._converge(bus)
                failures = 0
            except BusError as error:
                failures += 1
                _log.warning("not converged yet, trying again: %s", error)

    async def switch(self, *, empty: bool, ttl_s: float) -> int:
        """Empty slots, or those of the revision again, for a paired measurement; goes back by itself after `ttl_s`.

        Returns the calls that the revision's kernels have served so far.
        """
        if identity(self.revision) is not None:
            raise Refused(
                "a lossy revision is not switched for a measurement: requests would meet two numerics"
            )
        async with self._change:
            self._return_after(ttl_s if empty else _RETRY_S[0])
            async with self.standing:
                await self._engines.engine.engage(() if empty else self.loaded.bindings, keep_packed=True)
            self._engines.runs(EMPTY.revision if empty else self.revision.revision)
            self._unsure = False
            if not empty:
                self._stay()
            counters = await self._engines.engine.counters()
        return sum(counters.served.get(each, 0) for each in {b.artifact for b in self.loaded.bindings})

    def _return_after(self, seconds: float) -> None:
        """Begun before the slots change: whatever becomes of the change, they come back."""
        self._stay()
        self._return = asyncio.create_task(self._until_restored(seconds))

    def _stay(self) -> None:
        if self._return is not None:
            self._return.cancel()

    async def _until_restored(self, pause_s: float) -> None:
        while self._engines.alive:
            await self._clock.sleep(pause_s)
            try:
                await self._restore()
            except BusError as error:
                _log.error("the slots are not back to %s, trying again: %s", self.revision.revision, error)
                pause_s = _RETRY_S[0]
            else:
                return

    async def _restore(self) -> None:
        """Engages what is loaded, whatever the slots run now."""
        async with self._change, self.standing:
            await self._put_back()

    async def _put_back(self) -> None:
        try:
            await self._changes.back_to(self.revision)
            await self._engines.engine.engage(self.loaded.bindings)
        except Refused as refusal:
            # The engine's own code always runs; convergence then loads what is desired anew.
            _log.error("%s cannot serve again, the slots are empty: %s", self.revision.revision, refusal)
            await self._engines.engine.engage(())
            self.loaded = _NOTHING
            self._news.set()
        await self._salted(self._engines.engine, self.revision)
        self._engines.runs(self.revision.revision)
        self._unsure = False

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def _hear(self, bus: Bus, entry: KeyValue) -> None:
        if entry.value is None or entry.key != self._pool:
            return
        try:
            desired = DesiredState.model_validate_json(entry.value)
        except ValueError as error:
            _log.error("the desired state of %s is not one: %s", self._pool, error)
            return
        try:
            self._fence.admit(desired)
        except Refused as refusal:
            await self._reports.refused(bus, desired.generation, desired.stable.revision, str(refusal))
            return
        if self._desired is None or desired.generation > self._desired.generation:
            self._desired = desired
            self._news.set()

    async def _converge(self, bus: Bus) -> None:
        await self._settled()
        if self._faults.banned(kernels(self.revision)):
            self.retreat()
        if self._unsure:
            await self._restore()
        desired = self._desired
        goal = target(desired, self._worker_id)
        if desired is None or (desired.generation, goal.revision) in self._refused:
            return
        if goal.revision == self.revision.revision and desired.generation == self._told:
            return
        began = self._clock.monotonic()
        if goal.revision != self.revision.revision:
            try:
                check_named(goal)
                quarantined = await self._faults.against(bus, goal)
                await self._load(bus, goal, desired.generation, quarantined)
            except Refused as refusal:
                if self._unsure:
                    await self._restore()
                self._refused.add((desired.generation, goal.revision))
                await self._reports.refused(bus, desired.generation, goal.revision, str(refusal))
                return
        self._told = desired.generation
        load_s = self._clock.monotonic() - began
        await self._reports.loaded(bus, desired.generation, self.loaded, load_s)

    async def _load(self, bus: Bus, goal: Revision, generation: int, quarantined: set[str]) -> None:
        self._faults.check(goal)
        self._served.trying = goal
        plan = await self._changes.plan(goal, generation)
        if plan.new_engine:
            # Begun, it goes on though the bus be lost: between two engines there is nothing to go back to.
            self._moving = asyncio.create_task(self._move(bus, goal, plan, quarantined))
            await asyncio.shield(self._moving)
            return
        async with self._change:
            loader = self._loader_for(bus, self._engines.engine)
            bindings = await loader.prepare(goal, quarantined)
            async with self._settled_for(goal), self.standing:
                # Until the kernels have served, the engine may fall silent or the bus be lost, with `goal` engaged.
                self._unsure = True
                self._return_after(_RETRY_S[0])
                receipt = await self._changes.live(plan)
                loaded = await loader.engage(goal, bindings)
                await self._salted(self._engines.engine, goal)
                self._runs(InForce.of(loaded, receipt))
            self._stay()

    @contextlib.asynccontextmanager
    async def _settled_for(self, goal: Revision) -> AsyncIterator[None]:
        """Where the change of numerics asks for it, inside no request runs; a change that fails is taken back inside."""
        reordered = Reordered.AT_ONCE if self._desired is None else self._desired.reordered
        reason = waits_for(self.revision, goal, reordered)
        if reason is None:
            yield
            return
        _log.info("%s waits until no request runs: %s", goal.revision, reason)
        async with self._changes.settled():
            try:
                yield
            except (Refused, BusError):
                async with self.standing:
                    await self._put_back()
                raise

    async def _salted(self, engine: Engine, revision: Revision) -> None:
        """No request reads prefix cache that was written under other numerics. Stock engines are never salted."""
        salt = identity(revision)
        if salt != self._salts.get(engine):
            await engine.scheduler.salt(salt)
            self._salts[engine] = salt

    async def _move(self, bus: Bus, goal: Revision, plan: Plan, quarantined: set[str]) -> None:
        _log.info("generation %d: %s", plan.generation, plan.why)
        async with self._change, self.standing:
            if plan.way is Way.ENGINE:
                await self._beside(bus, goal, plan, quarantined)
            else:
                await self._restarted(bus, goal, plan, quarantined)

    async def _beside(self, bus: Bus, goal: Revision, plan: Plan, quarantined: set[str]) -> None:
        made: list[Loaded] = []

        async def engage_on(engine: Engine) -> None:
            loader = self._loader_for(bus, engine)
            made.append(await loader.engage(goal, await loader.prepare(goal, quarantined)))
            await self._salted(engine, goal)

        receipt = await self._changes.beside(plan, goal.revision, engage_on)
        self._runs(InForce.of(made[0], receipt))

    async def _restarted(self, bus: Bus, goal: Revision, plan: Plan, quarantined: set[str]) -> None:
        """Kernels are verified and tried before the engine that serves is given up."""
        before = self.loaded
        bindings = await self._loader_for(bus, self._engines.engine).prepare(goal, quarantined)
        receipt = await self._changes.restart(plan)
        self._runs(dataclasses.replace(_NOTHING, receipt=receipt))
        try:
            loaded = await self._loader_for(bus, self._engines.engine).engage(goal, bindings)
            await self._salted(self._engines.engine, goal)
        except Refused:
            back = await self._changes.restart(await self._changes.plan(before.revision, plan.generation))
            await self._engines.engine.engage(before.bindings)
            await self._salted(self._engines.engine, before.revision)
            self._runs(dataclasses.replace(before, receipt=back))
            raise
        self._runs(InForce.of(loaded, receipt))

    def _runs(self, loaded: InForce) -> None:
        self._served.add(self.loaded)
        self.loaded = loaded
        self._engines.runs(loaded.revision.revision)
        self._unsure = False

    def at_work(self, artifact: str | None) -> AtWork:
        """What an engine that is dead now was doing, where `artifact` was being called."""
        ran = self._served.at_work(self.revision, artifact, unsure=self._unsure)
        return AtWork.of(self._desired.generation if self._desired else 0, ran, artifact)

    def retreat(self) -> EngineLaunch | None:
        """Back to the last revision that served and has nothing that is banned; it is engaged by `restore`, or with the
        next pass. Returns how its engine was launched.
        """
        good = self._served.last_good(self.loaded) or _NOTHING
        if good is not self.loaded:
            _log.warning("back from %s to %s", self.revision.revision, good.revision.revision)
        self.loaded = good
        self._unsure = True
        self._news.set()
        return self._engines.launch_of(self.revision.revision)

    async def restore(self, engine: Engine) -> str:
        """Makes a new engine run what is loaded, before requests come to it; returns the revision."""
        async with self._change, self.standing:
            self._stay()
            await engine.engage(self.loaded.bindings)
            await self._salted(engine, self.revision)
            self._unsure = False
            return self.revision.revision

    async def _settled(self) -> None:
        """Waits for a change that went on while the bus was away; what it failed with is found again."""
        if self._moving is not None and not self._moving.done():
            await asyncio.wait({self._moving})

    async def plan(self, revision: Revision) -> Plan:
        """What it would take to run `revision`, which is not done.

        Raises:
            Refused: this worker would not.
        """
        return await self._changes.plan(revision, self.generation)
