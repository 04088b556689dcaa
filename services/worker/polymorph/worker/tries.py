"""Tries of what a worker does for as long as it lives: an error that nobody foresaw ends one of them alone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from polymorph.bus.errors import BusError, Fatal
from polymorph.config.clock import Clock
from polymorph.worker.adapters import metrics

_log = logging.getLogger(__name__)
_AGAIN_S = (0.5, 1.0, 2.0, 5.0)
"""After so many failures in a row. The longest is shorter than the time in which a worker's record expires."""


async def again_and_again(
    task: str, work: Callable[[], Awaitable[object]], clock: Clock, pause_s: float
) -> None:
    """Runs until cancelled: tries `work`, `pause_s` after it ended, or later where it failed. Raises `Fatal` alone."""
    failures = 0
    while True:
        began = clock.monotonic()
        if await tried(task, work):
            failures, pause = 0, pause_s
        else:
            lasted = clock.monotonic() - began > _AGAIN_S[-1]
            failures = 1 if lasted else failures + 1
            pause = _AGAIN_S[min(failures, len(_AGAIN_S)) - 1]
        await clock.sleep(pause)


async def tried(task: str, work: Callable[[], Awaitable[object]]) -> bool:
    """Whether `work` ended without an error, which is told here. `Fatal` passes, and whatever ends a cancelled task."""
    try:
        await work()
    except Exception as error:
        if isinstance(error, Fatal) or cancelled():
            raise
        if isinstance(error, BusError):
            _log.warning("%s failed: %s", task, error)
        else:
            metrics.UNFORESEEN.labels(task).inc()
            _log.exception("%s failed as nobody had foreseen", task)
        return False
    return True


def cancelled() -> bool:
    """Whether this task was asked to end; an error while it cleans up must not hide that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
