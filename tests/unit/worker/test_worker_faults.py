"""What crashed here: kept, told once, and what the fleet's quarantine adds."""

import asyncio
import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus import topology
from polymorph.bus.errors import Poison, Unavailable
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.config.clock import SystemClock
from polymorph.events.state import Quarantine
from polymorph.events.types import WorkerKernelFaulted
from polymorph.events.values import KernelBinding, Numerics, Revision
from polymorph.worker.faults import Fault, Faults

A, B = "a" * 64, "b" * 64
NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def fault(artifact: str = A, **changes: Any) -> Fault:
    fields: dict[str, Any] = {
        "artifact": artifact,
        "definition": "gemm",
        "how": "crash",
        "evidence": "It ended inside call 3.",
        "revision": "r2",
        "generation": 2,
        "at": NOW,
    }
    return Fault(**{**fields, **changes})


def faults(folder: Path) -> Faults:
    return Faults(folder / "data" / "faults.json", "chat", "w1", SystemClock())


@pytest.fixture
def bus() -> InMemoryBus:
    return InMemoryBus("/test", SystemClock(), MemoryWorld())


class Away:
    """A bus that takes nothing the first times."""

    def __init__(self, fails: int) -> None:
        self.fails = fails
        self.told: list[WorkerKernelFaulted] = []

    async def publish(self, event: WorkerKernelFaulted) -> int:
        if self.fails:
            self.fails -= 1
            raise Unavailable("nobody answers")
        self.told.append(event)
        return 1


async def run_until(work: Any, done: Any) -> None:
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_it_is_kept_over_a_restart_of_the_worker(tmp_path: Path) -> None:
    first = faults(tmp_path)
    assert not first.banned([A])
    first.add(fault())
    first.leave("r9", "engines died under it")
    again = faults(tmp_path)
    assert again.banned([A, B])
    assert not again.banned([B])
    assert again.left(Revision(revision="r9")) == "engines died under it"
    assert again.left(Revision(revision="r2")) is None


@pytest.mark.parametrize("content", ["", "{", '{"faults": 3}', "\udcff"])
def test_a_file_of_no_use_is_told_and_costs_no_start(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "data" / "faults.json"
    path.parent.mkdir()
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert faults(tmp_path).artifacts == frozenset()
    assert "is of no use" in caplog.text


def test_a_disk_that_takes_nothing_does_not_keep_the_kernel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").write_text("in the way")
    made = Faults(tmp_path / "data" / "faults.json", "chat", "w1", SystemClock())
    made.add(fault())
    assert made.banned([A])
    assert "cannot be kept" in caplog.text


async def test_each_is_told_once_when_there_is_a_bus(tmp_path: Path) -> None:
    made = faults(tmp_path)
    made.add(fault())
    made.add(fault(B, how="hang"))
    away: Any = Away(fails=2)
    await run_until(made.tell(away), lambda: len(away.told) == 2)
    assert [(event.artifact, event.how, event.worker_id) for event in away.told] == [
        (A, "crash", "w1"),
        (B, "hang", "w1"),
    ]
    await asyncio.sleep(0.3)
    later: Any = Away(fails=0)
    restarted = faults(tmp_path)
    restarted.add(fault("c" * 64))
    await run_until(restarted.tell(later), lambda: later.told)
    assert [event.artifact for event in later.told] == ["c" * 64]


async def test_one_that_can_never_be_told_keeps_no_other_from_being(tmp_path: Path) -> None:
    class Picky(Away):
        async def publish(self, event: WorkerKernelFaulted) -> int:
            if event.artifact == A:
                raise Poison("larger than the server's payload limit")
            return await super().publish(event)

    made = faults(tmp_path)
    made.add(fault(A))
    made.add(fault(B))
    picky: Any = Picky(fails=0)
    await run_until(made.tell(picky), lambda: picky.told)
    assert [event.artifact for event in picky.told] == [B]
    assert made.banned([A])


async def test_the_fleets_quarantine_is_heard_and_its_end_too(tmp_path: Path, bus: InMemoryBus) -> None:
    made = faults(tmp_path)
    news: list[frozenset[str]] = []
    made.on_news = lambda: news.append(made.artifacts)
    entry = Quarantine(artifact=A, reason="it hung elsewhere", since=NOW)
    await bus.kv_put(topology.QUARANTINE, A, entry.model_dump_json().encode())
    await run_until(made.watch(bus), lambda: made.banned([A]))
    assert news == [frozenset({A})]
    await bus.kv_put(topology.QUARANTINE, B, b"stop it")
    await run_until(made.watch(bus), lambda: made.banned([B]))

    async def lift() -> None:
        await asyncio.sleep(0.05)
        await bus.kv_delete(topology.QUARANTINE, A)

    lifting = asyncio.create_task(lift())
    await run_until(made.watch(bus), lambda: not made.banned([A]))
    await lifting


async def test_lifting_it_lifts_what_crashed_here_once_that_was_told(
    tmp_path: Path, bus: InMemoryBus
) -> None:
    made = faults(tmp_path)
    made.add(fault(told=True))
    made.add(fault(B))
    for artifact in (A, B):
        await bus.kv_put(topology.QUARANTINE, artifact, b"{}")

    async def lift() -> None:
        await asyncio.sleep(0.05)
        for artifact in (A, B):
            await bus.kv_delete(topology.QUARANTINE, artifact)

    lifting = asyncio.create_task(lift())
    await run_until(made.watch(bus), lambda: made.artifacts == {B})
    await lifting
    assert faults(tmp_path).artifacts == {B}


def test_a_quarantine_with_an_end_ends(tmp_path: Path) -> None:
    made = faults(tmp_path)
    over = Quarantine(artifact=A, reason="for a while", since=NOW, until=NOW + dt.timedelta(hours=1))
    made._heard[A] = over
    assert not made.banned([A])
    made._heard[A] = over.model_copy(update={"until": dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)})
    assert made.banned([A])


def revision(*artifacts: str) -> Revision:
    kernels = tuple(
        KernelBinding(
            definition="gemm_n8_k8_f32", min_m=1, max_m=8, manifest="c" * 64, artifact=artifact,
            numerics=Numerics.BITWISE,
        )
        for artifact in artifacts
    )  # fmt: skip
    return Revision(revision="-".join(artifacts)[:60] or "empty", kernels=kernels)


async def _down_while_lifted(folder: Path, bus: InMemoryBus) -> Faults:
    """Of a worker that told its fault, saw the quarantine, and was down when that was lifted."""
    before = faults(folder)
    before.add(fault())
    await run_until(before.tell(bus), lambda: before._kept.faults[0].told)
    await bus.kv_put(topology.QUARANTINE, A, b"{}")
    await run_until(before.watch(bus), lambda: faults(folder)._kept.faults[0].held)
    await bus.kv_delete(topology.QUARANTINE, A)
    return faults(folder)


async def test_one_that_was_lifted_while_the_worker_was_down_is_lifted_here_too(
    tmp_path: Path, bus: InMemoryBus
) -> None:
    made = await _down_while_lifted(tmp_path, bus)
    news: list[frozenset[str]] = []
    made.on_news = lambda: news.append(made.artifacts)
    assert made.banned([A])  # until there is a bus
    await run_until(made.reconcile(bus), lambda: news)
    assert news == [frozenset()]
    assert faults(tmp_path).artifacts == frozenset()


async def test_a_revision_that_is_tried_before_that_is_known_is_not_refused(
    tmp_path: Path, bus: InMemoryBus
) -> None:
    made = await _down_while_lifted(tmp_path, bus)
    assert await made.against(bus, revision(A), revision()) == set()
    assert faults(tmp_path).artifacts == frozenset()


async def test_one_that_was_lifted_while_the_bus_was_away_is_lifted_with_the_next(
    tmp_path: Path, bus: InMemoryBus
) -> None:
    made = faults(tmp_path)
    await bus.kv_put(topology.QUARANTINE, A, b"{}")
    await run_until(made.watch(bus), lambda: made.banned([A]))
    await bus.kv_delete(topology.QUARANTINE, A)
    await made._compare(bus)
    assert made.artifacts == frozenset()


async def test_what_the_fleet_does_not_know_yet_stays(tmp_path: Path, bus: InMemoryBus) -> None:
    made = faults(tmp_path)
    made.add(fault(A))
    made.add(fault(B, told=True))  # which the compiler has not come to
    await made._compare(bus)
    assert await made.against(bus, revision(A, B), revision()) == {A, B}
    assert faults(tmp_path).artifacts == {A, B}


async def test_one_that_comes_while_the_fleet_is_asked_stays(tmp_path: Path, bus: InMemoryBus) -> None:
    made = faults(tmp_path)
    made.add(fault(told=True))
    keys, get = bus.kv_keys, bus.kv_get

    async def put_meanwhile() -> None:
        before = made._heard.get(A)
        await bus.kv_put(topology.QUARANTINE, A, b"{}")
        await run_until(made.watch(bus), lambda: made._heard.get(A) is not before)

    async def old_keys(bucket: str) -> list[str]:
        found = await keys(bucket)
        await put_meanwhile()
        return found

    async def old_entry(bucket: str, key: str) -> Any:
        try:
            return await get(bucket, key)
        finally:
            await put_meanwhile()

    bus.kv_keys = old_keys  # type: ignore[method-assign]
    await made._compare(bus)
    assert made.artifacts == {A}
    assert made._kept.faults[0].held
    await bus.kv_delete(topology.QUARANTINE, A)
    bus.kv_get = old_entry  # type: ignore[method-assign]
    assert await made.against(bus, revision(A), revision()) == {A}


async def test_a_fault_that_the_fleet_holds_ends_with_the_quarantine(
    tmp_path: Path, bus: InMemoryBus
) -> None:
    made = faults(tmp_path)
    made.add(fault(told=True))
    over = Quarantine(artifact=A, reason="for a while", since=NOW, until=NOW + dt.timedelta(hours=1))
    await bus.kv_put(topology.QUARANTINE, A, over.model_dump_json().encode())
    await run_until(made.watch(bus), lambda: A in made._heard)
    assert made.banned([A])  # it is of before: the fleet has not come to this fault
    later = over.model_copy(update={"until": dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)})
    await bus.kv_put(topology.QUARANTINE, A, later.model_dump_json().encode())
    await run_until(made.watch(bus), lambda: made._kept.faults[0].held)
    assert made.banned([A])
    made._heard[A] = over
    assert not made.banned([A])


async def test_one_that_goes_wrong_keeps_no_other_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = faults(tmp_path)
    made.add(fault(A))
    made.add(fault(B))
    event = made._event

    def unforeseen(each: Fault) -> WorkerKernelFaulted:
        if each.artifact == A and not away.told:
            raise KeyError("nobody foresaw it")
        return event(each)

    away: Any = Away(fails=0)
    monkeypatch.setattr(made, "_event", unforeseen)
    await run_until(made.tell(away), lambda: len(away.told) == 2)
    assert [each.artifact for each in away.told] == [B, A]
    assert "KeyError: 'nobody foresaw it'" in caplog.text


async def test_the_bus_is_asked_of_kernels_that_do_not_run_yet(tmp_path: Path, bus: InMemoryBus) -> None:
    for artifact in (A, B):
        held = Quarantine(artifact=artifact, reason="crash", since="2026-01-01T00:00:00Z")
        await bus.kv_put(topology.QUARANTINE, artifact, held.model_dump_json().encode())
    asked: list[str] = []
    get = bus.kv_get

    async def asking(bucket: Any, key: str) -> Any:
        asked.append(key)
        return await get(bucket, key)

    bus.kv_get = asking  # type: ignore[method-assign]
    assert await faults(tmp_path).against(bus, revision(A, B), revision(A)) == {B}
    assert asked == [B]  # of what runs the watch tells
    assert await faults(tmp_path).against(bus, revision(A), Revision(revision="empty")) == {A}
