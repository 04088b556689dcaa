"""An error that nobody foresaw ends one try of a worker's task; the task, the bus and the worker go on."""

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.doubles.one_layer import Seated

from polymorph.bus import topology
from polymorph.bus.errors import BusError, Fatal, Retryable
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import KeyValue
from polymorph.config.clock import SystemClock
from polymorph.engine.loading.admission import Fence
from polymorph.events.requests import LeaseHost
from polymorph.events.state import DesiredState, WorkerRecord
from polymorph.kernels.signing import Trust
from polymorph.worker import rolling, tries
from polymorph.worker.control_plane import Serving
from polymorph.worker.domain.lease import HostLease
from polymorph.worker.faults import Fault, Faults
from polymorph.worker.hearing import Hearing
from polymorph.worker.leasing import HostLeasing
from polymorph.worker.registry import Registry
from polymorph.worker.reports import Reports
from polymorph.worker.tries import again_and_again, tried

A = "a" * 64
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
CLOCK = SystemClock()
UNFORESEEN = KeyError("nobody foresaw it")


class Noted(SystemClock):
    """Sleeps not at all, and takes note; a try takes `lasts_s`."""

    def __init__(self, lasts_s: float = 0.0) -> None:
        self.slept: list[float] = []
        self._now, self._lasts_s = 0.0, lasts_s

    def monotonic(self) -> float:
        self._now += self._lasts_s
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


class Once:
    """Fails as nobody foresaw with the first call of each name."""

    def __init__(self) -> None:
        self.failed: set[str] = set()

    def may(self, name: str) -> None:
        if name not in self.failed:
            self.failed.add(name)
            raise UNFORESEEN


class FaultyBus(InMemoryBus):
    def __init__(self) -> None:
        super().__init__("/test", CLOCK, MemoryWorld())
        self.once = Once()

    async def publish(self, message: Any) -> int:
        self.once.may("publish")
        return await super().publish(message)

    async def kv_keys(self, bucket: str) -> list[str]:
        self.once.may("keys")
        return await super().kv_keys(bucket)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        self.once.may("update")
        return await super().kv_update(bucket, key, value, revision)

    async def kv_watch(self, bucket: str, key: str = ">") -> AsyncIterator[KeyValue]:
        self.once.may("watch")
        async for entry in super().kv_watch(bucket, key):
            yield entry


async def until(done: Callable[[], bool], work: "Coroutine[Any, Any, None]") -> None:
    """Runs `work` until then; raises what it ends with before."""
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(10):
        while not done():
            if task.done():
                await task
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> FaultyBus:
    monkeypatch.setattr(tries, "_AGAIN_S", (0.01,))
    return FaultyBus()


async def _fails(*errors: Exception) -> Callable[[], Coroutine[Any, Any, None]]:
    left = list(errors)

    async def work() -> None:
        if left:
            raise left.pop(0)

    return work


async def test_it_goes_on_later_and_later_and_then_as_usual() -> None:
    clock = Noted()
    work = await _fails(*[UNFORESEEN, Retryable("away")] * 3)
    await until(lambda: len(clock.slept) > 7, again_and_again("a task", work, clock, 0.25))
    assert clock.slept[:8] == [0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 0.25, 0.25]


async def test_a_try_that_lasted_is_no_failure_in_a_row() -> None:
    clock = Noted(lasts_s=6.0)
    await until(
        lambda: len(clock.slept) > 3,
        again_and_again("a watch", await _fails(*[UNFORESEEN] * 99), clock, 0.25),
    )
    assert set(clock.slept) == {0.5}


async def test_what_nobody_foresaw_is_told_with_its_traceback_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def counted() -> float:
        name = "polymorph_worker_unforeseen_errors_total"
        return REGISTRY.get_sample_value(name, {"task": "a counted task"}) or 0.0

    assert not await tried("a counted task", await _fails(BusError("away")))
    assert counted() == 0
    assert not await tried("a counted task", await _fails(UNFORESEEN))
    assert counted() == 1
    assert "Traceback" in caplog.text
    assert "a counted task failed as nobody had foreseen" in caplog.text
    assert await tried("a counted task", await _fails())


async def test_what_ends_the_worker_passes() -> None:
    with pytest.raises(Fatal, match="the end"):
        await again_and_again("a task", await _fails(UNFORESEEN, Fatal("the end")), Noted(), 0.0)


@pytest.mark.parametrize("error", [None, UNFORESEEN])
async def test_a_task_that_is_cancelled_ends_though_it_cleans_up_with_an_error(error: Any) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            if error is not None:
                raise error

    task = asyncio.create_task(again_and_again("a task", work, Noted(), 0.0))
    await begun.wait()
    task.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait({task})
    assert task.cancelled() if error is None else task.exception() is error


async def test_the_watch_on_the_desired_state_outlives_it(bus: FaultyBus) -> None:
    reports = Reports("p", "w", CLOCK)
    hearing = Hearing("p", Fence("p", Trust()), reports, asyncio.Event(), CLOCK)
    await bus.kv_put(topology.DESIRED, "p", DesiredState(pool="p", generation=0).model_dump_json().encode())
    await until(lambda: hearing.desired is not None, hearing.watch(bus))
    assert bus.once.failed == {"watch"}


async def test_faults_and_quarantines_outlive_it(tmp_path: Path, bus: FaultyBus) -> None:
    faults = Faults(tmp_path / "faults.json", "p", "w", CLOCK)
    fields: dict[str, Any] = {"definition": "gemm", "how": "crash", "evidence": "", "revision": "r"}
    faults.add(Fault(artifact=A, generation=1, at=NOW, **fields))
    await until(lambda: faults._kept.faults[0].told, faults.tell(bus))
    await bus.kv_put(topology.QUARANTINE, A, b"{}")
    await until(lambda: faults._kept.faults[0].held, faults.watch(bus))
    await bus.kv_delete(topology.QUARANTINE, A)
    await until(lambda: not faults.banned([A]), faults.reconcile(bus))
    assert bus.once.failed == {"publish", "watch", "keys"}


async def test_the_entry_in_the_registry_outlives_it(bus: FaultyBus) -> None:
    def record() -> WorkerRecord:
        bus.once.may("record")
        fields = {"pool": "p", "model": "m", "url": "http://h:1", "hardware": "h", "started_at": NOW}
        state = {"state": "ready", "generation": 0, "revision": "empty", "slots": (), "max_num_seqs": 1}
        return WorkerRecord.model_validate({"worker_id": "w", **fields, **state})

    keys = bus.world.bucket(topology.WORKERS)
    await until(lambda: bool(keys.entries(CLOCK.monotonic())), Registry(record, CLOCK).keep(bus))
    assert bus.once.failed == {"record"}


async def test_the_lease_of_a_restart_outlives_it(bus: FaultyBus, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leaving(yes: bool) -> None:
        del yes

    monkeypatch.setattr(rolling, "_RENEW_S", 0.01)
    turns = rolling.Rolling("p", "w", CLOCK, lambda: bus, leaving, 1.0)
    taken = await bus.kv_create(topology.RESTARTS, "p", b"w")
    keys = bus.world.bucket(topology.RESTARTS)
    await until(lambda: keys.entries(CLOCK.monotonic())["p"].revision > taken, turns._renewed(taken))
    assert bus.once.failed == {"update"}


async def test_what_is_told_of_requests_and_steps_outlives_it(bus: FaultyBus) -> None:
    told: set[str] = set()

    async def flush(bus: FaultyBus) -> None:
        bus.once.may("flush")
        told.add("flush")

    async def report(bus: FaultyBus, counters: object) -> None:
        bus.once.may("report")
        told.add("report")

    nobody: Any = None
    telling: Any = SimpleNamespace(flush=flush, report=report, idle=True)
    seats: Any = SimpleNamespace(current=None)
    serving = Serving(seats, nobody, nobody, nobody, telling, nobody, tuned=False)
    await until(lambda: told == {"flush", "report"}, serving.run(bus, "w", CLOCK))
    assert bus.once.failed == {"flush", "report"}


class Engine:
    """Pauses and goes on, but for errors that come first."""

    alive = True

    def __init__(self, **errors: int) -> None:
        self.errors = errors
        self.paused = False

    def _may(self, name: str) -> None:
        self.errors[name] = self.errors.get(name, 0) - 1
        if self.errors[name] >= 0:
            raise UNFORESEEN

    async def pause(self) -> None:
        self.paused = True
        self._may("pause")

    async def resume(self) -> None:
        self._may("resume")
        self.paused = False


def _leasing(engine: Engine) -> HostLeasing:
    return HostLeasing("p", "w", Seated(engine), CLOCK, lambda: False)


def _lease(*, release: bool = False) -> LeaseHost:
    return LeaseHost(worker_id="w", lease_id="a", burst_s=0.3, release=release)


async def test_the_telling_of_leases_outlives_it(bus: FaultyBus) -> None:
    leasing = _leasing(Engine())
    leasing._untold.append(HostLease("a"))
    await until(lambda: not leasing._untold, leasing.watch(bus))
    assert bus.once.failed == {"publish"}


async def test_an_engine_goes_on_after_a_lease_whatever_it_takes() -> None:
    engine = Engine(resume=3)
    leasing = _leasing(engine)
    async with asyncio.timeout(10):
        for _ in range(2):
            assert (await leasing.ask(_lease())).granted
            await leasing.ask(_lease(release=True))
            assert not engine.paused


async def test_a_lease_that_begins_with_an_error_is_refused_and_the_next_is_granted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(pause=1)
    leasing = _leasing(engine)
    async with asyncio.timeout(10):
        assert not (await leasing.ask(_lease())).granted
        assert not engine.paused
        assert (await leasing.ask(_lease())).granted
        await leasing.ask(_lease(release=True))
    assert "a lease of the host failed as nobody had foreseen" in caplog.text
