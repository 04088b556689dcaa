"""An event loop whose time is simulated: when nothing is ready it jumps to the next timer instead of waiting."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stalled(RuntimeError):
    """Every task waits for something that nothing will bring about: a deadlock, or a wait on the real world."""


class _Selector(selectors.SelectSelector):
    """Never waits; the time that the loop would have waited is added to the simulated time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Stalled(f"nothing is left to happen at simulated second {self.time:.3f}")
        self.time += max(timeout, 0.0)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Deterministic: one thread, no real time, no real input. The order of tasks follows from the program alone."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)
        # Timers that fall into one clock tick would run together; simulated time has no ticks.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._simulated.time


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in simulated time, and cancels what it left.

    Raises:
        Stalled: `main` waits for what never comes.
    """
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
