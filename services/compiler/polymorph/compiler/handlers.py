"""What the compiler does with what it hears: one pool at a time, saved before anything is promised."""

import asyncio
import copy
import datetime as dt
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from polymorph.bus.errors import Poison, Retryable
from polymorph.compiler.adapters import metrics
from polymorph.compiler.domain.knowledge import Knowledge
from polymorph.compiler.domain.promotion.moves import Proposal
from polymorph.compiler.domain.search_pool import Ended, Learn, PoolEffect, PoolLoop, PoolState
from polymorph.compiler.domain.search_state import Answer, Keep, Order, Promote
from polymorph.config.clock import Clock
from polymorph.events.state import DesiredState
from polymorph.events.types import (
    CandidateEvaluated,
    DriftDetected,
    EvaluateCandidate,
    PromotionCompleted,
    PromotionRolledBack,
    TrafficShapeObserved,
    WorkerKernelFaulted,
    WorkerLoaded,
    WorkerRefused,
)
from polymorph.events.values import TrafficShape
from polymorph.kernels.buckets import UPPER_BOUNDS

_log = logging.getLogger(__name__)


class Detector(Protocol):
    """Says when windows leave a shape."""

    def observe(
        self, window: TrafficShapeObserved, tuned_for: TrafficShape | None
    ) -> DriftDetected | None: ...


class Record(Protocol):
    """Where pools and lessons are kept, together with the messages that go out."""

    async def pools(self) -> dict[str, PoolState]: ...

    async def knowledge(self) -> Knowledge: ...

    async def save(
        self,
        state: PoolState,
        known: Knowledge,
        effects: list[PoolEffect],
        verdict: CandidateEvaluated | None = None,
    ) -> None: ...


class Floor(Protocol):
    """The world outside: objects, orders that may have been lost, and the promoter."""

    async def keep(self, data: bytes) -> None: ...

    async def order_again(self, command: EvaluateCandidate) -> None: ...

    async def pool(self, pool: str) -> DesiredState:
        """The desired state of a pool, which is made where there is none."""
        ...

    async def promote(self, proposal: Proposal) -> Ended | None:
        """None where it is not decided yet: ask again."""
        ...

    async def take_back(self, pool: str, generation: int, reason: str) -> None: ...

    async def quarantine(self, artifact: str, reason: str) -> None:
        """Nobody loads it from now on, and every pool that shows it leaves it."""
        ...


class Tuning:
    """The loop of every pool. A call that fails with `Retryable` has changed nothing and may come again."""

    def __init__(
        self,
        loop: PoolLoop,
        record: Record,
        floor: Floor,
        clock: Clock,
        *,
        detector: Callable[[], Detector],
        window_age_s: float,
        hardware: str,
    ) -> None:
        self._loop = loop
        self._record = record
        self._floor = floor
        self._clock = clock
        self._detector = detector
        self._window_age = dt.timedelta(seconds=window_age_s)
        self._pools: dict[str, PoolState] = {}
        self._counted: deque[tuple[str, str]] = deque(maxlen=1024)
        self._detectors: dict[str, Detector] = {}
        self._known = Knowledge(hardware=hardware)
        self._owed: dict[str, list[Order | Promote]] = {}
        self._turn = asyncio.Lock()
        self._parked: dict[str, str] = {}

    async def start(self) -> None:
        """Goes on where the last process stopped."""
        self._pools = await self._record.pools()
        self._known = await self._record.knowledge()
        for pool, state in self._pools.items():
            self._owe(pool, self._loop.resume(state))
            _tell_strange(state)
            if state.search:
                _log.info("pool %s: search %s goes on", pool, state.search.search_id)

    async def window(self, window: TrafficShapeObserved) -> None:
        """A window of traffic; a stale one, from a backlog, says nothing about now."""
        now = self._clock.now()
        if now - window.window_start > self._window_age + dt.timedelta(seconds=window.window_s):
            return
        async with self._turn:
            state = await self._pool(window.pool)
            # On a copy: where the save fails the window comes again, and its drift must be found again.
            detector = copy.deepcopy(self._detectors.get(window.pool)) or self._detector()
            drift = detector.observe(window, state.tuned_for())
            if drift:
                _log.info("pool %s: %s", window.pool, drift.reason)
            step = self._loop.window(state, window, drift, self._known, now)
            await self._take(step)
            self._detectors[window.pool] = detector
            if drift:
                _tell_strange(step[0])
            if step[0].unmet is None and step[0].plan is None and (drift or state.unmet):
                _log.info("pool %s: no search pays for this traffic", window.pool)
            await self._pay(window.pool)

    async def evaluated(self, event: CandidateEvaluated) -> None:
        """A candidate left the gates."""
        async with self._turn:
            state = self._pools.get(event.pool)
            if state is None or state.search is None or not state.search.awaits(event):
                return
            _log.info(
                "candidate %s %s at %s: %s", event.candidate_id, event.verdict, event.gate, event.reason
            )
            await self._take(
                self._loop.evaluated(state, event, self._known, self._clock.now()), verdict=event
            )
            await self._pay(event.pool)

    async def completed(self, event: PromotionCompleted) -> None:
        """A revision is stable, as key-value shows."""
        await self._ended(
            event.pool,
            Ended(event.promotion_id, Answer.LIVE, event.generation, event.revision, event.reason),
        )
        self._count_ended(event.pool, event.promotion_id, "completed")

    async def rolled_back(self, event: PromotionRolledBack) -> None:
        """A revision was taken back."""
        await self._ended(
            event.pool,
            Ended(event.promotion_id, Answer.REFUSED, event.generation, event.back_to, event.reason),
        )
        self._count_ended(event.pool, event.promotion_id, "rolled-back")

    async def desired(self, shown: DesiredState) -> None:
        """Key-value shows something of a pool."""
        async with self._turn:
            state = self._pools.get(shown.pool)
            if state is None:
                return
            await self._take(self._loop.desired(state, shown, self._known, self._clock.now()))
            await self._pay(shown.pool)

    async def loaded(self, event: WorkerLoaded) -> None:
        """A worker runs a revision."""
        _log.info(
            "worker %s runs %s of pool %s: %d calls served",
            event.worker_id,
            event.revision,
            event.pool,
            event.served_calls,
        )
        async with self._turn:
            state = self._pools.get(event.pool)
            if state is not None:
                await self._take((state.having_served(event.revision), []))

    async def refused(self, event: WorkerRefused) -> None:
        """A worker did not take a revision: where the pool still shows it and it is new, it is taken back for all.

        What has served elsewhere is good: then the fault is the worker's own, and taking back would strip the pool.
        """
        reason = f"Worker {event.worker_id} refused {event.revision}: {event.reason}"
        _log.warning("pool %s: %s", event.pool, reason)
        async with self._turn:
            state = self._pools.get(event.pool)
            if state is not None and event.revision in state.served:
                _log.warning(
                    "pool %s: %s has served elsewhere and stays; see to worker %s",
                    event.pool,
                    event.revision,
                    event.worker_id,
                )
                return
            await self._floor.take_back(event.pool, event.generation, reason)

    async def kernel_faulted(self, event: WorkerKernelFaulted) -> None:
        """A kernel took an engine down: no worker runs it any more, whatever it has served elsewhere."""
        reason = (
            f"It had a {event.how} in worker {event.worker_id}, as {event.definition} of {event.revision}: "
            f"{event.evidence}"
        )
        _log.error("pool %s: artifact %s into quarantine. %s", event.pool, event.artifact[:12], reason)
        async with self._turn:
            await self._floor.quarantine(event.artifact, reason)
        metrics.KERNEL_FAULTS.labels(event.pool, event.how).inc()

    async def tick(self) -> None:
        """Time passed. A pool that goes wrong is told and left out; the others go on."""
        async with self._turn:
            for pool, state in list(self._pools.items()):
                try:
                    await self._tick(pool, state)
                    self._parked.pop(pool, None)
                except (Poison, ValueError, LookupError) as error:
                    if self._parked.get(pool) != str(error):
                        _log.exception("pool %s stands still until this is put right", pool)
                    self._parked[pool] = str(error)

    async def _tick(self, pool: str, state: PoolState) -> None:
        step = self._loop.tick(state, self._known, self._clock.now())
        if step != (state, []):
            await self._take(step)
        await self._pay(pool)

    def _count_ended(self, pool: str, promotion_id: str, outcome: str) -> None:
        """Once, however often the event is delivered."""
        if (promotion_id, outcome) not in self._counted:
            self._counted.append((promotion_id, outcome))
            metrics.PROMOTIONS.labels(pool, outcome).inc()

    async def _ended(self, pool: str, ended: Ended) -> None:
        async with self._turn:
            state = self._pools.get(pool)
            if state is None:
                return
            await self._take(self._loop.promoted(state, ended, self._known, self._clock.now()))
            await self._pay(pool)

    async def _pool(self, pool: str) -> PoolState:
        known = self._pools.get(pool)
        if known is not None:
            return known
        shown = await self._floor.pool(pool)
        return PoolState(pool=pool, mode=shown.mode, generation=shown.generation, stable=shown.stable)

    async def _take(
        self, step: tuple[PoolState, list[PoolEffect]], verdict: CandidateEvaluated | None = None
    ) -> None:
        """Saves a step, then remembers what it owes: objects before the record that names them, the rest after."""
        state, effects = step
        if state == self._pools.get(state.pool) and not effects:
            return
        for effect in effects:
            if isinstance(effect, Keep):
                await self._floor.keep(effect.data)
        known = self._known
        for effect in effects:
            if isinstance(effect, Learn):
                known = known.learn(effect.lessons)
        await self._record.save(state, known, effects, verdict)
        self._pools[state.pool], self._known = state, known
        self._owe(state.pool, effects)

    def _owe(self, pool: str, effects: list[PoolEffect]) -> None:
        owed = self._owed.setdefault(pool, [])
        owed += [e for e in effects if isinstance(e, Promote) or (isinstance(e, Order) and e.again)]

    async def _pay(self, pool: str) -> None:
        """Carries out what is owed; what cannot be done now stays owed until the next tick."""
        owed = self._owed.setdefault(pool, [])
        while owed:
            try:
                if not await self._pay_one(pool, owed[0]):
                    return
            except Retryable as error:
                _log.warning("pool %s: %s; trying again", pool, error)
                return
            owed.pop(0)

    async def _pay_one(self, pool: str, effect: Order | Promote) -> bool:
        """Whether it is done."""
        if isinstance(effect, Order):
            await self._floor.order_again(effect.command)
            return True
        ended = await self._floor.promote(effect.proposal)
        if ended is None:
            return False
        _log.info("promotion %s: %s, %s", ended.promotion_id, ended.answer, ended.reason)
        await self._take(self._loop.promoted(self._pools[pool], ended, self._known, self._clock.now()))
        return True


def _tell_strange(state: PoolState) -> None:
    if state.unmet and (names := state.unmet.strange()):
        _log.error(
            "pool %s: no search answers drift %s, for it names M of %s: buckets are %s",
            state.pool,
            state.unmet.drift.drift_id,
            names,
            UPPER_BOUNDS,
        )
