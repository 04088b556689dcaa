"""One behaviour suite, two buses: what a test does to the world behind the bus, on each of them."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import pytest
import pytest_asyncio

from polymorph.bus import topology
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import Bus
from polymorph.bus.provision import Limits, wanted_streams
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock


class World(Protocol):
    """What lies behind the buses of a test."""

    async def bus(self, source: str = "/polymorph/test/0") -> Bus: ...

    async def leave(self) -> None:
        """The server goes away, without a word."""
        ...

    async def come_back(self) -> None: ...

    async def keep_raw(self, subject: str, body: bytes) -> None: ...

    async def tell_raw(self, subject: str, body: bytes) -> None: ...

    async def purge_events(self, below: int) -> None: ...

    async def renew_events(self) -> None: ...

    async def corrupt(self, digest: str) -> None: ...


class MemoryBehind:
    def __init__(self) -> None:
        self.world = MemoryWorld()
        self.made: list[InMemoryBus] = []

    async def bus(self, source: str = "/polymorph/test/0") -> Bus:
        bus = InMemoryBus(source, SystemClock(), self.world)
        self.made.append(bus)
        return bus

    async def leave(self) -> None:
        self.world.available = False

    async def come_back(self) -> None:
        self.world.available = True

    async def keep_raw(self, subject: str, body: bytes) -> None:
        await InMemoryBus("/raw", SystemClock(), self.world).publish_raw(subject, body, repr(body))

    async def tell_raw(self, subject: str, body: bytes) -> None:
        InMemoryBus("/raw", SystemClock(), self.world).tell_raw(subject, body)

    async def purge_events(self, below: int) -> None:
        self.world.streams[topology.EVENTS_STREAM].purge(below)

    async def renew_events(self) -> None:
        self.world.renew_events(epoch=2)

    async def corrupt(self, digest: str) -> None:
        self.world.objects[topology.ARTIFACTS][digest] = b"something else"

    async def close(self) -> None:
        for bus in self.made:
            await bus.close()


class NatsBehind:
    def __init__(self, server: NatsServer, factory: Callable[..., Awaitable[NatsBus]]) -> None:
        self.server = server
        self.factory = factory

    async def bus(self, source: str = "/polymorph/test/0") -> Bus:
        return await self.factory("compiler", source, timeout_s=2.0)

    async def leave(self) -> None:
        await self.server.kill()

    async def come_back(self) -> None:
        await self.server.start()

    async def keep_raw(self, subject: str, body: bytes) -> None:
        bus = await self.factory("compiler", "/raw")
        await bus.connection.store(subject, body)

    async def tell_raw(self, subject: str, body: bytes) -> None:
        bus = await self.factory("compiler", "/raw")
        await bus.connection.client.publish(subject, body)

    async def purge_events(self, below: int) -> None:
        bus = await self.factory("operator")
        await bus.connection.jetstream.purge_stream(topology.EVENTS_STREAM, seq=below)

    async def renew_events(self) -> None:
        jetstream = (await self.factory("operator")).connection.jetstream
        await jetstream.delete_stream(topology.EVENTS_STREAM)
        config = next(c for c in wanted_streams(Limits(), 1) if c.name == topology.EVENTS_STREAM)
        await jetstream.add_stream(config)

    async def corrupt(self, digest: str) -> None:
        connection = (await self.factory("operator")).connection
        name = base64.urlsafe_b64encode(digest.encode()).decode()
        described = await connection.jetstream.get_last_msg("OBJ_artifacts", f"$O.artifacts.M.{name}")
        chunk = f"$O.artifacts.C.{json.loads(described.data or b'{}')['nuid']}"
        await connection.jetstream.purge_stream("OBJ_artifacts", subject=chunk)
        await connection.store(chunk, b"something else")


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.real)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def memory_behind() -> AsyncIterator[MemoryBehind]:
    behind = MemoryBehind()
    yield behind
    await behind.close()


@pytest.fixture
def nats_behind(nats_server: NatsServer, bus_factory: Callable[..., Awaitable[NatsBus]]) -> NatsBehind:
    return NatsBehind(nats_server, bus_factory)


@pytest.fixture
def world(kind: str, request: pytest.FixtureRequest) -> World:
    behind: World = request.getfixturevalue(f"{kind}_behind")
    return behind


@pytest_asyncio.fixture
async def run() -> AsyncIterator[Callable[..., "asyncio.Task[None]"]]:
    """Runs a coroutine beside the test and ends it after."""
    tasks: list[asyncio.Task[None]] = []

    def start(work: Awaitable[None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        tasks.append(task)
        return task

    yield start
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=10)
        if left:
            for t in asyncio.all_tasks():
                t.print_stack()
        assert not left, f"these do not end when cancelled: {left}"
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            raise task.exception()
