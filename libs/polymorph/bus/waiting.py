"""Waiting by a clock that is passed in."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from polymorph.config.clock import Clock

T = TypeVar("T")


async def within(clock: Clock, waiting: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """The result of `waiting`; raises `TimeoutError` where the clock's `seconds` go by first."""
    if seconds is None:
        return await waiting
    task = asyncio.ensure_future(waiting)
    alarm = asyncio.ensure_future(clock.sleep(max(0.0, seconds)))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()
        alarm.cancel()
