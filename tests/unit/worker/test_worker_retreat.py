"""Back to a revision with other settings: by the ways of any change, read back, or told as what it is."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.doubles.moving_worker import BASE, MovingWorker, kernel

from polymorph.bus import topology
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import EMPTY
from polymorph.events.values import Way
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


async def _two_revisions(worker: MovingWorker) -> None:
    await worker.start()
    await worker.desire(1, A)
    await worker.told("loaded", 1)
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
        return await engage(bindings, keep_packed=keep_packed)  # type: ignore[arg-type]

    engine.engage = desires_more  # type: ignore[assignment, method-assign]
    await worker.quarantine(B)
    assert (await worker.told("loaded", 3))["kernels"] == [C.artifact]
    assert [each.launch.block_size for each in worker.engines] == [None, 32]
    assert engine.engaged == [(B.artifact,), (), (C.artifact,)]


async def test_where_what_is_desired_does_not_come_what_ran_before_it_does(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.convergence._RETRY_S", (0.01, 0.01))
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
    await worker.start()
    await worker.desire(1, A)
    await worker.told("loaded", 1)
    worker.refuses = {B.artifact}
    await worker.desire(2, B, block_size=32)
    assert "serves nothing here" in (await worker.told("refused", 2))["reason"]
    await _back_at_the_first(worker)
    assert [each.launch.block_size for each in worker.engines] == [None, 32, None]


async def test_a_restart_that_fails_has_its_kernels_again(made: Made) -> None:
    worker = made(GIB)
    await worker.start()
    await worker.desire(1, A)
    await worker.told("loaded", 1)
    worker.fails = lambda launch: "no memory" if launch.block_size else ""
    await worker.desire(2, B, block_size=32)
    assert "the engine runs as before" in (await worker.told("refused", 2))["reason"]
    assert len(worker.engines) == 2
    await _back_at_the_first(worker)


async def test_a_restart_goes_back_to_nothing_that_was_left_while_it_was_tested(made: Made) -> None:
    worker = made(GIB)
    await worker.start()
    await worker.desire(1, A)
    await worker.told("loaded", 1)
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
