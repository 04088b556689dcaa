"""The pullers of one durable consumer: they run side by side, and the first that fails ends all."""

import asyncio
from collections.abc import Awaitable, Callable


async def run_pullers(count: int, pull: Callable[[], Awaitable[None]]) -> None:
    """Runs `count` pullers (at least one) until cancelled; raises what the first of them to fail raised."""
    pullers = [asyncio.ensure_future(pull()) for _ in range(max(1, count))]
    try:
        await asyncio.wait({*pullers}, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for puller in pullers:
            puller.cancel()
        ended = await asyncio.gather(*pullers, return_exceptions=True)
    for end in ended:
        if isinstance(end, Exception):
            raise end
