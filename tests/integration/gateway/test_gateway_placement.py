"""Placement over a real nats-server, with routers that come, go and hold; serving never stops."""

import asyncio
import contextlib
import datetime as dt
import json
import signal

import httpx
import pytest
from openai_upstream import EVENTS

from polymorph.bus import topology
from polymorph.events.state import WorkerRecord
from polymorph.events.subjects import pool_id
from polymorph.events.types import RequestFinished, RequestStarted

pytestmark = [pytest.mark.asyncio, pytest.mark.real]
JSON = {"content-type": "application/json"}


def record(worker_id: str, url: str, **changes: object) -> WorkerRecord:
    values = {
        "worker_id": worker_id,
        "pool": pool_id("m"),
        "model": "m",
        "url": url,
        "state": "ready",
        "generation": 1,
        "revision": "empty",
        "hardware": "test",
        "kv_capacity_tokens": 100_000,
        "max_num_seqs": 64,
        "started_at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        **changes,
    }
    return WorkerRecord.model_validate(values)


class Heartbeats:
    """Puts worker records anew as workers do, for as long as it runs."""

    def __init__(self, bus) -> None:
        self._bus = bus
        self.records: dict[str, WorkerRecord] = {}

    async def put(self, worker: WorkerRecord) -> None:
        self.records[worker.worker_id] = worker
        await self._bus.kv_put(topology.WORKERS, worker.worker_id, worker.model_dump_json().encode())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(2)
            for worker in list(self.records.values()):
                with contextlib.suppress(Exception):
                    await self.put(worker)


@contextlib.asynccontextmanager
async def beating(bus):
    beats = Heartbeats(bus)
    task = asyncio.create_task(beats.run())
    try:
        yield beats
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def post(client: httpx.AsyncClient, chat: bytes, **headers: str) -> httpx.Response:
    return await client.post("/v1/chat/completions", content=chat, headers={**JSON, **headers})


async def metric(client: httpx.AsyncClient, line: str) -> float:
    text = (await client.get("/metrics")).text
    return next((float(row.split()[-1]) for row in text.splitlines() if row.startswith(line)), 0.0)


async def until(condition, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_the_router_places_and_telemetry_tells(services, upstream, nats_server, bus_factory, chat):
    bus = await bus_factory("worker")
    hears = await bus_factory("router")
    told: asyncio.Queue = asyncio.Queue()

    async def hear(subject, message):
        told.put_nowait(message)

    for kind in (RequestStarted, RequestFinished):
        await hears.listen(kind.wildcard(), hear)
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url))
        await services.router(nats_server).start()
        url = await services.ready_gateway(nats_server)
        async with httpx.AsyncClient(base_url=url) as client:
            answer = await post(client, chat, **{"x-request-id": "r-1", "x-session-id": "agent"})
            assert answer.content == b"".join(EVENTS)
            assert await metric(client, 'polymorph_gateway_placements_total{by="router"}') == 1
        started = await asyncio.wait_for(told.get(), 5)
        finished = await asyncio.wait_for(told.get(), 5)
    assert (started.request_id, started.worker_id, started.placed_by) == ("r-1", "w1", "router")
    assert started.program_id.startswith("prog-")
    assert (finished.request_id, finished.status, finished.outcome) == ("r-1", 200, "ok")
    assert 0 < finished.first_byte_s <= finished.total_s


async def test_a_killed_router_costs_no_request_and_is_found_again(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url))
        router = services.router(nats_server)
        await router.start()
        url = await services.ready_gateway(nats_server)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await post(client, chat)).status_code == 200
            await router.signal(signal.SIGKILL)
            for _ in range(10):
                assert (await post(client, chat)).content == b"".join(EVENTS)
            assert await metric(client, 'polymorph_gateway_placements_total{by="gateway"}') == 10
            assert await metric(client, "polymorph_gateway_router_away") == 1
            await router.start()

            async def back() -> bool:
                return await metric(client, "polymorph_gateway_router_away") == 0

            await until(back)
            assert (await post(client, chat)).status_code == 200
            assert await metric(client, 'polymorph_gateway_placements_total{by="router"}') == 2


async def test_without_nats_it_serves_on_and_starts_anew_from_its_file(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    await bus.kv_put(topology.WORKERS, "w1", record("w1", upstream.url).model_dump_json().encode())
    gateway, url = services.gateway(nats_server, suspect_after_s=0.5, probe_interval_s=0.1)
    await gateway.start()
    async with httpx.AsyncClient(base_url=url) as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(ready)
        await nats_server.kill()
        for _ in range(5):
            assert (await post(client, chat)).status_code == 200
            await asyncio.sleep(0.3)  # longer than a silent worker stays unsuspected: it is probed, and lives
        await gateway.signal(signal.SIGKILL)
        await gateway.start()
        await until(ready)
        assert (await post(client, chat)).content == b"".join(EVENTS)
        await upstream.stop()

        async def not_ready() -> bool:
            return (await client.get("/readyz")).status_code == 503

        await until(not_ready)


async def test_a_worker_that_leaves_the_registry_serves_until_a_probe_fails(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    await bus.kv_put(topology.WORKERS, "w1", record("w1", upstream.url).model_dump_json().encode())
    url = await services.ready_gateway(nats_server, probe_interval_s=0.1)
    await bus.kv_delete(topology.WORKERS, "w1")
    async with httpx.AsyncClient(base_url=url) as client:
        await asyncio.sleep(0.5)
        assert (await post(client, chat)).status_code == 200
        upstream.healthy = False

        async def gone() -> bool:
            return (await client.get("/v1/models")).json()["data"] == []

        await until(gone)


async def test_a_full_fleet_holds_then_places(services, upstream, nats_server, bus_factory, chat):
    """A hold is not a router that is away: the request waits longer than the first answer may take."""
    bus = await bus_factory("worker")
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url, max_num_seqs=1))
        router = services.router(nats_server, capacity_seqs_factor=1.0, hold_heartbeat_s=0.2)
        await router.start()
        url = await services.ready_gateway(nats_server)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            first = asyncio.create_task(post(client, chat, **{"x-double": "gated"}))
            await asyncio.wait_for(upstream.arrived.wait(), 5)
            second = asyncio.create_task(post(client, chat))
            await asyncio.sleep(1.0)
            assert len(upstream.requests) == 1
            assert not second.done()
            for _ in EVENTS:
                upstream.release.release()
            assert (await first).content == b"".join(EVENTS)
            assert (await second).content == b"".join(EVENTS)
            assert await metric(client, 'polymorph_gateway_placements_total{by="router"}') == 2


@contextlib.asynccontextmanager
async def one_seat(services, nats_server):
    """Clients of a gateway and of its router, which lets a worker with one sequence have one request."""
    router = services.router(nats_server, capacity_seqs_factor=1.0, hold_heartbeat_s=0.2)
    await router.start()
    url = await services.ready_gateway(nats_server)
    async with (
        httpx.AsyncClient(base_url=url, timeout=20) as client,
        httpx.AsyncClient(base_url=router.probe.removesuffix("/readyz")) as desk,
    ):
        yield client, desk


async def test_held_requests_that_share_a_request_id_are_each_served_and_the_router_stays(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url, max_num_seqs=1))
        async with one_seat(services, nats_server) as (client, desk):
            first = asyncio.create_task(post(client, chat, **{"x-double": "gated", "x-request-id": "trace"}))
            await asyncio.wait_for(upstream.arrived.wait(), 5)
            twins = [asyncio.create_task(post(client, chat, **{"x-request-id": "trace"})) for _ in range(2)]

            async def both_held() -> bool:
                return await metric(desk, "polymorph_router_held_requests") == 2

            await until(both_held)
            await asyncio.sleep(1.0)  # longer than a held request waits for a heartbeat
            assert await metric(client, "polymorph_gateway_router_away") == 0
            assert len(upstream.requests) == 1
            for _ in EVENTS:
                upstream.release.release()
            for answer in await asyncio.gather(first, *twins):
                assert answer.content == b"".join(EVENTS)
            assert {seen.headers["x-request-id"] for seen in upstream.requests} == {"trace"}
            assert await metric(client, 'polymorph_gateway_placements_total{by="router"}') == 3


async def test_a_held_request_is_turned_away_at_its_deadline(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url, max_num_seqs=1))
        await services.router(
            nats_server, capacity_seqs_factor=1.0, hold_heartbeat_s=0.2, hold_deadline_s=0.5
        ).start()
        url = await services.ready_gateway(nats_server)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            first = asyncio.create_task(post(client, chat, **{"x-double": "gated"}))
            await asyncio.wait_for(upstream.arrived.wait(), 5)
            answer = await post(client, chat)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "stayed full for 0.5 s" in answer.json()["error"]["message"]
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


async def test_a_client_that_leaves_while_held_leaves_the_line(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url, max_num_seqs=1))
        async with one_seat(services, nats_server) as (client, desk):
            first = asyncio.create_task(post(client, chat, **{"x-double": "gated"}))
            await asyncio.wait_for(upstream.arrived.wait(), 5)
            second = asyncio.create_task(post(client, chat))

            async def held() -> bool:
                return await metric(desk, "polymorph_router_held_requests") == 1

            async def nobody_held() -> bool:
                return await metric(desk, "polymorph_router_held_requests") == 0

            await until(held)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await until(nobody_held)
            for _ in EVENTS:
                upstream.release.release()
            assert (await first).status_code == 200
            assert len(upstream.requests) == 1


async def test_a_router_that_dies_while_holding_does_not_keep_the_request(
    services, upstream, nats_server, bus_factory, chat
):
    bus = await bus_factory("worker")
    async with beating(bus) as beats:
        await beats.put(record("w1", upstream.url, max_num_seqs=1))
        router = services.router(nats_server, capacity_seqs_factor=1.0, hold_heartbeat_s=0.2)
        await router.start()
        url = await services.ready_gateway(nats_server)
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            first = asyncio.create_task(post(client, chat, **{"x-double": "gated"}))
            await asyncio.wait_for(upstream.arrived.wait(), 5)
            second = asyncio.create_task(post(client, chat))
            await asyncio.sleep(0.5)
            await router.signal(signal.SIGKILL)
            assert (await asyncio.wait_for(second, 5)).content == b"".join(EVENTS)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


async def test_one_program_stays_on_one_worker_without_the_router(
    services, upstream, second, nats_server, bus_factory
):
    bus = await bus_factory("worker")
    for name, double in (("w1", upstream), ("w2", second)):
        await bus.kv_put(topology.WORKERS, name, record(name, double.url).model_dump_json().encode())
    url = await services.ready_gateway(nats_server)
    async with httpx.AsyncClient(base_url=url) as client:
        engines: dict[str, set[str]] = {}
        for program in [f"p{number}" for number in range(8)]:
            for _ in range(3):
                body = json.dumps({"model": "m", "prompt": "x", "program_id": program}).encode()
                answer = await client.post("/v1/completions", content=body, headers=JSON)
                engines.setdefault(program, set()).add(answer.headers["x-engine"])
    assert all(len(names) == 1 for names in engines.values())
    assert set().union(*engines.values()) == {"double", "second"}
