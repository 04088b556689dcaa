"""GET /v1/events over a real nats-server: live, from a position on, filtered, with gaps told."""

import asyncio
import contextlib
import datetime as dt
import json
import os
import signal
from collections.abc import AsyncIterator

import httpx
import nats
import pytest

from polymorph.bus import topology
from polymorph.events.state import WorkerRecord
from polymorph.events.subjects import pool_id
from polymorph.events.types import SearchClosed, WorkerRefused

pytestmark = [pytest.mark.asyncio, pytest.mark.real]


def refused(generation: int) -> WorkerRefused:
    return WorkerRefused(pool="p", worker_id="w", generation=generation, revision="r", reason="test")


def closed(search_id: str) -> SearchClosed:
    return SearchClosed(
        pool="p",
        search_id=search_id,
        outcome="nothing-better",
        winner=None,
        candidates=1,
        cpu_s=1.0,
        reason="test",
    )


def worker(worker_id: str, *, model: str = "m") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        pool=pool_id(model),
        model=model,
        url="http://127.0.0.1:9",
        state="ready",
        generation=1,
        revision="empty",
        hardware="test",
        started_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    )


async def until_text(client: httpx.AsyncClient, url: str, text: str) -> None:
    async with asyncio.timeout(20):
        while text not in (await client.get(url)).text:
            await asyncio.sleep(0.05)


async def frames(answer: httpx.Response) -> AsyncIterator[dict[str, str]]:
    """Server-sent events as fields; comments under the empty name."""
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        elif fields:
            yield fields
            fields = {}


@contextlib.asynccontextmanager
async def watching(url: str, query: str = "", **headers: str) -> AsyncIterator[AsyncIterator[dict[str, str]]]:
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("GET", f"{url}/v1/events{query}", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = frames(answer)
        assert "retry" in await anext(events)
        yield events


async def facts(events: AsyncIterator[dict[str, str]], count: int) -> list[dict[str, str]]:
    taken: list[dict[str, str]] = []
    async with asyncio.timeout(15):
        async for event in events:
            if "data" in event:
                taken.append(event)
            if len(taken) == count:
                return taken
    raise AssertionError(f"the stream ended after {taken}")


def generation(event: dict[str, str]) -> int:
    return json.loads(event["data"])["data"]["generation"]


async def started(services, nats_server, **settings: object) -> str:
    gateway, url = services.gateway(nats_server, **settings)
    await gateway.start()
    async with httpx.AsyncClient() as client, asyncio.timeout(15):
        while True:
            async with client.stream("GET", f"{url}/v1/events") as answer:
                if answer.status_code == 200:
                    return url
            await asyncio.sleep(0.05)


async def test_replay_goes_on_after_the_last_event_id(services, nats_server, bus_factory):
    bus = await bus_factory("worker")
    for number in range(4):
        await bus.publish(refused(number))
    url = await started(services, nats_server)
    async with watching(url, "?since=0-0") as events:
        first = await facts(events, 4)
        assert [generation(event) for event in first] == [0, 1, 2, 3]
        await bus.publish(refused(4))
        assert generation((await facts(events, 1))[0]) == 4
    epoch, sequence = first[1]["id"].rsplit("-", 1)
    assert int(sequence) > 0
    assert epoch != "0"
    async with watching(url, **{"Last-Event-ID": first[1]["id"]}) as events:
        assert [generation(event) for event in await facts(events, 3)] == [2, 3, 4]


async def test_a_watcher_without_a_position_sees_what_comes_and_its_filter(
    services, nats_server, bus_factory
):
    worker, compiler = await bus_factory("worker"), await bus_factory("compiler")
    await worker.publish(refused(0))
    url = await started(services, nats_server, event_heartbeat_s=0.2)
    async with watching(url, "?subjects=polymorph.evt.search.>") as events:
        assert (await anext(events))[""] == "heartbeat"
        await worker.publish(refused(1))
        await compiler.publish(closed("s-1"))
        (event,) = await facts(events, 1)
    assert json.loads(event["data"])["data"]["search_id"] == "s-1"


async def test_a_purged_range_is_told_as_a_gap(services, nats_server, bus_factory):
    bus = await bus_factory("worker")
    for number in range(6):
        await bus.publish(refused(number))
    url = await started(services, nats_server)
    async with watching(url, "?since=0-0") as events:
        ids = [event["id"] for event in await facts(events, 6)]
    await _purge(nats_server, int(ids[3].rsplit("-", 1)[1]) + 1)
    async with watching(url, f"?since={ids[0]}") as events:
        gap, *rest = await facts(events, 3)
    assert gap["event"] == "gap"
    assert "id" not in gap
    assert json.loads(gap["data"])["after"] == ids[0]
    assert [generation(event) for event in rest] == [4, 5]


async def _purge(nats_server, below: int) -> None:
    reach = nats_server.settings("operator")
    client = await nats.connect(reach.url, user=reach.user, password=reach.password.get_secret_value())
    await client.jetstream().purge_stream(topology.EVENTS_STREAM, seq=below)
    await client.close()


async def test_watching_survives_a_restart_of_the_server(services, nats_server, bus_factory):
    bus = await bus_factory("worker")
    url = await started(services, nats_server)
    async with watching(url) as events:
        await bus.publish(refused(0))
        assert generation((await facts(events, 1))[0]) == 0
        await nats_server.kill()
        await nats_server.start()
        await bus.publish(refused(1))
        assert generation((await facts(events, 1))[0]) == 1


async def test_watchers_do_not_hold_up_a_shutdown(services, nats_server):
    gateway, url = services.gateway(nats_server, drain_timeout_s=30)
    await gateway.start()
    async with httpx.AsyncClient(timeout=20) as client, asyncio.timeout(15):
        while True:
            async with client.stream("GET", f"{url}/v1/events") as answer:
                if answer.status_code == 200:
                    assert await asyncio.wait_for(gateway.signal(signal.SIGTERM), 5) == 0
                    return
            await asyncio.sleep(0.05)


async def test_a_connection_that_nats_closed_for_good_is_made_anew(
    services, nats_server, bus_factory, tmp_path
):
    """The server refuses the gateway's password for a while: a client gives up on that, unlike on a server away."""
    bus = await bus_factory("worker")
    gateway, url = services.gateway(nats_server)
    await gateway.start()
    await bus.kv_put(topology.WORKERS, "w1", worker("w1").model_dump_json().encode())
    async with httpx.AsyncClient() as client:
        await until_text(client, f"{url}/v1/models", '"m"')
        async with watching(url, "?since=0-0") as events:
            await bus.publish(refused(0))
            assert generation((await facts(events, 1))[0]) == 0
            config = tmp_path / "nats" / "nats.conf"
            right = config.read_text()
            password = nats_server.settings("gateway").password.get_secret_value()
            config.write_text(right.replace(password, "rotated"))
            os.kill(nats_server.pid, signal.SIGHUP)
            async with asyncio.timeout(20):
                while "no bus, trying again" not in gateway.log():
                    await asyncio.sleep(0.05)
            config.write_text(right)
            os.kill(nats_server.pid, signal.SIGHUP)
            # The same watcher goes on where it was, and the registry is followed again.
            await bus.publish(refused(1))
            assert generation((await facts(events, 1))[0]) == 1
        await bus.kv_put(topology.WORKERS, "w2", worker("w2", model="m2").model_dump_json().encode())
        await until_text(client, f"{url}/v1/models", '"m2"')
