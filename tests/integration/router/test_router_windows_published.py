"""The router on a bus: windows are published once, by whichever router holds the lease."""

import asyncio
import datetime as dt

import pytest

from polymorph.bus import topology
from polymorph.bus.port import StreamRecord
from polymorph.events.requests import PLACEMENT, Placed, PlaceRequest, Unplaceable
from polymorph.events.state import WorkerRecord
from polymorph.events.types import RequestStarted, StepsCounted, TokensCounted, TrafficShapeObserved

pytestmark = [pytest.mark.asyncio, pytest.mark.real]


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        pool="p",
        model="org/model",
        url="http://127.0.0.1:1",
        state="ready",
        generation=1,
        revision="empty",
        hardware="h",
        started_at=now(),
    )


async def put_worker(bus) -> None:
    await bus.kv_put(topology.WORKERS, "w1", record("w1").model_dump_json().encode())


async def ask(bus, request_id: str, pool: str = "p") -> Placed | Unplaceable:
    answer = PLACEMENT.validate_json(
        await bus.request(PlaceRequest(pool=pool, request_id=request_id), timeout_s=2)
    )
    assert not isinstance(answer, TrafficShapeObserved)
    return answer


async def test_the_first_answer_of_a_fresh_router_knows_the_workers(bus_factory, routing):
    worker, gateway = await bus_factory("worker"), await bus_factory("gateway")
    await put_worker(worker)
    async with routing(await bus_factory("router"), instance="a", window_s=0.5):
        assert (await ask(gateway, "r")).worker_id == "w1"
        assert (await ask(gateway, "r", pool="other")).cause == "no-worker"
        await worker.kv_delete(topology.WORKERS, "w1")
        async with asyncio.timeout(5):
            while not isinstance(await ask(gateway, "r"), Unplaceable):
                await asyncio.sleep(0.05)


async def test_of_two_routers_one_publishes_and_the_other_takes_over(bus_factory, routing):
    worker, gateway, compiler = [await bus_factory(role) for role in ("worker", "gateway", "compiler")]
    await put_worker(worker)
    windows: list[TrafficShapeObserved] = []
    sources: list[str] = []

    async def watch() -> None:
        async for entry in compiler.events(subjects=TrafficShapeObserved.wildcard(), after="0-0"):
            if isinstance(entry, StreamRecord):
                windows.append(TrafficShapeObserved.model_validate(entry.envelope.data))
                sources.append(entry.envelope.source)

    async def traffic() -> None:
        number = 0
        while True:
            number += 1
            await gateway.tell(
                RequestStarted(
                    pool="p",
                    request_id=str(number),
                    worker_id="w1",
                    program_id=None,
                    placed_by="router",
                    at=now(),
                )
            )
            await worker.tell(
                TokensCounted(
                    pool="p",
                    worker_id="w1",
                    request_id=str(number),
                    prompt_tokens=100,
                    cached_tokens=0,
                    output_tokens=10,
                    ttft_s=0.1,
                    tpot_s=0.01,
                    at=now(),
                )
            )
            await worker.tell(
                StepsCounted(
                    pool="p",
                    worker_id="w1",
                    at=now(),
                    interval_s=0.05,
                    steps=1,
                    step_s=0.04,
                    tokens=8,
                    output_tokens=8,
                    running=8,
                    waiting=0,
                    kv_used=0.1,
                    step_s_by_m={"8": 0.04},
                )
            )
            await asyncio.sleep(0.05)

    async def more(count: int) -> None:
        goal = len(windows) + count
        async with asyncio.timeout(20):
            while len(windows) < goal:
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(watch()), asyncio.create_task(traffic())]
    async with routing(await bus_factory("router", "/polymorph/router/b"), instance="b", window_s=0.5):
        async with routing(await bus_factory("router", "/polymorph/router/a"), instance="a", window_s=0.5):
            await more(4)
        await more(4)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    starts = [window.window_start for window in windows]
    assert len(set(starts)) == len(starts), "no window twice"
    seen = windows[-1]
    assert (seen.pool, seen.model, seen.workers) == ("p", "org/model", 1)
    assert seen.window_s == pytest.approx(0.5, abs=0.01)
    assert seen.shape.prompt_tokens.p50 == 100
    assert seen.shape.tokens_per_step == {"8": 1.0}
    assert set(sources) == {"/polymorph/router/b"}


async def test_the_lease_passes_on_when_its_holder_ends(bus_factory, routing):
    from polymorph.router.adapters.lease import Lease

    one, other = [Lease(await bus_factory("router"), "test", name) for name in ("one", "other")]
    assert await one.renew()
    assert not await other.renew()
    assert await one.renew()
    await one.give_up()
    assert await other.renew()
    assert not await one.renew()
