"""Following the event stream: one behaviour on every bus."""

import asyncio

import pytest

from polymorph.bus.port import Gap, StreamRecord
from polymorph.bus.position import Position
from polymorph.events.types import WorkerRefused


def refused(reason: str, pool: str = "p") -> WorkerRefused:
    return WorkerRefused(pool=pool, worker_id="w", generation=1, revision="r", reason=reason)


async def take(iterator, count, within_s=10.0):
    async with asyncio.timeout(within_s):
        return [await anext(iterator) for _ in range(count)]


def reasons(records):
    return [record.envelope.data["reason"] for record in records]


async def test_from_the_first_then_live(world):
    bus = await world.bus()
    await bus.publish(refused("1"))
    await bus.publish(refused("2"))
    records = bus.events(after="0-0")
    assert reasons(await take(records, 2)) == ["1", "2"]
    await bus.publish(refused("3"))
    (record,) = await take(records, 1, within_s=1.0)
    assert record.subject == refused("3").subject()
    assert record.envelope.type == "polymorph.evt.worker.refused.v1"
    await records.aclose()


async def test_after_a_position(world):
    bus = await world.bus()
    for number in range(5):
        await bus.publish(refused(str(number)))
    records = bus.events(after="0-0")
    told = await take(records, 5)
    await records.aclose()
    again = bus.events(after=told[2].position)
    assert [r.position for r in await take(again, 2)] == [told[3].position, told[4].position]
    await again.aclose()


async def test_only_new_ones_without_a_position(world, run):
    bus = await world.bus()
    await bus.publish(refused("old"))
    told: list[StreamRecord | Gap] = []

    async def follow() -> None:
        nonlocal told
        async for record in bus.events():
            told += [record]

    run(follow())
    await asyncio.sleep(0.3)
    await bus.publish(refused("new"))
    async with asyncio.timeout(5):
        while not told:
            await asyncio.sleep(0.01)
    assert reasons(told) == ["new"]


async def test_only_the_subjects_asked_for(world):
    bus = await world.bus()
    for number in range(4):
        await bus.publish(refused(str(number), pool=f"p{number % 2}"))
    records = bus.events(subjects="polymorph.evt.worker.refused.v1.p1", after="0-0")
    assert reasons(await take(records, 2)) == ["1", "3"]
    await bus.publish(refused("4", pool="p0"))
    await bus.publish(refused("5", pool="p1"))
    assert reasons(await take(records, 1)) == ["5"]
    await records.aclose()


async def test_a_purged_range_is_a_gap(world):
    bus = await world.bus()
    for number in range(6):
        await bus.publish(refused(str(number)))
    records = bus.events(after="0-0")
    first = (await take(records, 1))[0]
    await records.aclose()
    await world.purge_events(below=4)
    again = bus.events(after=first.position)
    gap, following = await take(again, 2)
    epoch = Position.parse(first.position).epoch
    assert gap == Gap(after=first.position, resumes_at=f"{epoch}-4")
    assert following.position == f"{epoch}-4"
    assert reasons([following]) == ["3"]
    await again.aclose()


async def test_a_position_at_the_edge_of_a_purge_is_no_gap(world):
    bus = await world.bus()
    for number in range(4):
        await bus.publish(refused(str(number)))
    records = bus.events(after="0-0")
    third = (await take(records, 3))[2]
    await records.aclose()
    await world.purge_events(below=4)
    again = bus.events(after=third.position)
    assert reasons(await take(again, 1)) == ["3"]
    await again.aclose()


async def test_a_stream_made_anew_is_a_gap(world):
    bus = await world.bus()
    for number in range(3):
        await bus.publish(refused(str(number)))
    records = bus.events(after="0-0")
    last = (await take(records, 3))[2]
    await world.renew_events()
    await bus.publish(refused("anew"))
    gap, following = await take(records, 2)
    assert isinstance(gap, Gap)
    assert gap.after == last.position
    assert gap.resumes_at == following.position
    assert Position.parse(following.position).sequence == 1
    assert Position.parse(following.position).epoch != Position.parse(last.position).epoch
    await records.aclose()


async def test_following_survives_a_restart(world, run):
    bus = await world.bus()
    told: list[StreamRecord | Gap] = []

    async def follow() -> None:
        nonlocal told
        async for record in bus.events(after="0-0"):
            told += [record]

    await bus.publish(refused("before"))
    run(follow())
    async with asyncio.timeout(5):
        while not told:
            await asyncio.sleep(0.01)
    await world.leave()
    await world.come_back()
    async with asyncio.timeout(5):
        while not await bus.ready():
            await asyncio.sleep(0.01)
    await bus.publish(refused("after"))
    async with asyncio.timeout(3):
        while len(told) < 2:
            await asyncio.sleep(0.01)
    assert reasons(told) == ["before", "after"]


@pytest.mark.parametrize("position", ["", "7", "-", "a-1", "1-", "1-2-3", "-1-1"])
async def test_what_is_no_position_is_refused(world, position):
    bus = await world.bus()
    with pytest.raises(ValueError, match="position"):
        await anext(bus.events(after=position))
