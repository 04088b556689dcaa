"""Brings the engine to the desired state, again and again: level-triggered, so a worker that joins late is right."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from polymorph.bus import topology
from polymorph.bus.errors import BusError, NotFound
from polymorph.bus.port import Bus, KeyValue
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Fence, Refused, check_named
from polymorph.engine.loading.loader import Loaded, Loader
from polymorph.engine.loading.target import target
from polymorph.events.state import EMPTY, DesiredState, Quarantine, Reordered
from polymorph.events.types import WorkerLoaded, WorkerRefused
from polymorph.events.values import Revision, Way
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.changing import Changes, Receipt
from polymorph.worker.domain.change import Plan
from polymorph.worker.domain.numerics import identity, waits_for
from polymorph.worker.loading import InForce
from polymorph.worker.seats import Engines

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
        loader_for: LoaderFor,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._fence = fence
        self._engines = engines
        self._changes = changes
        self._loader_for = loader_for
        self._clock = clock
        self._desired: DesiredState | None = None
        self._refused: set[tuple[int, str]] = set()
        self._told_refusals: set[tuple[int, str, str]] = set()
        self._told = -1
        self._news = asyncio.Event()
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
            await self._refuse(bus, desired.generation, desired.stable.revision, str(refusal))
            return
        if self._desired is None or desired.generation > self._desired.generation:
            self._desired = desired
            self._news.set()

    async def _converge(self, bus: Bus) -> None:
        await self._settled()
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
                quarantined = await _quarantined(bus, goal)
                await self._load(bus, goal, desired.generation, quarantined)
            except Refused as refusal:
                if self._unsure:
                    await self._restore()
                self._refused.add((desired.generation, goal.revision))
                await self._refuse(bus, desired.generation, goal.revision, str(refusal))
                return
        self._told = desired.generation
        await self._tell_loaded(bus, desired.generation, self._clock.monotonic() - began)

    async def _load(self, bus: Bus, goal: Revision, generation: int, quarantined: set[str]) -> None:
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
        self.loaded = loaded
        self._engines.runs(loaded.revision.revision)
        self._unsure = False

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

    async def _tell_loaded(self, bus: Bus, generation: int, load_s: float) -> None:
        loaded = self.loaded
        _log.info(
            "generation %d: runs %s with %d kernels, %d calls served, engine stood still for %.3f s of %.1f s",
            generation,
            loaded.revision.revision,
            len(loaded.bindings),
            loaded.served_calls,
            loaded.paused_s,
            load_s,
        )
        await _until_told(
            lambda: bus.publish(
                WorkerLoaded(
                    pool=self._pool,
                    worker_id=self._worker_id,
                    generation=generation,
                    revision=loaded.revision.revision,
                    kernels=tuple(binding.artifact for binding in loaded.bindings),
                    served_calls=loaded.served_calls,
                    served=dict(loaded.served),
                    load_s=load_s,
                    paused_s=loaded.paused_s,
                    **_told(loaded.receipt),
                )
            ),
            self._clock,
        )

    async def _refuse(self, bus: Bus, generation: int, revision: str, reason: str) -> None:
        if (generation, revision, reason) in self._told_refusals:
            return
        self._told_refusals.add((generation, revision, reason))
        _log.error("refused %s of generation %d: %s", revision, generation, reason)
        await _until_told(
            lambda: bus.publish(
                WorkerRefused(
                    pool=self._pool,
                    worker_id=self._worker_id,
                    generation=generation,
                    revision=revision,
                    reason=reason,
                )
            ),
            self._clock,
        )


def _told(receipt: Receipt | None) -> dict[str, Any]:
    if receipt is None:
        return {}
    return {"settings": receipt.settings, "way": receipt.way, "stood_s": receipt.stood_s}


async def _until_told(publish: Callable[[], Awaitable[int]], clock: Clock) -> None:
    """The fact stands whether or not the bus is there: tell it when it is back. Ids are deterministic: once."""
    while True:
        try:
            await publish()
        except BusError as error:
            _log.info("not told yet: %s", error)
            await clock.sleep(_RETRY_S[2])
        else:
            return


async def _quarantined(bus: Bus, revision: Revision) -> set[str]:
    found = set()
    for artifact in {kernel.artifact for kernel in revision.kernels}:
        try:
            entry = await bus.kv_get(topology.QUARANTINE, artifact)
        except NotFound:
            continue
        if entry.value is not None and Quarantine.model_validate_json(entry.value).artifact == artifact:
            found.add(artifact)
    return found
