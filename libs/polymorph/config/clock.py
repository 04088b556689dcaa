"""Time as a port, so that domain code and tests decide what time it is."""

import asyncio
import datetime as dt
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time, monotonic seconds and sleep."""

    def now(self) -> dt.datetime: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> dt.datetime:
        return dt.datetime.now(dt.UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
