"""Told to end, a worker finishes what it began. Last in this folder: it ends the worker of all tests."""

import asyncio
import signal
from typing import Any

import httpx
import pytest

from polymorph.bus.errors import NotFound
from polymorph.bus.nats import NatsBus

pytestmark = [pytest.mark.engine, pytest.mark.real]


async def test_finishes_streams_and_leaves_the_registry(house: Any, bus: NatsBus) -> None:
    body = {
        "model": "tiny-dense",
        "prompt": "once",
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    chunks = 0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{house.url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if chunks == 0:
                house.process.send_signal(signal.SIGTERM)
            chunks += 1
            last = line
    assert last == "data: [DONE]"
    assert chunks > 50
    assert await asyncio.to_thread(house.process.wait, 60) == 0
    with pytest.raises(NotFound):
        await bus.kv_get("workers", "w1")
