"""What workers publish, heard from the first event on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from polymorph.bus.port import Bus, StreamRecord

LIMIT_S = 150.0
"""A self-test of each kernel of a revision comes first."""

Heard = asyncio.Queue[dict[str, Any]]


@contextlib.asynccontextmanager
async def events(bus: Bus) -> AsyncIterator[Heard]:
    """Events of workers, each with its kind as `type`; those from before come first."""
    heard = Heard()

    async def follow() -> None:
        async for record in bus.events(subjects="polymorph.evt.worker.>", after="0-0"):
            if isinstance(record, StreamRecord):
                heard.put_nowait({"type": record.envelope.type.split(".")[3], **record.envelope.data})

    task = asyncio.create_task(follow())
    try:
        yield heard
    finally:
        task.cancel()


async def told(heard: Heard, kind: str | None, generation: int) -> dict[str, Any]:
    """The next event about a generation, of this kind where one is named."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            event = await heard.get()
            if event.get("generation") == generation and kind in {None, event["type"]}:
                return event


async def outcome(heard: Heard, generation: int) -> dict[str, Any]:
    """What was made of a generation: loaded, or refused."""
    return await told(heard, None, generation)
