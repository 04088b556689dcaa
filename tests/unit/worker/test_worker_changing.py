"""Settings brought into force on engines that answer as vLLM's do, without vLLM."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus import topology
from polymorph.bus.errors import NotFound, Retryable
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.config.clock import SystemClock
from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import WorkerRecord
from polymorph.events.values import EngineSettings, Revision, Way
from polymorph.worker.adapters import memory
from polymorph.worker.adapters.scheduler import InForce
from polymorph.worker.changing import Changing
from polymorph.worker.domain.change import GIB
from polymorph.worker.launching import settings_of
from polymorph.worker.rolling import Rolling
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.switchboard import Switchboard

BASE = EngineLaunch(Path("m"), max_num_seqs=8, envelope_num_seqs=64, envelope_batched_tokens=1024)
KNOBS = ("max_num_seqs", "max_num_batched_tokens", "scheduling_policy")


class Scheduler:
    def __init__(self, launch: EngineLaunch) -> None:
        self.settings = {name: getattr(launch, name) for name in KNOBS}
        self.config = {"block_size": launch.block_size or 16, "enforce_eager": launch.enforce_eager}
        self.step = 1
        self.deaf = False

    async def known(self) -> InForce:
        return await self.read()

    async def read(self) -> InForce:
        envelope = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
        return InForce(dict(self.settings), envelope, {}, self.config, self.step, 0.001)

    async def set(self, changes: dict[str, Any]) -> InForce:
        if not self.deaf:
            self.settings.update(changes)
        return await self.read()


class Engine:
    alive = True
    processes: list[int] = []

    def __init__(self, launch: EngineLaunch) -> None:
        self.scheduler = Scheduler(launch)
        self.kernels = 0

    async def exercise(self, m: int) -> None:
        self.scheduler.step += m


class Worker:
    """Seats, and turns over a bus."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 100 * GIB, hold_s: float = 5.0) -> None:
        monkeypatch.setattr("polymorph.worker.changing.on_cpu", lambda: True)
        monkeypatch.setattr(memory, "available", lambda: room)
        self.world = MemoryWorld()
        self.bus = InMemoryBus("/polymorph/test/0", SystemClock(), self.world)
        self.board = Switchboard(hold_s)
        self.launches: list[EngineLaunch] = []
        self.fails = ""
        self.states: list[bool] = []
        self.seats = Seats(self.board, self._open, self._close, SystemClock())
        rolling = Rolling("p", "w", SystemClock(), lambda: self.bus, self._leaving, hold_s)
        self.changing = Changing(self.seats, BASE, rolling)

    async def start(self) -> Seat:
        seat = await self.seats.open(BASE)
        self.seats.seat(seat)
        return seat

    async def _open(self, launch: EngineLaunch) -> Seat:
        if self.fails and launch.block_size is not None:
            raise EngineNotStarted(self.fails)
        self.launches.append(launch)
        return Seat(Engine(launch), None, launch, None)  # type: ignore[arg-type]

    async def _close(self, seat: Seat) -> None:
        seat.engine.alive = False  # type: ignore[misc]

    async def _leaving(self, yes: bool) -> None:
        self.states.append(yes)

    async def plan(self, **named: Any) -> Any:
        return await self.changing.plan(Revision(revision="r", engine=EngineSettings(**named)), 3)


async def nothing(engine: Any) -> None:
    engine.kernels += 1


async def test_a_live_change_is_read_back_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    seat = await worker.start()
    receipt = await worker.changing.live(await worker.plan(max_num_seqs=4, scheduling_policy="priority"))
    assert (receipt.way, receipt.settings.max_num_seqs) == (Way.LIVE, 4)
    assert receipt.stood_s == 0.001
    assert seat.engine.scheduler.step == 2
    assert seat.launch.max_num_seqs == 4
    assert (await worker.plan(max_num_seqs=4, scheduling_policy="priority")).way is Way.NOTHING
    back = await worker.changing.back_to(Revision(revision="empty"))
    assert back is not None
    assert back.settings.max_num_seqs == 8
    assert seat.engine.scheduler.settings["scheduling_policy"] == "fcfs"
    assert settings_of(seat.launch) == settings_of(BASE)


async def test_how_a_revision_is_launched_is_its_own_settings_over_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch)
    await worker.start()
    other = Revision(revision="r", engine=EngineSettings(block_size=32), slots=("linear",))
    await worker.changing.beside(await worker.changing.plan(other, 1), "r", nothing)
    live = EngineSettings(block_size=32, max_num_seqs=4)
    await worker.changing.live(await worker.changing.plan(other.model_copy(update={"engine": live}), 2))
    assert worker.changing.launch_of(Revision(revision="empty")) == BASE
    assert worker.changing.launch_of(other) == dataclasses.replace(BASE, block_size=32, slots=("linear",))


async def test_what_needs_another_engine_is_not_set_live_on_the_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch)
    await worker.start()
    await worker.changing.beside(await worker.plan(block_size=32), "r", nothing)
    await worker.seats.retired()
    assert await worker.changing.back_to(Revision(revision="empty")) is None
    now = await worker.changing.now()
    assert now is not None
    assert now.settings.block_size == 32
    assert len(worker.launches) == 2


async def test_a_new_engine_is_read_back_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    seat = await worker.seats.open(BASE)
    receipt = await worker.changing.read_back(seat.engine, Revision(revision="empty"))
    assert (receipt.way, receipt.settings.max_num_seqs) == (Way.NOTHING, 8)
    for other in ({"max_num_seqs": 4}, {"block_size": 32}):
        revision = Revision(revision="r", engine=EngineSettings(**other))
        with pytest.raises(Refused, match="launched otherwise"):
            await worker.changing.read_back(seat.engine, revision)
    with pytest.raises(Refused, match="launched otherwise"):
        await worker.changing.read_back(seat.engine, Revision(revision="r", slots=("linear",)))
    seat.engine.scheduler.settings["max_num_seqs"] = 2
    with pytest.raises(Refused, match="says 2"):
        await worker.changing.read_back(seat.engine, Revision(revision="empty"))


async def test_memory_is_counted_only_where_a_second_engine_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, counted = Worker(monkeypatch), []
    await worker.start()
    monkeypatch.setattr(memory, "held_by", lambda processes: counted.append(1) or 0)
    assert (await worker.plan()).way is Way.NOTHING
    assert (await worker.plan(max_num_seqs=4)).way is Way.LIVE
    assert not counted
    assert (await worker.plan(block_size=32)).way is Way.ENGINE
    assert counted


async def test_an_engine_that_does_not_do_as_it_says_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    seat = await worker.start()
    seat.engine.scheduler.deaf = True
    with pytest.raises(Refused, match="was given max_num_seqs=4 and says 8"):
        await worker.changing.live(await worker.plan(max_num_seqs=4))


async def test_a_new_engine_has_its_kernels_before_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    old = await worker.start()
    receipt = await worker.changing.beside(await worker.plan(block_size=32), "r", nothing)
    new = worker.seats.current
    assert new is not None
    assert new is not old
    assert (new.engine.kernels, new.revision) == (1, "r")  # type: ignore[attr-defined]
    assert (receipt.way, receipt.settings.block_size) == (Way.ENGINE, 32)
    await worker.seats.retired()
    assert not old.engine.alive
    assert (await worker.plan(block_size=32)).way is Way.NOTHING
    assert (await worker.plan()).way is Way.ENGINE


async def test_a_start_that_fails_is_a_refusal_and_the_old_engine_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch)
    old = await worker.start()
    worker.fails = "the engine does not start: no such block size"
    with pytest.raises(Refused, match="no such block size; the engine before it serves on"):
        await worker.changing.beside(await worker.plan(block_size=17), "r", nothing)
    assert worker.seats.current is old
    worker.fails = ""

    async def broken(engine: Any) -> None:
        raise Refused("its kernel crashes")

    with pytest.raises(Refused, match="crashes"):
        await worker.changing.beside(await worker.plan(block_size=32), "r", broken)
    await worker.seats.retired()
    assert (worker.seats.current, worker.seats.living) == (old, [old])


async def test_without_memory_the_engine_is_restarted_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, room=GIB)
    old = await worker.start()
    plan = await worker.plan(block_size=32)
    assert plan.way is Way.ROLLING
    assert "needs 1.5 GiB, 1.0 GiB are available" in plan.why
    await worker.bus.kv_put(topology.RESTARTS, "p", b"another")
    restarting = asyncio.create_task(worker.changing.restart(plan))
    await asyncio.sleep(0.05)
    assert worker.seats.current is old
    assert worker.states == []
    await worker.bus.kv_delete(topology.RESTARTS, "p")
    receipt = await restarting
    assert (receipt.way, receipt.settings.block_size) == (Way.ROLLING, 32)
    assert receipt.stood_s > 0
    assert worker.states == [True, False]
    assert not worker.board.held
    with pytest.raises(NotFound):
        await worker.bus.kv_get(topology.RESTARTS, "p")


async def test_a_restart_that_fails_starts_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, room=GIB)
    await worker.start()
    worker.fails = "no"
    with pytest.raises(Refused, match="no; the engine runs as before"):
        await worker.changing.restart(await worker.plan(block_size=32))
    assert worker.launches == [BASE, BASE]
    assert worker.seats.current is not None
    assert worker.seats.alive


async def test_a_record_of_another_release_is_no_worker_that_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(monkeypatch, room=GIB)
    await worker.start()
    await worker.bus.kv_put(topology.WORKERS, "newer", b'{"worker_id": "newer", "schema": 9}')
    receipt = await worker.changing.restart(await worker.plan(block_size=32))
    assert receipt.settings.block_size == 32
    assert "the record of worker newer cannot be read" in caplog.text


async def test_streams_that_take_long_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, room=GIB, hold_s=0.5)
    old = await worker.start()
    with old.serving():
        with pytest.raises(Retryable, match="waits for a quieter moment"):
            await worker.changing.restart(await worker.plan(block_size=32))
        assert worker.seats.current is old
        assert not worker.board.held
    assert worker.states == [True, False]


async def _register(worker: Worker, name: str, state: str, *, holds: bool = False) -> None:
    record = WorkerRecord(
        worker_id=name,
        pool="p",
        model="m",
        url="u",
        state=state,
        generation=0,
        revision="empty",
        hardware="h",
        started_at=SystemClock().now(),
        holds=holds,
    )
    await worker.bus.kv_put(topology.WORKERS, name, record.model_dump_json().encode())


async def test_while_another_is_without_an_engine_none_gives_its_own_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch, room=GIB)
    old = await worker.start()
    await _register(worker, "w2", "starting", holds=True)
    with pytest.raises(Retryable, match="w2 has no engine at this moment"):
        await worker.changing.restart(await worker.plan(block_size=32))
    assert worker.seats.current is old
    assert worker.states == []
    await _register(worker, "w2", "starting")  # one that never served is not waited for
    assert (await worker.changing.restart(await worker.plan(block_size=32))).way is Way.ROLLING


async def test_with_others_there_newcomers_go_elsewhere_before_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polymorph.worker.rolling.HEARTBEAT_S", 0.01)
    worker = Worker(monkeypatch, room=GIB, hold_s=0.5)
    old = await worker.start()
    await _register(worker, "w2", "ready")
    with old.serving():
        restarting = asyncio.create_task(worker.changing.restart(await worker.plan(block_size=32)))
        async with asyncio.timeout(5):
            while worker.states != [True]:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not worker.board.held
        assert worker.seats.current is old
    assert (await restarting).way is Way.ROLLING


async def test_requests_that_were_handed_over_are_waited_for_as_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polymorph.worker.rolling._BETWEEN_TRIES_S", 0.0)
    worker = Worker(monkeypatch, room=GIB, hold_s=0.5)
    dead = await worker.start()
    with dead.serving():
        dead.engine.alive = False  # type: ignore[misc]
        heir = await worker.start()
        with pytest.raises(Retryable, match="1 requests did not end"):
            async with worker.changing.settled():
                raise AssertionError("a request runs in the engine")
        with pytest.raises(Retryable, match="1 requests did not end"):
            await worker.changing.restart(await worker.plan(block_size=32))
        assert heir.engine.alive
    async with worker.changing.settled():
        assert worker.board.held


async def test_nobody_waits_for_the_seat_of_an_engine_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymorph.worker.rolling.HEARTBEAT_S", 0.01)
    worker = Worker(monkeypatch, room=GIB)
    dead = await worker.start()
    await _register(worker, "w2", "ready")

    async def settles() -> None:
        async with worker.changing.settled():
            raise AssertionError("the engine that was to be settled is gone")

    with dead.serving():
        settling = asyncio.create_task(settles())
        async with asyncio.timeout(5):
            while worker.states != [True]:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        worker.seats.vacate()
        with pytest.raises(Retryable, match="takes no requests any more"):
            async with asyncio.timeout(5):
                await settling
    assert worker.states == [True, False]
    with pytest.raises(NotFound):
        await worker.bus.kv_get(topology.RESTARTS, "p")


async def test_a_bus_that_is_away_leaves_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, room=GIB)
    old = await worker.start()
    worker.changing._rolling._bus = lambda: None
    with pytest.raises(Retryable, match="over the bus"):
        await worker.changing.restart(await worker.plan(block_size=32))
    assert worker.seats.current is old


def test_memory_is_that_of_all_processes_below(tmp_path: Path) -> None:
    for pid, children, pss in ((1, "2 3", 10), (2, "", 20), (3, "4", 30), (4, "", 40), (9, "", 500)):
        folder = tmp_path / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        (folder / "task" / str(pid) / "children").write_text(children)
        (folder / "smaps_rollup").write_text(f"Rss: 999 kB\nPss: {pss} kB\n")
    assert memory.held_by([1], tmp_path) == 100 * 1024
    assert memory.held_by([77], tmp_path) == 0


def test_available_memory_keeps_to_the_containers_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1000 kB\n")
    assert memory.available(tmp_path, tmp_path / "none") == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert memory.available(tmp_path, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("400000\n")
    assert memory.available(tmp_path, tmp_path) == 150_000


def test_a_launch_tells_every_setting() -> None:
    assert dataclasses.replace(BASE, **settings_of(BASE)) == BASE


async def test_the_memory_of_an_engine_that_drains_will_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, room=int(2.2 * GIB))
    monkeypatch.setattr(Engine, "processes", [1])
    monkeypatch.setattr(memory, "held_by", lambda processes: GIB * len(list(processes)))
    old = await worker.start()
    assert (await worker.plan(block_size=64)).way is Way.ROLLING
    with old.serving():
        worker.seats.seat(await worker.seats.open(BASE))
        worker.seats.retire(old)
        assert (await worker.plan(block_size=64)).way is Way.ENGINE
    await worker.seats.retired()
