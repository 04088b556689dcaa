"""Faults by seed: delays, crashes, duplicates and drops, at every point where a program touches the outside."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from polymorph.config.clock import Clock


class Crashed(BaseException):
    """The process died here. No handler of the program may catch it: only the world that runs the actor does."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How much goes wrong. Rates are probabilities at each point, times in seconds."""

    delay_s: float = 0.02
    crash_rate: float = 0.02
    duplicate_rate: float = 0.05
    drop_rate: float = 0.1
    restart_s: float = 0.5


CALM = FaultPlan(delay_s=0.0, crash_rate=0.0, duplicate_rate=0.0, drop_rate=0.0)

Pause = Callable[[str], Awaitable[None]]


class Faults:
    """The source of everything that goes wrong in a run; the same seed makes the same faults."""

    def __init__(self, rng: random.Random, clock: Clock, plan: FaultPlan) -> None:
        self.rng = rng
        self._clock = clock
        self.plan = plan

    def calm(self) -> None:
        """From now on nothing goes wrong: what must hold at the end has time to come true."""
        self.plan = CALM

    async def pause(self, point: str) -> None:
        """Waits a moment, in which others run, and perhaps dies. Raises `Crashed`."""
        await self._clock.sleep(self.rng.random() * self.plan.delay_s)
        if self.rng.random() < self.plan.crash_rate:
            raise Crashed(point)

    def duplicates(self) -> bool:
        return self.rng.random() < self.plan.duplicate_rate

    def drops(self) -> bool:
        return self.rng.random() < self.plan.drop_rate


class CrashAt:
    """Dies at the point of one number, and never again: to try every point of a program, one after the other."""

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        self._over = False
        self.points: list[str] = []

    def calm(self) -> None:
        """What follows is no part of the program: it is neither counted nor crashed."""
        self._over = True

    async def pause(self, point: str) -> None:
        """Raises `Crashed` at its point."""
        if self._over:
            return
        self.points.append(point)
        if len(self.points) - 1 == self._number:
            raise Crashed(point)

    def duplicates(self) -> bool:
        return False

    def drops(self) -> bool:
        return False
