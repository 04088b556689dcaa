"""Brings the engine to the desired state, again and again: level-triggered, so a worker that joins late is right."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from polymorph.bus.errors import Retryable
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Fence, Refused, check_named, check_quarantine
from polymorph.engine.loading.loader import Loaded, Loader
from polymorph.events.values import Revision, Way
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.changing import Changes
from polymorph.worker.domain.change import Plan
from polymorph.worker.domain.trying import Trying
from polymorph.worker.faults import Faults
from polymorph.worker.goals import Change, Goals
from polymorph.worker.hearing import Hearing
from polymorph.worker.loading import InForce
from polymorph.worker.numerics import settled_for
from polymorph.worker.reports import Reports
from polymorph.worker.seats import Engines
from polymorph.worker.served import AtWork
from polymorph.worker.service import InService
from polymorph.worker.switching import AGAIN_S, Switching
from polymorph.worker.tries import tried
from polymorph.worker.waiting import News

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 30.0
_STANDING_S = 2.0

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
        self._engines = engines
        self._changes = changes
        self._faults = faults
        self._loader_for = loader_for
        self._clock = clock
        self._refused: set[tuple[int, str]] = set()
        self._reports = Reports(pool, worker_id, clock)
        self._told = -1
        self._trying = Trying()
        """Tries in a row."""
        self._news = News()
        faults.on_news = self._news.set
        self._hearing = Hearing(pool, fence, self._reports, self._news, clock)
        self.change = asyncio.Lock()
        """Held while kernels change, so that nothing else does what would meet it."""
        self.standing = asyncio.Lock()
        """Held by whoever changes or pauses the engine that serves."""
        self._moving: asyncio.Task[None] | None = None
        self.service = InService(engines, changes, faults, self._news.set)
        self._goals = Goals(worker_id, self._hearing, faults, self.service, self._news)
        self._switching = Switching(self.service, engines, self.change, self.standing, clock)

    @property
    def loaded(self) -> InForce:
        return self.service.loaded

    @property
    def revision(self) -> Revision:
        return self.service.revision

    @property
    def generation(self) -> int:
        return self._told

    async def watch(self, bus: Bus) -> None:
        """Runs until cancelled: hears of desired states."""
        await self._hearing.watch(bus)

    async def run(self, bus: Bus) -> None:
        """Runs until cancelled: converges whenever there is news, and after failures that may pass."""
        self._trying.failures = 0
        self._news.set()  # what went on while the bus was away is told of at once
        while True:
            await self._wait(self._trying.pause_s or _LOOK_AGAIN_S)
            converged = await tried("the way to the desired state", lambda: self._converge(bus))
            self._trying.failures = 0 if converged else self._trying.failures + 1

    async def switch(self, *, empty: bool, ttl_s: float) -> int:
        """Empty slots, or those of the revision again, for a paired measurement; goes back by itself after `ttl_s`.

        Returns the calls that the revision's kernels have served so far.
        """
        return await self._switching.switch(empty=empty, ttl_s=ttl_s)

    async def plan(self, revision: Revision) -> Plan:
        """What it would take to run `revision`, which is not done.

        Raises:
            Refused: this worker would not.
        """
        return await self._changes.plan(revision, self.generation)

    def at_work(self, artifact: str | None) -> AtWork:
        """What an engine that is dead now was doing, where `artifact` was being called."""
        return self.service.at_work(self._hearing.generation, artifact)

    def retreat(self) -> EngineLaunch:
        """Back to the last revision that served and has nothing that is banned; it is engaged by `restore`, or with the
        next pass. Returns how its engine is launched.
        """
        return self.service.retreat()

    async def restore(self, engine: Engine) -> str:
        """Makes a new engine run what is loaded, before requests come to it; returns the revision.

        Does not wait for a change that still prepares: its self-tests may take minutes, it may wait for the very requests
        that wait for this engine, and it ends with an error where it meets the engine that died.

        Raises:
            Retryable: the engine that serves is being changed right now. What is loaded is engaged after that.
        """
        try:
            async with asyncio.timeout(_STANDING_S):
                await self.standing.acquire()
        except TimeoutError as error:
            raise Retryable("another change of the engine is under way") from error
        try:
            self._switching.stay()
            return await self.service.engage_on(engine)
        finally:
            self.standing.release()

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def _converge(self, bus: Bus) -> None:
        await self._settled()
        if self.service.banned:
            self.retreat()
        await self._taken_back()
        if self._faults.lifted:
            self._refused.clear()
            self._trying.anew()
        desired, goal = self._hearing.desired, self._goals.desired
        key = (self._hearing.generation, goal.revision)
        self._trying.of(key)
        if desired is None or key in self._refused or self._trying.off(self._clock.monotonic()):
            await self._repay(bus)
            return
        if self._trying.owed_first and self.service.owed is not None:
            await self._repay(bus)
            off_s = self._trying.put_off(self._clock.monotonic())
            _log.error(
                "%s does not come: it is tried again in %.0f s, or when it is desired anew",
                goal.revision,
                off_s,
            )
            return
        runs = goal.revision == self.revision.revision and not self.loaded.unsettled
        if runs and desired.generation == self._told:
            return
        began = self._clock.monotonic()
        if not runs:
            try:
                check_named(goal)
                waiting = self._goals.waiting(goal)  # before the bus is asked: it may answer late
                quarantined = await self._faults.against(bus, goal, self.revision)
                await self._load(bus, Change(goal, quarantined, waiting), desired.generation)
            except Refused as refusal:
                await self._taken_back()
                self._refused.add(key)
                await self._reports.refused(bus, desired.generation, goal.revision, str(refusal))
                if self.service.owed is not None:
                    self._news.set()  # it comes with the next pass, unless something else is desired by then
                return
        self._told = desired.generation
        load_s = self._clock.monotonic() - began
        await self._reports.loaded(bus, desired.generation, self.loaded, load_s)

    async def _taken_back(self) -> None:
        if self.service.unsure:
            await self._switching.restore()

    async def _repay(self, bus: Bus) -> None:
        """What is owed comes as any revision does; where it does not, the engine goes on as it is, without kernels."""
        if self.service.owed is None:
            return
        goal = self.service.owed.revision
        change = Change(goal, set(self._faults.artifacts), self._goals.waiting(goal))
        try:
            await self._load(bus, change, self._hearing.generation)
        except Refused as refusal:
            _log.error("%s does not come back: %s", goal.revision, refusal)
            await self._taken_back()
            self.service.forgives()

    async def _settled(self) -> None:
        """Waits for a change that went on while the bus was away; what it failed with is found again."""
        if self._moving is not None and not self._moving.done():
            await asyncio.wait({self._moving})

    async def _load(self, bus: Bus, change: Change, generation: int) -> None:
        goal = change.goal
        self.service.tries(goal)
        plan = await self._changes.plan(goal, generation)
        if plan.new_engine:
            check_quarantine(goal.kernels, change.quarantined)
            # Begun, it goes on though the bus be lost: between two engines there is nothing to go back to.
            self._moving = asyncio.create_task(self._move(bus, change, plan))
            await asyncio.shield(self._moving)
            return
        async with self.change:
            loader = self._loader_for(bus, self._engines.engine)
            bindings = await loader.prepare(goal, change.quarantined)
            reordered, waiting = self._goals.reordered, change.waiting
            settled = settled_for(self._changes, self.revision, goal, reordered, waiting, self._put_back)
            async with settled, self.standing:
                waiting.check()
                if self._engines.engine is not loader.engine:
                    raise Retryable("the engine that the kernels were prepared for is gone")
                # Until the kernels have served, the engine may fall silent or the bus be lost, with `goal` engaged.
                self.service.unsure = True
                self._switching.return_after(AGAIN_S)
                receipt = await self._changes.live(plan)
                loaded = await loader.engage(goal, bindings)
                await self.service.salts.salt(self._engines.engine, goal)
                self.service.runs(InForce.of(loaded, receipt))
            self._switching.stay()

    async def _put_back(self) -> None:
        async with self.standing:
            await self.service.put_back()

    async def _move(self, bus: Bus, change: Change, plan: Plan) -> None:
        _log.info("generation %d: %s", plan.generation, plan.why)
        async with self.change, self.standing:
            if plan.way is Way.ENGINE:
                await self._beside(bus, change, plan)
            else:
                await self._restarted(bus, change, plan)

    async def _beside(self, bus: Bus, change: Change, plan: Plan) -> None:
        made: list[Loaded] = []
        goal = change.goal

        async def engage_on(engine: Engine) -> None:
            loader = self._loader_for(bus, engine)
            # The engine took its time to start: what came into quarantine meanwhile counts as well.
            bindings = await loader.prepare(goal, change.quarantined | self._faults.artifacts)
            made.append(await loader.engage(goal, bindings))
            await self.service.salts.salt(engine, goal)

        receipt = await self._changes.beside(plan, goal.revision, engage_on, change.waiting)
        self.service.runs(InForce.of(made[0], receipt))

    async def _restarted(self, bus: Bus, change: Change, plan: Plan) -> None:
        """Kernels are verified and tried before the engine that serves is given up."""
        goal, before = change.goal, self._engines.engine
        bindings = await self._loader_for(bus, before).prepare(goal, change.quarantined)
        try:
            receipt = await self._changes.restart(plan, change.waiting)
        except Refused:
            # An engine like the one before has been started: it runs no kernels yet.
            self.service.unsure = True
            raise
        except BaseException:
            with contextlib.suppress(Retryable):  # where there is no engine at all
                if self._engines.engine is not before:  # it serves, and did not answer what it runs
                    self.service.empties(None)
            raise
        self.service.empties(receipt)
        check_quarantine(goal.kernels, self._faults.artifacts)
        engine = self._engines.engine
        loaded = await self._loader_for(bus, engine).engage(goal, bindings)
        await self.service.salts.salt(engine, goal)
        self.service.runs(InForce.of(loaded, receipt))
