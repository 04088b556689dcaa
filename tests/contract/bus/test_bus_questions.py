"""Requests, conversations, telemetry: one behaviour on every bus."""

import asyncio
import datetime as dt
import time

import pytest

from polymorph.bus.errors import Unavailable
from polymorph.events.requests import ControlSlots, PlaceRequest
from polymorph.events.types import TokensCounted

QUESTION = PlaceRequest(pool="p", request_id="r1")


def counted(request_id: str) -> TokensCounted:
    return TokensCounted(
        pool="p",
        worker_id="w",
        request_id=request_id,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=2,
        ttft_s=None,
        tpot_s=None,
        at=dt.datetime(2026, 11, 1, tzinfo=dt.UTC),
    )


async def test_a_question_gets_its_answer(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def answer(body, reply):
        await reply(PlaceRequest.model_validate_json(body).request_id.encode())

    await other.respond(PlaceRequest, "*", answer)
    assert await bus.request(QUESTION, timeout_s=2) == b"r1"


async def test_nobody_answers(world):
    bus = await world.bus()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        await bus.request(QUESTION, timeout_s=5)
    with pytest.raises(Unavailable):
        async with bus.converse(QUESTION, first_s=5):
            pytest.fail("nobody is there to converse with")
    assert time.monotonic() - started < 2


async def test_an_answer_that_does_not_come_in_time(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def silent(body, reply):
        await asyncio.sleep(30)

    stop = await other.respond(PlaceRequest, "p", silent)
    with pytest.raises(Unavailable):
        await bus.request(QUESTION, timeout_s=0.2)
    with pytest.raises(Unavailable):
        async with bus.converse(QUESTION, first_s=0.2):
            pytest.fail("there was no answer")
    await stop()


async def test_a_conversation_has_many_answers(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def hold_then_place(body, reply):
        for word in (b"held", b"held", b"placed"):
            await reply(word)
            await asyncio.sleep(0.15)

    await other.respond(PlaceRequest, "*", hold_then_place)
    heard = []
    async with bus.converse(QUESTION, first_s=2) as answers:
        async for answer in answers:
            heard.append(answer)
            if answer == b"placed":
                break
    assert heard == [b"held", b"held", b"placed"]


async def test_a_long_answer_holds_up_nobody(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def answer(body, reply):
        if PlaceRequest.model_validate_json(body).request_id == "slow":
            await asyncio.sleep(5)
        await reply(b"done")

    stop = await other.respond(PlaceRequest, "*", answer)
    slow = asyncio.ensure_future(bus.request(PlaceRequest(pool="p", request_id="slow"), timeout_s=10))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    assert await bus.request(QUESTION, timeout_s=2) == b"done"
    assert time.monotonic() - started < 1
    slow.cancel()
    await asyncio.wait({slow})
    await stop()


async def test_a_failing_answer_does_not_end_the_answering(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def answer(body, reply):
        if PlaceRequest.model_validate_json(body).request_id == "bad":
            raise KeyError("bad")
        await reply(b"fine")

    await other.respond(PlaceRequest, "*", answer)
    with pytest.raises(Unavailable):
        await bus.request(PlaceRequest(pool="p", request_id="bad"), timeout_s=0.2)
    assert await bus.request(QUESTION, timeout_s=2) == b"fine"


async def test_of_a_group_one_answers(world):
    bus = await world.bus()
    asked = []

    def answering(name):
        async def answer(body, reply):
            asked.append(name)
            await reply(name.encode())

        return answer

    for name in ("a", "b"):
        await (await world.bus(f"/{name}")).respond(PlaceRequest, "*", answering(name), group="routers")
    for _ in range(30):
        await bus.request(QUESTION, timeout_s=2)
    await asyncio.sleep(0.1)
    assert len(asked) == 30
    assert set(asked) == {"a", "b"}


async def test_a_question_reaches_the_one_it_names(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def answer(body, reply):
        await reply(ControlSlots.model_validate_json(body).worker_id.encode())

    stop = await other.respond(ControlSlots, "w1", answer)
    assert await bus.request(ControlSlots(worker_id="w1", revision="empty", ttl_s=1), timeout_s=2) == b"w1"
    with pytest.raises(Unavailable):
        await bus.request(ControlSlots(worker_id="w2", revision="empty", ttl_s=1), timeout_s=1)
    await stop()
    with pytest.raises(Unavailable):
        await bus.request(ControlSlots(worker_id="w1", revision="empty", ttl_s=1), timeout_s=1)


async def test_asking_fails_at_once_while_the_server_is_away(world):
    bus = await world.bus()
    await world.leave()
    await asyncio.sleep(0.2)
    started = time.monotonic()
    with pytest.raises(Unavailable):
        await bus.request(QUESTION, timeout_s=5)
    assert time.monotonic() - started < 1
    await world.come_back()


async def test_answering_survives_a_restart(world):
    bus, other = await world.bus("/a"), await world.bus("/b")

    async def answer(body, reply):
        await reply(b"here")

    await other.respond(PlaceRequest, "*", answer, group="g")
    await world.leave()
    await world.come_back()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await bus.request(QUESTION, timeout_s=1) == b"here"
            except Unavailable:
                await asyncio.sleep(0.02)
            else:
                break


class Heard:
    def __init__(self) -> None:
        self.messages = []

    async def __call__(self, subject, message) -> None:
        if message.request_id == "fail":
            raise KeyError("the handler failed")
        self.messages.append((subject, message))

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.messages) < count:
                await asyncio.sleep(0.01)


async def test_telemetry_is_heard(world):
    bus, other = await world.bus("/a"), await world.bus("/b")
    heard = Heard()
    stop = await other.listen("polymorph.tel.worker.>", heard)
    await bus.tell(counted("1"))
    await heard.wait(1)
    assert heard.messages == [("polymorph.tel.worker.tokens-counted.v1.p", counted("1"))]
    await stop()
    await bus.tell(counted("2"))
    await asyncio.sleep(0.2)
    assert len(heard.messages) == 1


async def test_who_listens_hears_what_is_told_right_after(world):
    """Each on a connection just made: the client's PING overtook the subscription on 4 in 100 of them."""
    bus = await world.bus("/a")
    for number in range(100):
        heard = Heard()
        stop = await (await world.bus("/b")).listen("polymorph.tel.worker.>", heard)
        await bus.tell(counted(str(number)))
        await heard.wait(1)
        await stop()


async def test_bad_telemetry_is_counted_and_dropped(world):
    bus, other = await world.bus("/a"), await world.bus("/b")
    heard = Heard()
    await other.listen("polymorph.tel.>", heard)
    bad = (b"\xff", b"[]", b'{"type":1}', b'{"type":"no.such","data":{}}')
    for body in bad:
        await world.tell_raw("polymorph.tel.worker.tokens-counted.v1.p", body)
    await bus.tell(counted("fail"))
    await bus.tell(counted("good"))
    await heard.wait(1)
    async with asyncio.timeout(5):
        while other.telemetry_undecodable < len(bad):
            await asyncio.sleep(0.01)
    assert [m.request_id for _, m in heard.messages] == ["good"]


async def test_telemetry_never_waits_for_a_server(world):
    bus = await world.bus()
    await world.leave()
    await asyncio.sleep(0.2)
    started = time.monotonic()
    for number in range(1000):
        await bus.tell(counted(str(number)))
    assert time.monotonic() - started < 1
    assert bus.telemetry_dropped == 1000
    await world.come_back()
    async with asyncio.timeout(5):
        while not await bus.ready():
            await asyncio.sleep(0.02)
    await bus.tell(counted("back"))
    assert bus.telemetry_dropped == 1000
