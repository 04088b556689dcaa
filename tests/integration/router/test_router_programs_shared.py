"""Router replicas and a real Valkey: what one placed the others know, and no placement ever waits for it."""

import asyncio
import contextlib
import datetime as dt
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from polymorph.bus import topology
from polymorph.config.clock import SystemClock
from polymorph.events.requests import PLACEMENT, Placed, PlaceRequest
from polymorph.events.state import WorkerRecord
from polymorph.events.types import RequestStarted
from polymorph.router.adapters.programs import ANSWER_S, CHANNEL, PREFIX, SharedPrograms
from polymorph.router.app import Router
from polymorph.router.domain.announcements import Announcements
from polymorph.router.domain.programs import Program, Programs

pytestmark = [pytest.mark.asyncio, pytest.mark.real]

LOGGER = "polymorph.router.adapters.programs"
CLOCK = SystemClock()


def program(name: str) -> Program:
    return Program.named("p", name)


async def until(holds: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"never came true: {what}")


def metric(what: str) -> float:
    return REGISTRY.get_sample_value("polymorph_router_programs_total", {"what": what}) or 0.0


class Quick(SystemClock):
    """Sleeps are short and counted."""

    slept = 0

    async def sleep(self, seconds: float) -> None:
        self.slept += 1
        await asyncio.sleep(min(seconds, 0.01))


class Replica:
    """The map of one router, shared."""

    def __init__(self, url: str, limit: int = 10_000, clock: SystemClock = CLOCK) -> None:
        self.untold = Announcements(limit)
        self.programs = Programs(self.untold)
        self.shared = SharedPrograms(url, self.programs, self.untold, clock)

    def place(self, name: str, worker_id: str) -> None:
        self.programs.served(program(name), worker_id, CLOCK.monotonic())

    def home(self, name: str) -> str | None:
        return self.programs.home(program(name), CLOCK.monotonic())

    async def connected(self) -> None:
        await until(lambda: self.shared.connected, "connected")

    async def away(self) -> None:
        await until(lambda: not self.shared.connected, "found to be away")

    async def told(self) -> None:
        await until(lambda: not len(self.untold), "everything told")

    async def knows(self, name: str, worker_id: str) -> None:
        await until(lambda: self.home(name) == worker_id, f"{name} is at {worker_id}")


@contextlib.asynccontextmanager
async def running(*replicas: Replica) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(replica.shared.run()) for replica in replicas]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_two_replicas_see_each_others_placements_and_a_later_one_knows_them(valkey):
    valkey.start()
    one, other, later = (Replica(valkey.url) for _ in range(3))
    async with running(one, other):
        await one.connected()
        await other.connected()
        one.place("ann@example.org", "w1")
        await other.knows("ann@example.org", "w1")
        other.place("ann@example.org", "w2")
        await one.knows("ann@example.org", "w2")
        for number in range(350):
            one.place(str(number), f"w{number % 3}")
        await one.told()
    async with running(later), Redis.from_url(valkey.url, decode_responses=True) as client:
        await later.knows("ann@example.org", "w2")
        for number in range(350):
            await later.knows(str(number), f"w{number % 3}")
        key = PREFIX + "p:" + program("ann@example.org").digest
        assert await client.get(key) == "w2"
        assert 0 < await client.ttl(key) <= 900
        assert not [key for key in await client.keys() if "ann" in key]


async def test_a_valkey_that_is_killed_and_comes_back_empty_is_shared_again(valkey, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    one, other = Replica(valkey.url), Replica(valkey.url)
    async with running(one, other):
        await until(lambda: len(caplog.messages) == 2, "both say that Valkey is away")
        valkey.start()
        await one.connected()
        await other.connected()
        one.place("1", "w1")
        await other.knows("1", "w1")
        valkey.kill()
        await one.away()
        await other.away()
        one.place("2", "w1")
        assert (one.home("1"), one.home("2"), other.home("1")) == ("w1", "w1", "w1")
        valkey.start()
        await other.connected()
        await other.knows("2", "w1")
        other.place("1", "w2")
        await one.knows("1", "w2")
    away = [text for text in caplog.messages if "is away" in text]
    assert len(away) == 4, "once an outage and replica, not once a try"


async def test_one_outage_is_one_line_of_the_log_however_many_tries_it_takes(valkey, caplog):
    one = Replica(valkey.url, limit=2, clock=(clock := Quick()))
    before = metric("dropped")
    async with running(one):
        for number in range(5):
            one.place(str(number), "w1")
        await until(lambda: clock.slept >= 8, "eight tries")
        assert REGISTRY.get_sample_value("polymorph_router_valkey_connected") == 0
        await until(lambda: metric("dropped") == before + 3, "three counted as dropped")
        valkey.start()
        await one.connected()
        assert REGISTRY.get_sample_value("polymorph_router_valkey_connected") == 1
        await one.told()
    assert len([text for text in caplog.messages if "is away" in text]) == 1
    assert REGISTRY.get_sample_value("polymorph_router_valkey_connected") == 0


async def test_what_is_no_entry_is_counted_and_harms_nobody(valkey):
    valkey.start()
    digest = program("1").digest
    one = Replica(valkey.url)
    before = metric("malformed")
    async with Redis.from_url(valkey.url) as client:
        await client.set(PREFIX + "p:short", "w1")
        await client.set(PREFIX + "p:" + digest, b"\xff\x00 no worker")
        await client.rpush(PREFIX + "p:" + program("list").digest, "w1")
        await client.set(PREFIX + "p:" + program("good").digest, "w1")
        async with running(one):
            await one.knows("good", "w1")
            for text in (b"", b"\xff" * 9, b"x" * 100_000, f"{'0' * 32} p:{digest} w 1".encode()):
                await client.publish(CHANNEL, text)
            heard = metric("heard")
            one.place("own", "w1")
            await one.told()
            await client.publish(CHANNEL, f"{'0' * 32} p:{digest} w1")
            await one.knows("1", "w1")
            assert metric("heard") == heard + 1, (
                "what it told itself, perhaps overtaken by now, does not come back"
            )
            await until(lambda: metric("malformed") == before + 6, "six counted")
            assert one.shared.connected


async def test_a_valkey_that_takes_no_writes_is_an_outage_too(valkey, caplog):
    valkey.start()
    one = Replica(valkey.url, clock=(clock := Quick()))
    async with Redis.from_url(valkey.url) as client, running(one):
        await one.connected()
        await client.config_set("maxmemory", "1")
        one.place("1", "w1")
        await one.away()
        slept = clock.slept
        await until(lambda: clock.slept >= slept + 8, "eight tries")
        assert not one.shared.connected
        await client.config_set("maxmemory", "0")
        await one.connected()
        await one.told()
    assert len([text for text in caplog.messages if "is away" in text]) == 1


async def test_a_valkey_that_hangs_is_found_to_be_away_in_silence_too(valkey):
    valkey.start()
    one = Replica(valkey.url)
    async with running(one):
        await one.connected()
        valkey.freeze()
        await one.away()
        valkey.thaw()
        await one.connected()


def record(worker_id: str) -> bytes:
    worker = WorkerRecord(
        worker_id=worker_id,
        pool="p",
        model="m",
        url="http://127.0.0.1:1",
        state="ready",
        generation=1,
        revision="empty",
        hardware="h",
        started_at=dt.datetime.now(dt.UTC),
    )
    return worker.model_dump_json().encode()


class Asking:
    """Routers on a bus, asked one after the other."""

    def __init__(self, bus, gateway, url: str, routing) -> None:
        self._routing = routing
        self._bus = bus
        self._gateway = gateway
        self._url = url
        self._asked = 0

    def router(self) -> contextlib.AbstractAsyncContextManager[Router]:
        return self._routing(self._bus, redis_url=self._url)

    async def tell(self, of: str, worker_id: str, placed_by: str) -> None:
        self._asked += 1
        await self._gateway.tell(
            RequestStarted(
                pool="p",
                request_id=str(self._asked),
                program_id=of,
                worker_id=worker_id,
                placed_by=placed_by,
                at=CLOCK.now(),
            )
        )

    async def place(self, of: str, *, exclude: tuple[str, ...] = ()) -> str:
        self._asked += 1
        request = PlaceRequest(pool="p", request_id=str(self._asked), program_id=of, exclude=exclude)
        answer = PLACEMENT.validate_json(await self._gateway.request(request, timeout_s=ANSWER_S))
        assert isinstance(answer, Placed)
        return answer.worker_id


@pytest.fixture
async def asking(bus_factory, valkey, routing) -> Asking:
    worker = await bus_factory("worker")
    for worker_id in ("w1", "w2"):
        await worker.kv_put(topology.WORKERS, worker_id, record(worker_id))
    return Asking(await bus_factory("router"), await bus_factory("gateway"), valkey.url, routing)


async def test_a_router_that_starts_later_goes_on_where_the_program_was(valkey, asking):
    valkey.start()
    async with asking.router() as first:
        await until(lambda: first._shared.connected, "connected")
        for name, elsewhere in (("1", "w1"), ("2", "w2")):
            await asking.place(name, exclude=(elsewhere,))
        await until(lambda: not len(first._shared._announcements), "told")
    async with asking.router() as second:
        await until(lambda: len(second._shared._programs) == 2, "loaded")
        # By load alone every second one would go elsewhere.
        assert [await asking.place("1") for _ in range(4)] == ["w2"] * 4
        assert [await asking.place("2") for _ in range(4)] == ["w1"] * 4


async def test_a_router_without_valkey_is_ready_and_places(asking):
    async with asking.router() as router:
        home = await asking.place("1")
        assert [await asking.place("1") for _ in range(3)] == [home] * 3
        assert await router.ready()
        assert not router._shared.connected


async def test_a_program_that_a_gateway_placed_by_itself_stays_there(asking):
    async with asking.router() as router:
        known = router._shared._programs
        # Whoever placed a request shares that itself.
        await asking.tell("routed", "w1", "router")
        await asking.tell("alone", "w1", "gateway")
        await until(lambda: known.home(program("alone"), CLOCK.monotonic()) == "w1", "heard")
        assert known.home(program("routed"), CLOCK.monotonic()) is None
        assert [await asking.place("alone") for _ in range(3)] == ["w1"] * 3


async def test_a_valkey_that_hangs_delays_no_placement_and_is_found_to_be_away(valkey, asking):
    valkey.start()
    async with asking.router() as router:
        await until(lambda: router._shared.connected, "connected")
        valkey.freeze()
        # Were each to wait for Valkey once, they would take twenty times as long as it is given to answer.
        async with asyncio.timeout(5 * ANSWER_S):
            for number in range(20):
                await asking.place(str(number))
            await until(lambda: not router._shared.connected, "found to be away")
            assert await router.ready()
        valkey.thaw()
        await until(lambda: router._shared.connected, "connected again")
        await until(lambda: not len(router._shared._announcements), "told")
