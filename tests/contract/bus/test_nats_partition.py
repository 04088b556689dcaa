"""What happened while a reader was cut off is told within two seconds of its return."""

import asyncio
import time
from typing import Self

import pytest
import pytest_asyncio

from polymorph.bus.nats import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.events.types import WorkerRefused

pytestmark = pytest.mark.real


class Cable:
    """A TCP relay to the server that can be cut and mended."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._on_connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (onward, writer)):
            task = asyncio.ensure_future(self._pipe(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@pytest_asyncio.fixture
async def cable(nats_server):
    async with Cable(nats_server.port) as cable:
        yield cable


@pytest_asyncio.fixture
async def far(nats_server, cable):
    """A bus at the other end of the cable."""
    settings = nats_server.settings("compiler").model_copy(update={"url": f"nats://127.0.0.1:{cable.port}"})
    bus = await NatsBus.connect(settings, "/far", SystemClock())
    yield bus
    await bus.close()


async def cut_off(cable, far) -> None:
    cable.cut()
    async with asyncio.timeout(5):
        while far.connected:
            await asyncio.sleep(0.01)


async def test_a_watch_tells_what_changed_meanwhile(bus_factory, cable, far):
    near = await bus_factory()
    await near.kv_put("desired", "kept", b"1")
    await near.kv_put("desired", "dropped", b"1")
    values = far.kv_watch("desired")
    assert {(await anext(values)).key, (await anext(values)).key} == {"kept", "dropped"}
    waiting = asyncio.ensure_future(anext(values))
    await cut_off(cable, far)
    await near.kv_put("desired", "kept", b"2")
    await near.kv_delete("desired", "dropped")
    await asyncio.sleep(0.3)
    assert not waiting.done()
    mended = time.monotonic()
    await cable.mend()
    told = [await asyncio.wait_for(waiting, 5), await asyncio.wait_for(anext(values), 5)]
    assert time.monotonic() - mended < 2.0
    assert {(entry.key, entry.value) for entry in told} == {("kept", b"2"), ("dropped", None)}
    await values.aclose()


async def test_a_follower_tells_what_happened_meanwhile(bus_factory, cable, far):
    near = await bus_factory()
    records = far.events(after="0-0")
    waiting = asyncio.ensure_future(anext(records))
    await asyncio.sleep(0.3)
    await cut_off(cable, far)
    await near.publish(WorkerRefused(pool="p", worker_id="w", generation=1, revision="r", reason="meanwhile"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    mended = time.monotonic()
    await cable.mend()
    record = await asyncio.wait_for(waiting, 5)
    assert time.monotonic() - mended < 2.0
    assert record.envelope.data["reason"] == "meanwhile"
    await records.aclose()
