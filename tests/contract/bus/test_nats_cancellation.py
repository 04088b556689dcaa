"""A cancellation is heeded even where it comes in the same turn as the answer (asyncio.wait_for before 3.12)."""

import asyncio

import pytest
from nats.aio.subscription import Subscription

from polymorph.bus.port import Consumption
from polymorph.events.requests import PlaceRequest
from polymorph.events.types import WorkerRefused

pytestmark = pytest.mark.real


async def test_a_cancelled_call_ends_its_task(bus_factory):
    bus = await bus_factory()
    for turn in range(150):
        alive = asyncio.Event()

        async def write_forever(alive=alive):
            while True:
                await bus.kv_put("desired", "a", b"1")
                alive.set()

        task = asyncio.ensure_future(write_forever())
        await alive.wait()
        await asyncio.sleep(turn * 0.00001)
        task.cancel()
        _, left = await asyncio.wait({task}, timeout=2)
        assert not left


async def test_a_conversation_cancelled_with_its_first_answer_ends(bus_factory, monkeypatch):
    bus, other = await bus_factory(), await bus_factory()

    async def answer(body, reply):
        await reply(b"placed")

    await other.respond(PlaceRequest, "*", answer)
    next_msg = Subscription.next_msg

    async def and_cancelled(subscription, **waits):
        message = await next_msg(subscription, **waits)
        asking.cancel()  # what wait_for does with a cancellation in this turn: it gives the message
        return message

    async def ask():
        async with bus.converse(PlaceRequest(pool="p", request_id="r1"), first_s=5):
            pytest.fail("its client has left")

    monkeypatch.setattr(Subscription, "next_msg", and_cancelled)
    asking = asyncio.ensure_future(ask())
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_consumer_cancelled_while_it_acknowledges_ends(bus_factory):
    bus = await bus_factory()
    for turn in range(20):
        handled = asyncio.Event()

        async def handler(delivery, handled=handled):
            handled.set()

        task = asyncio.ensure_future(bus.consume(Consumption("d", "polymorph.evt.worker.>"), handler))
        await bus.publish(
            WorkerRefused(pool="p", worker_id="w", generation=turn, revision="r", reason="again")
        )
        await handled.wait()
        await asyncio.sleep(turn * 0.0001)
        task.cancel()
        _, left = await asyncio.wait({task}, timeout=5)
        assert not left


async def test_cleaning_up_after_a_cancellation_may_call(bus_factory):
    bus = await bus_factory()
    await bus.kv_put("leases", "a", b"1")
    cleaned = asyncio.Event()

    async def hold():
        try:
            await asyncio.sleep(60)
        finally:
            await bus.kv_delete("leases", "a")
            cleaned.set()

    task = asyncio.ensure_future(hold())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert cleaned.is_set()
    assert await bus.kv_keys("leases") == []
