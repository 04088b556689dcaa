"""Key-value and watching: one behaviour on every bus."""

import asyncio
import time

import pytest

from polymorph.bus import topology
from polymorph.bus.errors import Conflict, NotFound, Unavailable
from polymorph.bus.port import KeyValue


class Watched:
    """What a watch told so far."""

    def __init__(self) -> None:
        self.told: list[KeyValue] = []
        self.at: list[float] = []

    async def follow(self, values) -> None:
        async for entry in values:
            self.told.append(entry)
            self.at.append(time.monotonic())

    async def until(self, key: str, value: bytes | None, within_s: float = 10.0) -> float:
        """When the watch told that."""
        async with asyncio.timeout(within_s):
            while True:
                for entry, at in zip(self.told, self.at, strict=True):
                    if (entry.key, entry.value) == (key, value):
                        return at
                await asyncio.sleep(0.005)


async def test_put_get_delete_keys(world):
    bus = await world.bus()
    with pytest.raises(NotFound):
        await bus.kv_get("desired", "pool")
    first = await bus.kv_put("desired", "pool", b"1")
    second = await bus.kv_put("desired", "pool", b"2")
    assert second > first
    assert await bus.kv_get("desired", "pool") == KeyValue("pool", b"2", second)
    await bus.kv_put("desired", "other.pool", b"")
    assert await bus.kv_keys("desired") == ["other.pool", "pool"]
    assert (await bus.kv_get("desired", "other.pool")).value == b""
    await bus.kv_delete("desired", "pool")
    with pytest.raises(NotFound):
        await bus.kv_get("desired", "pool")
    assert await bus.kv_keys("desired") == ["other.pool"]


async def test_create_only_where_nothing_is(world):
    bus = await world.bus()
    await bus.kv_create("desired", "pool", b"1")
    with pytest.raises(Conflict):
        await bus.kv_create("desired", "pool", b"2")
    await bus.kv_delete("desired", "pool")
    await bus.kv_create("desired", "pool", b"3")
    assert (await bus.kv_get("desired", "pool")).value == b"3"


async def test_update_only_what_was_seen(world):
    bus = await world.bus()
    first = await bus.kv_create("desired", "pool", b"1")
    second = await bus.kv_update("desired", "pool", b"2", first)
    with pytest.raises(Conflict):
        await bus.kv_update("desired", "pool", b"3", first)
    assert (await bus.kv_get("desired", "pool")).revision == second


async def test_of_fifty_racers_one_wins(world):
    buses = [await world.bus(f"/racer/{n}") for n in range(5)]
    seen = await buses[0].kv_create("desired", "pool", b"start")

    async def race(number: int) -> bool:
        try:
            await buses[number % 5].kv_update("desired", "pool", str(number).encode(), seen)
        except Conflict:
            return False
        return True

    won = await asyncio.gather(*(race(number) for number in range(50)))
    assert sum(won) == 1
    assert (await buses[0].kv_get("desired", "pool")).value == str(won.index(True)).encode()


async def test_of_fifty_creators_one_wins(world):
    buses = [await world.bus(f"/racer/{n}") for n in range(5)]

    async def race(number: int) -> bool:
        try:
            await buses[number % 5].kv_create("leases", "device", b"")
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*(race(number) for number in range(50)))) == 1


@pytest.mark.parametrize("key", ["", ".", "a..b", "a b", "a.*", ">", "ü", ".a", "a\n"])
async def test_what_is_no_key_is_refused(world, key):
    bus = await world.bus()
    with pytest.raises(ValueError, match="key"):
        await bus.kv_put("desired", key, b"")


async def test_a_watch_tells_what_is_and_what_changes(world, run):
    bus, other = await world.bus("/a"), await world.bus("/b")
    await bus.kv_put("desired", "a", b"1")
    await bus.kv_put("desired", "gone", b"1")
    await bus.kv_delete("desired", "gone")
    watched, one = Watched(), Watched()
    run(watched.follow(other.kv_watch("desired")))
    run(one.follow(other.kv_watch("desired", "b")))
    await watched.until("a", b"1")
    for number in range(20):
        await bus.kv_put("desired", "b", str(number).encode())
    await bus.kv_delete("desired", "a")
    await watched.until("b", b"19")
    await watched.until("a", None)
    assert [e.value for e in watched.told if e.key == "b"] == [str(n).encode() for n in range(20)]
    await one.until("b", b"19")
    assert {e.key for e in one.told} == {"b"}
    assert all(e.key != "gone" for e in watched.told)


async def test_a_change_is_told_at_once(world, run):
    bus, other = await world.bus("/a"), await world.bus("/b")
    await bus.kv_put("desired", "a", b"1")
    watched = Watched()
    run(watched.follow(other.kv_watch("desired")))
    await watched.until("a", b"1")
    changed = time.monotonic()
    await bus.kv_put("desired", "a", b"2")
    assert await watched.until("a", b"2") - changed < 1.0


async def test_a_watch_survives_a_restart_within_two_seconds(world, run):
    bus, other = await world.bus("/a"), await world.bus("/b")
    await bus.kv_put("desired", "a", b"1")
    watched = Watched()
    run(watched.follow(other.kv_watch("desired")))
    await watched.until("a", b"1")
    await world.leave()
    await asyncio.sleep(0.5)
    await world.come_back()
    back = time.monotonic()
    async with asyncio.timeout(5):
        while not await bus.ready():
            await asyncio.sleep(0.01)
    await bus.kv_put("desired", "a", b"2")
    assert await watched.until("a", b"2") - back < 2.0


async def test_expiry_is_told_as_a_deletion(world, run, monkeypatch):
    bus = await world.bus()
    watched = Watched()
    run(watched.follow(bus.kv_watch(topology.WORKERS)))
    put = time.monotonic()
    await bus.kv_put(topology.WORKERS, "w1", b"alive")
    await watched.until("w1", b"alive")
    at = await watched.until("w1", None, within_s=topology.WORKERS_TTL_S * 2)
    assert topology.WORKERS_TTL_S - 0.5 <= at - put <= topology.WORKERS_TTL_S * 1.5
    assert await bus.kv_keys(topology.WORKERS) == []
    await bus.kv_create(topology.WORKERS, "w1", b"again")


async def test_a_call_is_bounded_while_the_server_is_away(world):
    bus = await world.bus()
    await world.leave()
    started = time.monotonic()
    for call in (bus.kv_get("desired", "a"), bus.kv_put("desired", "a", b"")):
        with pytest.raises(Unavailable):
            await call
    assert time.monotonic() - started < 6
    await world.come_back()
