"""Lossy kernels in a real worker: none meets a request that began before it, or cache written under other numerics."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from polymorph.bus.nats import NatsBus
from polymorph.events.types import TokensCounted
from polymorph.events.values import Numerics

pytestmark = [pytest.mark.engine, pytest.mark.real]

# More than one block of the cache, whatever a token is worth.
PROMPT = " ".join(f"item {number} of the list;" for number in range(60))


class Asking:
    """Sends requests, and knows how much of each prompt came from the cache."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._told: dict[str, asyncio.Future[int]] = {}

    async def hear(self, subject: str, message: Any) -> None:
        del subject
        if message.request_id in self._told:
            self._told[message.request_id].set_result(message.cached_tokens)

    async def __call__(self, prompt: str, tokens: int) -> tuple[str, int]:
        """The revision that answered, and the cached tokens of the prompt."""
        name = uuid.uuid4().hex
        self._told[name] = asyncio.get_running_loop().create_future()
        body = {"model": "tiny-dense", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=300) as client:
            answer = await client.post(
                f"{self._url}/v1/completions", json=body, headers={"X-Request-Id": name}
            )
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == tokens
        async with asyncio.timeout(60):
            return answer.headers["x-polymorph-revision"], await self._told[name]


class Story:
    """A stream that takes some seconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.begun = asyncio.Event()
        self.pieces = 0

    async def stream(self) -> None:
        body = {
            "model": "tiny-dense",
            "prompt": "Once",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            httpx.AsyncClient(timeout=300) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.pieces += 1
                    self.begun.set()


@pytest_asyncio.fixture
async def asking(house: Any, bus: NatsBus) -> AsyncIterator[Asking]:
    made = Asking(house.url)
    end = await bus.listen(TokensCounted.wildcard(), made.hear)
    yield made
    await end()


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(200):
        while not holds():
            await asyncio.sleep(0.02)


async def _until_engaged(house: Any, count: int) -> None:
    async with asyncio.timeout(200):
        while len(await house.engaged()) != count:
            await asyncio.sleep(0.1)


async def test_a_lossy_kernel_meets_new_requests_and_cache_of_its_own(
    house: Any, bus: NatsBus, definition: str, asking: Asking
) -> None:
    await asking(PROMPT, 4)
    assert (await asking(PROMPT, 4))[1] > 0

    kernel = await house.sign(bus, house.build(), definition, numerics=Numerics.LOSSY)
    desired = await house.desire(bus, kernel)
    await _until_engaged(house, 1)
    assert await asking(PROMPT, 4) == (desired.stable.revision, 0)
    assert (await asking(PROMPT, 4))[1] > 0

    await house.desire(bus)
    await _until_engaged(house, 0)
    revision, cached = await asking(PROMPT, 4)
    assert revision == "empty"
    assert cached > 0  # what was written before the kernel came

    story = Story(house.url)
    running = asyncio.create_task(story.stream())
    await story.begun.wait()
    desired = await house.desire(bus, kernel)  # tried before: now it waits for nothing but the story
    await _until(lambda: f"{desired.stable.revision} waits until no request runs" in house.log)
    assert not running.done()
    newcomer = asyncio.create_task(asking("a short one:", 4))
    await _until_engaged(house, 1)
    heard = story.pieces
    await running
    assert story.pieces - heard <= 2  # what the network still carried
    assert (await newcomer)[0] == desired.stable.revision
    await house.desire(bus)
    await _until_engaged(house, 0)
