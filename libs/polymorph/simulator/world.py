"""A world of actors that crash and come back, driven by one seed."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from polymorph.simulator.clock import SimulatedClock
from polymorph.simulator.faults import CALM, Crashed, FaultPlan, Faults
from polymorph.simulator.journal import Journal
from polymorph.simulator.loop import run_simulated

T = TypeVar("T")


class World:
    """What a scenario gets: a clock, chance, faults, a journal, and actors."""

    def __init__(self, seed: int, plan: FaultPlan) -> None:
        self.seed = seed
        self.rng = random.Random(seed)  # noqa: S311 - chance for a simulation, not a secret
        self.clock = SimulatedClock()
        self.faults = Faults(random.Random(self.rng.random()), self.clock, plan)  # noqa: S311
        self.journal = Journal()
        self.crashes = 0
        self._tasks: list[asyncio.Task[None]] = []

    def new_id(self) -> str:
        return f"{self.rng.getrandbits(48):012x}"

    def start(self, name: str, actor: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Runs `actor`, and again from its beginning after each crash: whatever it held in memory is gone."""
        task = asyncio.get_running_loop().create_task(self._live(actor), name=name)
        self._tasks.append(task)
        return task

    async def settle(self, *finishing: asyncio.Task[None]) -> None:
        """Waits for `finishing`, stops every other actor and all faults."""
        await asyncio.gather(*finishing)
        self.faults.calm()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _live(self, actor: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await actor()
            except Crashed:
                self.crashes += 1
                await self.clock.sleep(self.faults.plan.restart_s * (0.5 + self.faults.rng.random()))
            else:
                return


def run_simulation(
    seed: int, scenario: Callable[[World], Awaitable[T]], *, plan: FaultPlan | None = None
) -> T:
    """Runs `scenario` in a world made from `seed`; the same seed and program give the same run.

    Raises:
        Stalled: the scenario waits for what never comes.
    """

    async def main() -> T:
        return await scenario(World(seed, plan or FaultPlan()))

    return run_simulated(main())


__all__ = ["CALM", "FaultPlan", "World", "run_simulation"]
