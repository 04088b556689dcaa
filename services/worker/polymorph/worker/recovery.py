"""From an engine that died or hangs to the next one: the kernel blamed and left, requests handed over."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from polymorph.bus.errors import Fatal
from polymorph.config.clock import Clock
from polymorph.engine.flight import Flight, in_flight
from polymorph.engine.launch import EngineLaunch
from polymorph.worker.adapters import metrics
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.domain.deaths import UNDER_ONE, WITHIN_S, Deaths
from polymorph.worker.domain.hanging import Hanging, blamed
from polymorph.worker.faults import Fault, Faults
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.served import AtWork
from polymorph.worker.tries import again_and_again, cancelled

_log = logging.getLogger(__name__)
_LOOK_S = 0.25
_STARTS = 3
_START_PAUSE_S = 5.0
_RESTORE_S = 60.0
_TRIES = 3

How = Literal["crash", "hang"]
Step = Callable[["Death"], Awaitable[None]]


class LastGood(Protocol):
    """Whoever knows which revisions served."""

    def at_work(self, artifact: str | None) -> AtWork: ...

    def retreat(self) -> EngineLaunch | None:
        """Makes the last revision that served, and has nothing that is banned, the one to run; how its engine is
        launched, None where as before.
        """
        ...

    async def restore(self, engine: Engine) -> str:
        """Makes a new engine run it, before requests come to it; returns its name."""
        ...


@dataclass(eq=False)
class Death:
    """Of one engine: `serves` where newcomers went to it, so that a successor starts, `pause_s` after it was judged."""

    seat: Seat
    how: How
    flight: Flight | None
    serves: bool
    began: float
    pause_s: float = 0.0


class Recovery:
    """Watches every engine that lives; `run` ends with `Fatal` where none can be had any more."""

    def __init__(
        self,
        seats: Seats,
        last_good: LastGood,
        faults: Faults,
        clock: Clock,
        *,
        hang_timeout_s: float,
        send_back: Callable[[], None],
    ) -> None:
        self._seats = seats
        self._last_good = last_good
        self._faults = faults
        self._clock = clock
        self._hang_timeout_s = hang_timeout_s
        self._send_back = send_back
        self._deaths = Deaths()
        self._hanging: dict[Seat, Hanging] = {}
        self._dead: set[Seat] = set()
        self._owed: deque[tuple[Step, Death]] = deque()
        """What follows deaths that were seen, in order: a step that fails is tried again with the next look."""
        self._failures = 0
        self._lost: dict[Seat, int] = {}
        """Dead, with requests that wait for a successor; and how often they could not be handed over."""
        self._looked_at = clock.monotonic()

    async def run(self) -> None:
        """Runs until cancelled."""
        self._looked_at = self._clock.monotonic()
        try:
            await again_and_again("the look for dead engines", self._look_again, self._clock, _LOOK_S)
        finally:
            for seat in self._lost:
                seat.engine.give_up("the worker ends")

    async def _look_again(self) -> None:
        # A look that came late was kept from looking: what it missed it has not seen.
        elapsed_s = min(self._clock.monotonic() - self._looked_at, 2 * _LOOK_S)
        try:
            await self._look(elapsed_s)
        finally:
            self._looked_at = self._clock.monotonic()

    async def _look(self, elapsed_s: float) -> None:
        await self._pay()
        self._dead.intersection_update(self._seats.living)
        living = [seat for seat in self._seats.living if seat not in self._dead]
        self._hanging = {seat: self._hanging.get(seat) or Hanging(self._hang_timeout_s) for seat in living}
        for seat in living:
            flights = in_flight(seat.engine.flight) if seat.engine.flight is not None else ()
            if not seat.engine.alive:
                await self._recover(seat, "crash", blamed(flights))
            elif (hung := self._hanging[seat].look(flights, elapsed_s)) is not None:
                await self._recover(seat, "hang", hung)
        if self._seats.current is None and not self._seats.alive:
            raise Fatal("no engine is left")
        await self._hand_over()

    async def _recover(self, seat: Seat, how: How, flight: Flight | None) -> None:
        """Takes note first: a death is seen once, and whatever fails of what follows is tried again."""
        serves = self._seats.current is seat
        death = Death(seat, how, flight, serves, self._clock.monotonic())
        self._dead.add(seat)
        self._lost[seat] = 0
        metrics.ENGINE_DEATHS.labels(how, "nobody" if flight is None else "kernel").inc()
        self._owed.extend((step, death) for step in (self._leave, self._kill, self._judge, self._replace))
        await self._pay()

    async def _pay(self) -> None:
        while self._owed:
            step, death = self._owed[0]
            try:
                await step(death)
            except Exception as error:
                self._failures += 1
                if isinstance(error, Fatal) or cancelled() or self._failures < _TRIES:
                    raise
                if step == self._replace:
                    self._give_up(f"{type(error).__name__}: {error}")
                _log.exception("what follows an engine's death goes on without this step")
            self._failures = 0
            self._owed.popleft()

    async def _leave(self, death: Death) -> None:
        if self._seats.current is death.seat:
            self._seats.vacate()
        if death.serves:
            self._send_back()

    async def _kill(self, death: Death) -> None:
        await death.seat.engine.kill()

    async def _judge(self, death: Death) -> None:
        flight = death.flight
        work = self._last_good.at_work(None if flight is None else flight.artifact)
        if flight is None:
            _log.error("the engine of %s died, and no kernel was being called", work.revision)
        else:
            self._blame(flight, death.how, work)
        if death.serves:
            self._weigh(death, work)

    def _blame(self, flight: Flight, how: How, work: AtWork) -> None:
        evidence = _evidence(flight, how, self._hang_timeout_s)
        _log.error("artifact %s of %s had a %s. %s", flight.artifact[:12], work.definition, how, evidence)
        self._faults.add(
            Fault(
                artifact=flight.artifact,
                definition=work.definition,
                how=how,
                evidence=evidence,
                revision=work.revision,
                generation=work.generation,
                at=self._clock.now(),
            )
        )

    def _weigh(self, death: Death, work: AtWork) -> None:
        now, blamed_one = self._clock.monotonic(), death.flight is not None
        verdict = self._deaths.died(work.revision, blamed=blamed_one, leavable=work.leavable, now=now)
        death.pause_s = verdict.pause_s
        if verdict.leave:
            minutes = WITHIN_S / 60
            self._faults.leave(
                work.revision, f"{UNDER_ONE} engines died under it within {minutes:.0f} minutes"
            )
        if verdict.give_up:
            self._give_up("engines die again and again")

    async def _replace(self, death: Death) -> None:
        if not death.serves:
            return
        await self._clock.sleep(death.pause_s)
        launch = self._last_good.retreat() or death.seat.launch
        if self._seats.current is None:
            await self._start(launch)
        metrics.RECOVERY_S.observe(self._clock.monotonic() - death.began)

    async def _start(self, launch: EngineLaunch) -> None:
        new = await self._opened(launch)
        if self._seats.current is None:
            await self._restored(new)
        if self._seats.current is not None:  # a change of settings has seated its own meanwhile
            self._seats.retire(new)
            return
        self._seats.seat(new)

    async def _opened(self, launch: EngineLaunch) -> Seat:
        for attempt in range(1, _STARTS + 1):
            try:
                return await self._seats.open(launch)
            except EngineNotStarted as error:
                _log.error("start %d of %d: %s", attempt, _STARTS, error)
                if attempt == _STARTS:
                    self._give_up(str(error))
            await self._clock.sleep(_START_PAUSE_S * attempt)
        raise Fatal("no engine starts")

    async def _restored(self, seat: Seat) -> None:
        """Without its kernels an engine serves as well, and convergence goes on from there."""
        try:
            async with asyncio.timeout(_RESTORE_S):
                seat.revision = await self._last_good.restore(seat.engine)
        except Exception as error:  # noqa: BLE001 - whatever it was, requests wait for this engine
            _log.error("the new engine serves without kernels for now: %s: %s", type(error).__name__, error)

    async def _hand_over(self) -> None:
        """Requests of all engines that were lost go on in the one that serves; where that is dead, in the next."""
        heir = self._seats.current
        while self._lost and heir is not None and heir.engine.alive:
            seat = next(iter(self._lost))
            try:
                await seat.engine.succeed(heir.engine)
            except Exception as error:
                self._lost[seat] += 1
                if cancelled() or self._lost[seat] < _TRIES:
                    raise
                _log.exception("requests cannot be handed over")
                seat.engine.give_up(f"{type(error).__name__}: {error}")
            del self._lost[seat]
            self._seats.retire(seat)

    def _give_up(self, reason: str) -> None:
        for seat in self._lost:
            seat.engine.give_up(reason)
        raise Fatal(f"the engine died, and no other can be had: {reason}")


def _evidence(flight: Flight, how: How, limit_s: float) -> str:
    call = f"call {flight.calls} of a kernel on rank {flight.rank}, of table {flight.epoch}"
    if how == "hang":
        return f"For {limit_s:g} s {call} did not end."
    return f"The engine's process ended inside {call}."
