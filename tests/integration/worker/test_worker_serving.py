"""A worker serves the OpenAI API, registers, and tells what its engine counted."""

import asyncio
from typing import Any

import httpx
import pytest

from polymorph.bus.nats import NatsBus
from polymorph.events.base import Message
from polymorph.events.types import StepsCounted, TokensCounted

pytestmark = [pytest.mark.engine, pytest.mark.real]


async def _ask(url: str, request_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny-dense", "prompt": "The licence", "max_tokens": 8, "temperature": 0} | fields
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{url}/v1/completions", json=body, headers={"X-Request-ID": request_id})
    answer.raise_for_status()
    document: dict[str, Any] = answer.json()
    return document


async def _until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def test_registers_with_its_slots(house: Any, bus: NatsBus, definition: str) -> None:
    async with asyncio.timeout(20):
        while (await house.record(bus)).state != "ready":
            await asyncio.sleep(0.1)
    record = await house.record(bus)
    assert record.pool == "tiny"
    assert record.url == house.url
    assert definition in record.slots
    assert record.kv_capacity_tokens > 512


async def test_counts_come_by_request_id(house: Any, bus: NatsBus) -> None:
    told: list[Message] = []

    async def hear(subject: str, message: Message) -> None:
        del subject
        told.append(message)

    ends = [await bus.listen(kind.wildcard(), hear) for kind in (TokensCounted, StepsCounted)]
    await bus.ready()
    answer = await _ask(house.url, "gateway-17")
    assert answer["usage"]["completion_tokens"] >= 1
    await _until(lambda: any(isinstance(each, TokensCounted) for each in told))
    await _until(lambda: any(isinstance(each, StepsCounted) and each.output_tokens for each in told))
    for end in ends:
        await end()
    counted = next(each for each in told if isinstance(each, TokensCounted))
    assert counted.request_id == "gateway-17"
    assert counted.output_tokens == answer["usage"]["completion_tokens"]
    assert counted.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert counted.ttft_s is not None
    assert counted.ttft_s > 0
    steps = next(each for each in told if isinstance(each, StepsCounted) and each.output_tokens)
    assert steps.steps >= 1
    assert steps.step_s > 0
    assert abs(sum(steps.step_s_by_m.values()) - steps.step_s) < 1e-6
    assert any(operation.definition.startswith("gemm_") for operation in steps.operations)


async def test_serves_on_while_nats_is_away(house: Any) -> None:
    await house.nats.kill()
    try:
        for number in range(3):
            assert (await _ask(house.url, f"alone-{number}"))["choices"]
    finally:
        await house.nats.start()


async def test_registers_again_when_nats_is_back(house: Any, bus: NatsBus) -> None:
    before = (await bus.kv_get("workers", "w1")).revision
    async with asyncio.timeout(20):
        while (await bus.kv_get("workers", "w1")).revision <= before:
            await asyncio.sleep(0.1)
