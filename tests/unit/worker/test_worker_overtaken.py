"""A change that waits for streams gives way at once to what should come now, and leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from tests.doubles.moving_worker import BASE, MovingWorker, kernel

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.events.values import Numerics
from polymorph.worker.domain.change import GIB
from polymorph.worker.waiting import News, Overtaken, Waiting

LOSSY = kernel("a", Numerics.LOSSY)
OTHER = kernel("b")
Made = Callable[[int], MovingWorker]


@pytest_asyncio.fixture
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Made]:
    workers: list[MovingWorker] = []

    def make(room: int = 100 * GIB) -> MovingWorker:
        workers.append(MovingWorker(tmp_path, monkeypatch, room))
        return workers[-1]

    yield make
    for worker in workers:
        await worker.end()


async def _leaves_nothing(worker: MovingWorker) -> None:
    await worker.until(lambda: worker.states[-1:] == [False])
    assert not worker.board.held
    with pytest.raises(NotFound):
        await worker.bus.kv_get(topology.RESTARTS, "p")


@asynccontextmanager
async def _lossy_that_waits(worker: MovingWorker) -> AsyncIterator[None]:
    """Inside, a stream runs that a lossy change waits for."""
    seat = await worker.start()
    await worker.another_ready()
    with seat.serving():
        await worker.desire(1, LOSSY)
        await worker.until(lambda: worker.states == [True])
        yield


async def test_a_newer_goal_comes_while_a_lossy_change_waits_for_streams(made: Made) -> None:
    worker = made(100 * GIB)
    async with _lossy_that_waits(worker):
        await worker.desire(2, OTHER)
        assert (await worker.told("loaded", 2))["kernels"] == [OTHER.artifact]
        await _leaves_nothing(worker)
    assert worker.engines[0].engaged == [(OTHER.artifact,)]
    assert worker.engines[0].salts == []


async def test_a_lossy_kernel_that_comes_into_quarantine_is_waited_for_no_more(made: Made) -> None:
    worker = made(100 * GIB)
    async with _lossy_that_waits(worker):
        await worker.quarantine(LOSSY)
        assert "in quarantine" in (await worker.told("refused", 1))["reason"]
        await _leaves_nothing(worker)
    assert worker.engines[0].engaged == []


async def test_what_runs_is_dropped_at_once_while_a_lossy_change_waits(made: Made) -> None:
    worker = made(100 * GIB)
    seat = await worker.start()
    await worker.another_ready()
    await worker.desire(1, OTHER)
    await worker.told("loaded", 1)
    with seat.serving():
        await worker.desire(2, LOSSY)
        await worker.until(lambda: worker.states == [True])
        await worker.quarantine(OTHER)
        await worker.until(lambda: worker.engines[0].runs == ())
        await worker.until(lambda: worker.states == [True, False, True])  # it waits anew
    assert (await worker.told("loaded", 2))["kernels"] == [LOSSY.artifact]


async def test_news_that_changes_nothing_lets_a_lossy_change_wait(made: Made) -> None:
    worker = made(100 * GIB)
    async with _lossy_that_waits(worker):
        await worker.quarantine(OTHER)
        await worker.until(lambda: OTHER.artifact in worker.faults.artifacts)
        await asyncio.sleep(0.02)
    assert (await worker.told("loaded", 1))["kernels"] == [LOSSY.artifact]
    assert worker.states == [True, False]


@pytest.mark.parametrize("waits_for", ["streams", "another worker's turn"])
async def test_a_newer_goal_comes_while_a_restart_waits(made: Made, waits_for: str) -> None:
    worker = made(GIB)
    seat = await worker.start()
    await worker.another_ready()
    if waits_for != "streams":
        await worker.bus.kv_put(topology.RESTARTS, "p", b"w2")
    with seat.serving():
        await worker.desire(1, block_size=32)
        waits = worker.convergence.standing.locked
        await worker.until(lambda: worker.states == [True] if waits_for == "streams" else waits())
        await worker.desire(2, OTHER)
        assert (await worker.told("loaded", 2))["kernels"] == [OTHER.artifact]
    assert [engine.launch for engine in worker.engines] == [BASE]
    if waits_for == "streams":
        await _leaves_nothing(worker)
    else:
        assert (await worker.bus.kv_get(topology.RESTARTS, "p")).value == b"w2"


async def test_a_newer_goal_comes_while_the_engine_before_the_last_drains(made: Made) -> None:
    worker = made(100 * GIB)
    leaving = await worker.start()
    with leaving.serving():
        await worker.desire(1, block_size=32)
        await worker.told("loaded", 1)
        await worker.desire(2, OTHER, block_size=64)
        await worker.until(worker.convergence.standing.locked)
        await worker.desire(3, LOSSY, block_size=128)  # the engine is changed for it too, and waits too
        await worker.quarantine(LOSSY)
        assert "in quarantine" in (await worker.told("refused", 3))["reason"]
        await worker.desire(4, OTHER, block_size=32)
        assert (await worker.told("loaded", 4))["kernels"] == [OTHER.artifact]
        assert leaving.engine.alive
    assert [engine.launch.block_size for engine in worker.engines] == [None, 32]


async def test_a_wait_ends_with_its_result_or_with_the_first_news_that_overtakes_it() -> None:
    news, reason = News(), [""]
    waiting = Waiting(news, lambda: reason[0] or None)
    assert await waiting.on(asyncio.sleep(0, "there")) == "there"
    ends = asyncio.Event()
    waited = asyncio.create_task(waiting.on(ends.wait()))
    for _ in range(2):
        await asyncio.sleep(0)
        news.set()
    assert not waited.done()
    reason[0] = "something else"
    news.set()
    with pytest.raises(Overtaken, match="something else"):
        await waited
    with pytest.raises(Overtaken):
        await waiting.on(asyncio.sleep(0))
