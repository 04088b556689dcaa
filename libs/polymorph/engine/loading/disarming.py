"""A capture that is cut off is ended in the engine too: else each call copies its inputs, which are users' text, from then on."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

_log = logging.getLogger(__name__)


class Capturing(Protocol):
    """An engine whose slots capture."""

    async def capture_stop(self) -> None: ...


@contextlib.asynccontextmanager
async def disarmed(engine: Capturing) -> AsyncIterator[None]:
    """Inside, captures are armed and collected; where that ends with an error, or is cancelled, none stays armed."""
    try:
        yield
    except BaseException:
        try:
            await asyncio.shield(asyncio.ensure_future(engine.capture_stop()))
        except Exception as error:  # noqa: BLE001 - what ended the block is told, a cancellation above all
            _log.error(
                "a capture that was cut off may go on in the engine: %s: %s", type(error).__name__, error
            )
        raise
