"""The server, its topology and the connection to it: what only the real thing has."""

import asyncio
import re
import threading
import time

import pytest
from nats.js import api

from polymorph.bus import topology
from polymorph.bus.errors import Fatal, Unavailable
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import Consumption
from polymorph.bus.provision import Limits, provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock
from polymorph.config.settings import NatsSettings
from polymorph.events.types import WorkerRefused

pytestmark = pytest.mark.real


def refused(reason: str) -> WorkerRefused:
    return WorkerRefused(pool="p", worker_id="w", generation=1, revision="r", reason=reason)


async def test_provisioning_twice_changes_nothing(nats_server):
    again = await provision(nats_server.settings("operator"), monitor_url=nats_server.monitor_url)
    assert again.changes == ()
    assert again.sync == "always"


async def test_provisioning_over_a_bus(bus_factory):
    bus = await bus_factory("compiler")
    assert (await provision(bus)).changes == ()
    assert await bus.ready()


async def test_provisioning_mends_what_differs(nats_server, bus_factory):
    jetstream = (await bus_factory("operator")).connection.jetstream
    config = (await jetstream.stream_info(topology.EVENTS_STREAM)).config
    config.max_age = 6000.0
    await jetstream.update_stream(config)
    await jetstream.delete_stream("KV_freeze")
    done = await provision(nats_server.settings("operator"))
    assert done.changes == ("POLYMORPH_EVT: updated max_age", "KV_freeze: created")
    done = await provision(nats_server.settings("operator"), limits=Limits(jobs_bytes=10_000_000))
    assert done.changes == ("POLYMORPH_JOBS: updated max_bytes",)


async def test_provisioning_says_when_it_cannot_tell(nats_server, caplog):
    done = await provision(nats_server.settings("operator"))
    assert done.sync == "unknown"
    assert "cannot tell whether NATS syncs each write" in caplog.text


async def test_a_stream_of_another_kind_is_fatal(nats_server, bus_factory):
    jetstream = (await bus_factory("operator")).connection.jetstream
    await jetstream.delete_stream(topology.JOBS_STREAM)
    await jetstream.add_stream(api.StreamConfig(name=topology.JOBS_STREAM, subjects=["polymorph.cmd.>"]))
    with pytest.raises(Fatal, match="retention"):
        await provision(nats_server.settings("operator"))


async def test_a_server_that_does_not_sync_is_refused(nats_server, tmp_path):
    await nats_server.kill()

    class Careless(NatsServer):
        def command(self) -> list[str]:
            command = super().command()
            config = tmp_path / "nats" / "nats.conf"
            config.write_text(re.sub("sync_interval: always", "sync_interval: 2m", config.read_text()))
            return command

    careless = Careless(tmp_path / "nats", port=nats_server.port, monitor_port=nats_server.monitor_port)
    await careless.start()
    try:
        with pytest.raises(Fatal, match="sync_interval: always"):
            await provision(careless.settings("operator"), monitor_url=careless.monitor_url)
    finally:
        await careless.kill()


async def test_connecting_waits_for_the_server(nats_server):
    await nats_server.kill()
    with pytest.raises(Unavailable):
        await NatsBus.connect(nats_server.settings("router"), "/x", SystemClock(), wait_s=0.3)
    connecting = asyncio.ensure_future(NatsBus.connect(nats_server.settings("router"), "/x", SystemClock()))
    await asyncio.sleep(0.5)
    assert not connecting.done()
    await nats_server.start()
    bus = await asyncio.wait_for(connecting, 5)
    assert await bus.ready()
    await bus.close()


async def test_connecting_can_be_given_up(nats_server):
    await nats_server.kill()
    before = asyncio.all_tasks()
    connecting = asyncio.ensure_future(NatsBus.connect(nats_server.settings("router"), "/x", SystemClock()))
    await asyncio.sleep(0.3)
    connecting.cancel()
    await asyncio.wait({connecting}, timeout=5)
    assert connecting.cancelled()
    await asyncio.sleep(0.1)
    assert asyncio.all_tasks() == before


async def test_a_connection_closed_for_good_is_fatal(bus_factory):
    bus = await bus_factory()
    waiting = asyncio.ensure_future(bus.lost())
    await asyncio.sleep(0)
    await bus.connection.client.close()
    with pytest.raises(Fatal):
        await asyncio.wait_for(waiting, 2)
    with pytest.raises(Fatal):
        await bus.publish(refused("x"))


async def test_a_taken_port_is_one_clear_line(nats_server, tmp_path):
    other = NatsServer(tmp_path / "other", port=nats_server.port, monitor_port=1)
    with pytest.raises(Fatal, match="ended at once"):
        await other.start()


async def test_acknowledged_events_survive_a_kill(nats_server, bus_factory):
    bus = await bus_factory()
    for number in range(100):
        await bus.publish(refused(str(number)))
    await nats_server.kill()
    await nats_server.start()
    records = bus.events(after="0-0")
    told = [(await anext(records)).envelope.data["reason"] for _ in range(100)]
    await records.aclose()
    assert told == [str(number) for number in range(100)]


async def test_a_stale_holder_says_no_word(nats_server, bus_factory):
    """A process that stood still past its time must not take the message from who has it now."""
    consumption = Consumption("d", "polymorph.evt.worker.>", ack_wait_s=0.6, max_attempts=5)
    bus = await bus_factory()
    stalled = threading.Event()
    handled: list[int] = []

    def other_process() -> None:
        async def stand_still() -> None:
            first = await NatsBus.connect(nats_server.settings("compiler"), "/first", SystemClock())

            async def handler(delivery) -> None:
                stalled.set()
                time.sleep(2.0)  # noqa: ASYNC251 - the whole process stands still: no heartbeat

            consuming = asyncio.ensure_future(first.consume(consumption, handler))
            await asyncio.wait({consuming}, timeout=4.0)
            consuming.cancel()
            await asyncio.wait({consuming})
            await first.close()

        asyncio.run(stand_still())

    thread = threading.Thread(target=other_process)
    thread.start()
    await bus.publish(refused("contested"))
    await asyncio.to_thread(stalled.wait, 10)
    begun = asyncio.Event()

    async def fail_late(delivery) -> None:
        begun.set()
        handled.append(delivery.attempt)
        if len(handled) == 1:
            await asyncio.sleep(
                3.0
            )  # longer than the first stands still: its late word would end the message
            raise ValueError("once more, please")

    consuming = asyncio.ensure_future(bus.consume(consumption, fail_late))
    await asyncio.wait_for(begun.wait(), 10)
    async with asyncio.timeout(15):
        while len(handled) < 2:
            await asyncio.sleep(0.05)
    consuming.cancel()
    await asyncio.wait({consuming})
    await asyncio.to_thread(thread.join)


async def test_a_durable_takes_a_new_configuration(bus_factory):
    bus = await bus_factory()

    async def nothing(delivery) -> None: ...

    for ack_wait_s in (5.0, 7.0):
        consumption = Consumption("d", "polymorph.evt.worker.>", ack_wait_s=ack_wait_s)
        consuming = asyncio.ensure_future(bus.consume(consumption, nothing))
        async with asyncio.timeout(5):
            while True:
                found = await bus.connection.jetstream.consumers_info(topology.EVENTS_STREAM)
                if [c.config.ack_wait for c in found] == [ack_wait_s]:
                    break
                await asyncio.sleep(0.02)
        consuming.cancel()
        await asyncio.wait({consuming})


async def test_headers_carry_the_id_and_the_trace(bus_factory):
    trace = pytest.importorskip("opentelemetry.trace")
    span = trace.NonRecordingSpan(
        trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    bus = await bus_factory()
    seen = asyncio.get_running_loop().create_future()

    async def handler(delivery) -> None:
        seen.set_result((delivery.envelope.id, trace.get_current_span().get_span_context().trace_id))

    with trace.use_span(span):
        await bus.publish(refused("traced"))
    msg = await bus.connection.jetstream.get_msg(topology.EVENTS_STREAM, 1)
    consuming = asyncio.ensure_future(bus.consume(Consumption("d", "polymorph.evt.worker.>"), handler))
    message_id, trace_id = await asyncio.wait_for(seen, 5)
    assert trace_id == 0xABC
    assert msg.headers["Nats-Msg-Id"] == message_id
    assert msg.headers["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"
    consuming.cancel()
    await asyncio.wait({consuming})


async def test_unprovisioned_is_not_ready(nats_server, bus_factory):
    bus = await bus_factory("operator", timeout_s=0.3)
    for stream in ("KV_desired", topology.EVENTS_STREAM):
        await bus.connection.jetstream.delete_stream(stream)
    assert not await bus.ready()


async def test_nobody_serves_another_port():
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await NatsBus.connect(NatsSettings(url="nats://127.0.0.1:1"), "/x", SystemClock(), wait_s=0.2)
