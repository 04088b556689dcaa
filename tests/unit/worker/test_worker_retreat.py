"""Back to a revision with other settings: by the ways of any change, read back, or told as what it is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.doubles.moving_worker import BASE, MovingWorker, kernel

from polymorph.bus import topology
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import EMPTY
from polymorph.events.values import Numerics, Way
from polymorph.worker.domain.change import GIB

A, B, C = kernel("a"), kernel("b"), kernel("c")
PLENTY = 100 * GIB
Made = Callable[[int], MovingWorker]


@pytest_asyncio.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    workers: list[MovingWorker] = []

    def make(room: int) -> MovingWorker:
        workers.append(MovingWorker(tmp_path, monkeypatch, room))
        return workers[-1]

    yield make
    for worker in workers:
        await worker.end()


async def _first(worker: MovingWorker) -> None:
    await worker.start()
    await worker.desire(1, A)
    await worker.told("loaded", 1)


async def _two_revisions(worker: MovingWorker) -> None:
    await _first(worker)
    await worker.desire(2, B, block_size=32)
    assert (await worker.told("loaded", 2))["settings"]["block_size"] == 32


async def _back_at_the_first(worker: MovingWorker) -> None:
    await worker.until(lambda: worker.engines[-1].launch == BASE and worker.engines[-1].runs == (A.artifact,))
    await worker.until(lambda: worker.convergence.revision.revision == "r1")
    assert worker.seats.current is not None
    assert worker.seats.current.engine is worker.engines[-1]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("room", "way"), [(PLENTY, Way.ENGINE), (GIB, Way.ROLLING)])
async def test_a_quarantine_goes_back_to_the_engine_of_what_ran_before(
    made: Made, room: int, way: Way
) -> None:
    worker = made(room)
    await _two_revisions(worker)
    await worker.quarantine(B)
    assert "in quarantine" in (await worker.told("refused", 2))["reason"]
    await _back_at_the_first(worker)
    assert worker.engines[1].engaged == [(B.artifact,), ()]
    receipt = worker.convergence.loaded.receipt
    assert receipt is not None
    assert (receipt.way, receipt.settings.block_size) == (way, 16)
    await worker.desire(3, A, name="r1")
    loaded = await worker.told("loaded", 3)
    assert (loaded["settings"]["block_size"], loaded["kernels"]) == (16, [A.artifact])


async def test_what_was_left_for_a_quarantine_comes_again_once_that_is_lifted(made: Made) -> None:
    worker = made(PLENTY)
    await _two_revisions(worker)
    await worker.quarantine(B)
    await worker.told("refused", 2)
    await _back_at_the_first(worker)
    await worker.bus.kv_delete(topology.QUARANTINE, B.artifact)
    await worker.until(lambda: worker.convergence.revision.revision == "r2")
    assert worker.engines[-1].runs == (B.artifact,)
    assert worker.engines[-1].launch.block_size == 32


async def test_where_something_else_is_desired_the_engine_is_changed_for_that_alone(made: Made) -> None:
    worker = made(PLENTY)
    await _two_revisions(worker)
    engine = worker.engines[1]
    engage = engine.engage

    async def desires_more(bindings: object, *, keep_packed: bool = False) -> object:
        engine.engage = engage  # type: ignore[method-assign]
        await worker.desire(3, C, block_size=32)
        await worker.until(lambda: worker.heard.generation == 3)
        return await engage(bindings, keep_packed=keep_packed)  # type: ignore[arg-type]

    engine.engage = desires_more  # type: ignore[assignment, method-assign]
    await worker.quarantine(B)
    assert (await worker.told("loaded", 3))["kernels"] == [C.artifact]
    assert [each.launch.block_size for each in worker.engines] == [None, 32]
    assert engine.engaged == [(B.artifact,), (), (C.artifact,)]


async def test_where_what_is_desired_does_not_come_what_ran_before_it_does(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.domain.trying.RETRY_S", (0.01, 0.01))
    monkeypatch.setattr("polymorph.worker.domain.trying._OFF_S", 0.05)
    monkeypatch.setattr("polymorph.worker.convergence._LOOK_AGAIN_S", 0.05)
    worker = made(PLENTY)
    await _two_revisions(worker)
    worker.missing = {C.artifact}
    await worker.desire(3, C, block_size=32)
    await worker.quarantine(B)
    await worker.until(lambda: worker.convergence.revision.revision == "r1")
    assert worker.seats.current is not None
    assert worker.seats.current.launch == BASE
    worker.missing.clear()
    assert (await worker.told("loaded", 3))["kernels"] == [C.artifact]


async def test_an_engine_that_does_not_come_back_is_not_told_as_loaded(made: Made) -> None:
    worker = made(PLENTY)
    await _two_revisions(worker)
    worker.fails = lambda launch: "no memory" if launch.block_size is None else ""
    await worker.quarantine(B)
    await worker.told("refused", 2)
    await worker.until(lambda: worker.convergence.service.owed is None)
    loaded = worker.convergence.loaded
    assert (loaded.revision, loaded.bindings) == (EMPTY, ())
    assert loaded.receipt is not None
    assert loaded.receipt.settings.block_size == 32
    assert worker.seats.current is not None
    assert worker.seats.current.revision == "empty"
    await worker.desire(3)
    assert "no memory" in (await worker.told("refused", 3))["reason"]
    worker.fails = lambda launch: ""
    await worker.desire(4)
    assert (await worker.told("loaded", 4))["settings"]["block_size"] == 16


async def test_emptied_slots_are_no_launch_to_go_back_to(made: Made) -> None:
    worker = made(PLENTY)
    await worker.start()
    await worker.desire(1, A, block_size=32)
    await worker.told("loaded", 1)
    await worker.convergence.switch(empty=True, ttl_s=30.0)
    worker.seats.vacate()
    worker.faults.leave("r1", "engines died under it")
    assert worker.convergence.retreat() == BASE


async def test_what_a_new_engine_runs_after_a_death_is_read_back(made: Made) -> None:
    worker = made(PLENTY)
    await worker.start()
    await worker.desire(1, A, max_num_seqs=4)
    assert (await worker.told("loaded", 1))["way"] == "live"
    await worker.desire(2, B, max_num_seqs=2)
    assert (await worker.told("loaded", 2))["settings"]["max_num_seqs"] == 2
    worker.seats.vacate()
    worker.faults.leave("r2", "engines died under it")
    seat = await worker.seats.open(worker.convergence.retreat())
    assert await worker.convergence.restore(seat.engine) == "r1"
    receipt = worker.convergence.loaded.receipt
    assert receipt is not None
    assert (receipt.way, receipt.settings.max_num_seqs) == (Way.NOTHING, 4)


async def test_a_new_engine_with_other_settings_is_not_taken_for_what_should_run(made: Made) -> None:
    worker = made(PLENTY)
    await _two_revisions(worker)
    worker.seats.vacate()
    before = worker.convergence.retreat()
    worker.faults.leave("r2", "engines died under it")
    worker.convergence.retreat()  # while the engine of before starts
    seat = await worker.seats.open(before)
    with pytest.raises(Refused, match="launched otherwise"):
        await worker.convergence.restore(seat.engine)
    assert worker.engines[2].engaged == []
    worker.seats.seat(seat)
    await _back_at_the_first(worker)


async def test_a_restart_whose_kernels_do_not_serve_goes_back_by_another(made: Made) -> None:
    worker = made(GIB)
    await _first(worker)
    worker.refuses = {B.artifact}
    await worker.desire(2, B, block_size=32)
    assert "serves nothing here" in (await worker.told("refused", 2))["reason"]
    await _back_at_the_first(worker)
    assert [each.launch.block_size for each in worker.engines] == [None, 32, None]


async def test_a_restart_that_fails_has_its_kernels_again(made: Made) -> None:
    worker = made(GIB)
    await _first(worker)
    worker.fails = lambda launch: "no memory" if launch.block_size else ""
    await worker.desire(2, B, block_size=32)
    assert "the engine runs as before" in (await worker.told("refused", 2))["reason"]
    assert len(worker.engines) == 2
    await _back_at_the_first(worker)


async def test_a_restart_goes_back_to_nothing_that_was_left_while_it_was_tested(made: Made) -> None:
    worker = made(GIB)
    await _first(worker)
    worker.refuses = {B.artifact}
    worker.may_test.clear()
    await worker.desire(2, B, block_size=32)
    await worker.until(worker.convergence.standing.locked)
    worker.faults.leave("r1", "engines died under it")
    worker.convergence.retreat()
    worker.may_test.set()
    await worker.told("refused", 2)
    await worker.until(lambda: len(worker.engines) == 3 and worker.engines[2].engaged != [])
    await worker.until(lambda: not worker.convergence.standing.locked())
    assert worker.convergence.revision == EMPTY
    assert [each.engaged[-1] for each in worker.engines] == [(), (), ()]
    assert worker.engines[2].launch == BASE


async def test_a_goal_that_goes_on_failing_costs_two_restarts_and_not_one_after_the_other(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.domain.trying.RETRY_S", (0.01, 0.01))
    monkeypatch.setattr("polymorph.worker.convergence._LOOK_AGAIN_S", 0.01)
    worker = made(GIB)
    await _first(worker)
    worker.silences = {B.artifact}
    await worker.desire(2, B, block_size=32)
    await worker.until(lambda: len(worker.engines) == 3)
    await _back_at_the_first(worker)
    await asyncio.sleep(0.3)  # thirty looks at what is desired
    assert [each.launch.block_size for each in worker.engines] == [None, 32, None]
    worker.silences.clear()
    await worker.desire(3, B, block_size=32)
    assert (await worker.told("loaded", 3))["settings"]["block_size"] == 32


async def test_between_tries_in_a_new_engine_there_are_the_pauses_of_any_failure(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.domain.trying.RETRY_S", (0.2, 30.0, 30.0, 30.0, 30.0))
    worker = made(GIB)
    await _first(worker)
    worker.silences = {B.artifact}
    await worker.desire(2, B, block_size=32)
    await worker.until(lambda: len(worker.engines) == 2 and worker.engines[1].tried == 2)
    await asyncio.sleep(0.3)
    assert worker.engines[1].tried == 2


async def test_a_call_that_is_lost_after_a_restart_costs_no_other_restart(made: Made) -> None:
    worker = made(GIB)
    await _first(worker)
    worker.silences = {B.artifact}
    await worker.desire(2, B, block_size=32)
    await worker.until(lambda: len(worker.engines) == 2 and worker.engines[1].tried == 1)
    worker.silences.clear()
    await worker.told("loaded", 2)
    assert len(worker.engines) == 2


async def test_a_restart_that_is_not_read_back_is_not_told_as_what_ran_before(made: Made) -> None:
    worker = made(GIB)
    await _first(worker)
    worker.reads_lost = 1
    await worker.desire(2, B, block_size=32)
    await worker.until(lambda: worker.convergence.loaded.unsettled)
    assert (worker.convergence.revision, len(worker.engines)) == (EMPTY, 2)
    await worker.desire(3, A, name="r1")
    assert (await worker.told("loaded", 3))["settings"]["block_size"] == 16
    await _back_at_the_first(worker)


async def test_what_is_desired_anew_is_tried_before_what_is_owed_and_does_not_come(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.domain.trying.RETRY_S", (0.01, 0.01))
    monkeypatch.setattr("polymorph.worker.rolling._BETWEEN_TRIES_S", 0.05)
    monkeypatch.setattr("polymorph.worker.rolling._HELD_DRAIN_SHARE", 0.005)
    worker = made(GIB)
    await _two_revisions(worker)
    seat = worker.seats.current
    assert seat is not None
    with seat.serving():  # one worker alone, and a stream that does not end: there is no restart
        await worker.quarantine(B)
        await worker.told("refused", 2)
        await worker.until(lambda: worker.trying.failures > 3)
        await worker.desire(3, C, block_size=32)
        await worker.told("loaded", 3)


async def test_an_engine_that_ends_with_an_error_has_a_successor_all_the_same(made: Made) -> None:
    worker = made(GIB)
    await _first(worker)
    worker.ends_badly = True
    await worker.desire(2, B, block_size=32)
    assert (await worker.told("loaded", 2))["settings"]["block_size"] == 32


async def test_a_lossy_revision_that_comes_meanwhile_is_not_emptied_under_its_requests(made: Made) -> None:
    lossy = kernel("a", Numerics.LOSSY)
    worker = made(PLENTY)
    await worker.start()
    await worker.desire(1, B)
    await worker.told("loaded", 1)
    worker.may_test.clear()
    await worker.desire(2, lossy)
    await worker.until(worker.convergence.change.locked)
    switching = asyncio.create_task(worker.convergence.switch(empty=True, ttl_s=30.0))
    await asyncio.sleep(0)
    worker.may_test.set()
    with pytest.raises(Refused, match="lossy"):
        await switching
    assert worker.engines[0].runs == (lossy.artifact,)
