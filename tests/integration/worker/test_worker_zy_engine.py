"""An engine is warmed beside the one that serves, and takes over. After the others: it is another engine from then on."""

import asyncio
from typing import Any

import httpx
import pytest

from polymorph.bus.nats import NatsBus
from polymorph.events.requests import PlanAnswer, PlanChange
from polymorph.events.values import EngineSettings, Revision

pytestmark = [pytest.mark.engine, pytest.mark.real]
TOKENS = 100
WANTED = {"block_size": 64, "max_num_seqs": 96}


async def _streamed(url: str, number: int) -> tuple[int, str, str]:
    """Pieces of text, the last line, and the revision that answered."""
    body = {
        "model": "tiny-dense",
        "prompt": f"stream number {number}",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    pieces, last = 0, ""
    async with (
        httpx.AsyncClient(timeout=200) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                pieces, last = pieces + 1, line
    return pieces, last, answer.headers["x-polymorph-revision"]


async def test_an_engine_is_replaced_under_traffic(house: Any, bus: NatsBus) -> None:
    done: list[tuple[int, str, str]] = []
    changed = asyncio.Event()

    async def lane(number: int) -> None:
        while not changed.is_set():
            done.append(await _streamed(house.url, number))

    revision = Revision(revision="asked", engine=EngineSettings(**WANTED))
    request = PlanChange(worker_id="w1", revision=revision)
    plan = PlanAnswer.model_validate_json(await bus.request(request, timeout_s=20))
    assert (plan.way, plan.cache_reset) == ("engine", True)
    assert "above the envelope of 64" in plan.why
    lanes = [asyncio.create_task(lane(number)) for number in range(3)]
    desired = await house.desire_settings(bus, **WANTED)
    event = await house.answer(bus, desired.generation, 280)
    assert event["type"] == "loaded", event
    assert event["way"] == "engine"
    assert {name: event["settings"][name] for name in WANTED} == WANTED
    changed.set()
    await asyncio.gather(*lanes)
    assert all(last == "data: [DONE]" for _, last, _ in done)
    assert all(pieces > TOKENS / 2 for pieces, _, _ in done)
    assert (await _streamed(house.url, 9))[2] == desired.stable.revision
    async with asyncio.timeout(20):
        while (record := await house.record(bus)).revision != desired.stable.revision:
            await asyncio.sleep(0.1)
    assert record.settings.block_size == 64
    assert "the engine that was replaced has ended" in house.log
