"""Bursts on a bus in memory, with workers that grant, refuse, or are away."""

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import REGISTRY

from polymorph.bus import topology
from polymorph.bus.memory import InMemoryBus
from polymorph.config.clock import SystemClock
from polymorph.evaluator.adapters.lease import HostLease, workers_here
from polymorph.evaluator.gates.host import HostBusy
from polymorph.events.requests import LeaseAnswer, LeaseHost
from polymorph.events.state import WorkerRecord

STOLEN = "polymorph_evaluator_stolen_seconds_total"


class Worker:
    """Answers leases as a worker does; remembers what it was asked."""

    def __init__(self, *, refuses: int = 0) -> None:
        self.asked: list[bool] = []
        self._refuses = refuses

    async def respond(self, body: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        request = LeaseHost.model_validate_json(body)
        assert request.burst_s <= LeaseHost.MAX_BURST_S
        self.asked.append(request.release)
        if request.release:
            answer = LeaseAnswer(granted=False, reason="released", paused_s=0.125)
        elif self._refuses:
            self._refuses -= 1
            answer = LeaseAnswer(granted=False, reason="busy")
        else:
            answer = LeaseAnswer(granted=True)
        await reply(answer.model_dump_json().encode())


async def _register(bus: InMemoryBus, worker_id: str, url: str) -> None:
    record = WorkerRecord(
        worker_id=worker_id,
        pool="p",
        model="m",
        url=url,
        state="ready",
        generation=0,
        revision="empty",
        hardware="h",
        started_at=dt.datetime.now(dt.UTC),
    )
    await bus.kv_put(topology.WORKERS, worker_id, record.model_dump_json().encode())


@pytest.fixture
def bus() -> InMemoryBus:
    return InMemoryBus("/polymorph/evaluator/test", SystemClock())


def _lease(bus: InMemoryBus, workers: str, wait_s: float = 10.0) -> HostLease:
    return HostLease(bus, asyncio.get_running_loop(), workers, wait_s)


async def test_auto_finds_the_workers_of_this_host_alone(bus) -> None:
    await _register(bus, "near", "http://127.0.0.1:8001")
    await _register(bus, "far", "http://10.1.2.3:8001")
    assert await workers_here(bus, "auto") == ["near"]
    assert await workers_here(bus, "far,gone") == ["far"]


async def test_a_burst_is_asked_once_and_what_it_took_is_counted(bus) -> None:
    worker = Worker()
    await _register(bus, "w", "http://127.0.0.1:8001")
    await bus.respond(LeaseHost, "w", worker.respond)
    lease = _lease(bus, "auto")

    def measure() -> None:
        lease.ensure(0.01)
        lease.ensure(0.01)
        lease.release()

    before = REGISTRY.get_sample_value(STOLEN) or 0.0
    await asyncio.to_thread(measure)
    assert worker.asked == [False, True]
    assert (lease.bursts, lease.stolen_s) == (1, 0.125)
    assert REGISTRY.get_sample_value(STOLEN) == before + 0.125


async def test_what_does_not_fit_in_the_rest_of_a_burst_waits_for_the_next(bus) -> None:
    worker = Worker()
    await _register(bus, "w", "http://127.0.0.1:8001")
    await bus.respond(LeaseHost, "w", worker.respond)
    lease = _lease(bus, "w")

    def measure() -> None:
        lease.ensure(0.01)
        lease._until = 0.0  # the burst is over
        lease.ensure(0.2)
        lease.release()

    await asyncio.to_thread(measure)
    assert worker.asked == [False, True, False, True]
    assert lease.stolen_s == 0.25


async def test_a_refusal_is_asked_again_and_gives_the_others_back(bus) -> None:
    willing, busy = Worker(), Worker(refuses=1)
    for name, worker in (("a", willing), ("b", busy)):
        await _register(bus, name, "http://127.0.0.1:8001")
        await bus.respond(LeaseHost, name, worker.respond)
    lease = _lease(bus, "auto")
    await asyncio.to_thread(lease.ensure, 0.01)
    assert willing.asked == [False, True, False]
    assert busy.asked == [False, False]


async def test_a_worker_that_always_refuses_leaves_no_verdict(bus) -> None:
    worker = Worker(refuses=1000)
    await _register(bus, "w", "http://127.0.0.1:8001")
    await bus.respond(LeaseHost, "w", worker.respond)
    with pytest.raises(HostBusy, match="no burst within"):
        await asyncio.to_thread(_lease(bus, "auto", wait_s=0.4).ensure, 0.01)


async def test_without_workers_the_host_is_free(bus) -> None:
    lease = _lease(bus, "auto")
    await asyncio.to_thread(lease.ensure, 0.01)
    await asyncio.to_thread(lease.release)
    assert lease.stolen_s == 0


async def test_a_silent_worker_is_busy_not_away(bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in a long step cannot answer, and its step uses every core: timing beside it would be worthless."""
    monkeypatch.setattr("polymorph.evaluator.adapters.lease._ANSWER_S", 0.3)
    monkeypatch.setattr("polymorph.evaluator.adapters.lease._NOBODY_S", 0.1)

    async def silent(body: bytes, reply: Callable[[bytes], Awaitable[None]]) -> None:
        del body, reply
        await asyncio.sleep(5)

    await _register(bus, "w", "http://127.0.0.1:8001")
    await bus.respond(LeaseHost, "w", silent)
    lease = _lease(bus, "auto", wait_s=0.5)
    with pytest.raises(HostBusy):
        await asyncio.to_thread(lease.ensure, 0.01)
