"""A capture that is cut off is ended in the engine too: else each call copies its inputs, which are users' text, from then on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

from polymorph.bus.errors import BusError
from polymorph.engine.loading.admission import Refused


class Capturing(Protocol):
    """An engine whose slots capture."""

    async def capture_stop(self) -> None: ...


@contextlib.asynccontextmanager
async def disarmed(engine: Capturing) -> AsyncIterator[None]:
    """Inside, captures are armed and collected; where that ends with an error, or is cancelled, none stays armed."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Refused, BusError):
            await asyncio.shield(asyncio.ensure_future(engine.capture_stop()))
        raise
