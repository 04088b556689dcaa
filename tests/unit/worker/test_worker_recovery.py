"""From an engine that dies or hangs to the next one, over engines that are doubles and seats that are real."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from polymorph.bus.errors import Fatal, Retryable
from polymorph.config.clock import SystemClock
from polymorph.engine.flight import FlightRecord
from polymorph.engine.launch import EngineLaunch
from polymorph.worker import recovery as recovery_module
from polymorph.worker import tries
from polymorph.worker.faults import Faults
from polymorph.worker.recovery import Recovery
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.served import AtWork
from polymorph.worker.switchboard import Switchboard

A = "a" * 64
LAUNCH, OTHER = EngineLaunch(Path("m")), EngineLaunch(Path("other"))


def fails(unforeseen: Counter[str], name: str) -> None:
    """So many times as nobody foresaw."""
    unforeseen[name] -= 1
    if unforeseen[name] >= 0:
        raise KeyError(f"nobody foresaw it in {name}")


class Engine:
    """Dies when told to; its flight record is a real file."""

    def __init__(self, folder: Path, unforeseen: Counter[str]) -> None:
        folder.mkdir()
        self.flight = folder
        self.unforeseen = unforeseen
        self.alive = True
        self.killed = False
        self.heirs: list[Engine] = []
        self.given_up: list[str] = []
        self.record = FlightRecord(folder, 0)

    def calls(self, artifact: str = A) -> None:
        self.record.begin(artifact, 1, time.monotonic_ns())

    async def kill(self) -> None:
        fails(self.unforeseen, "kill")
        self.killed, self.alive = True, False

    async def succeed(self, heir: "Engine") -> None:
        fails(self.unforeseen, "succeed")
        self.heirs.append(heir)

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)


class Good:
    """What served before."""

    launch: EngineLaunch | None = None
    fails = False
    kills_first = False

    def __init__(self, unforeseen: Counter[str]) -> None:
        self.unforeseen = unforeseen
        self.work = AtWork(4, "r-2", "gemm", leavable=True)
        self.restored: list[Engine] = []
        self.retreats = 0

    def at_work(self, artifact: str | None) -> AtWork:
        fails(self.unforeseen, "at_work")
        return self.work

    def retreat(self) -> EngineLaunch | None:
        self.retreats += 1
        fails(self.unforeseen, "retreat")
        return self.launch

    async def restore(self, engine: Any) -> str:
        if self.fails:
            raise Retryable("it is silent")
        if self.kills_first and not self.restored:
            engine.alive = False
        self.restored.append(engine)
        return "r-1"


class World:
    """`starts` says of each start whether an engine comes of it; after its end all do. `unforeseen` says what fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: list[Engine] = []
        self.launches: list[EngineLaunch] = []
        self.starts: list[bool] = []
        self.unforeseen: Counter[str] = Counter()
        self.board = Switchboard(30.0)
        self.seats = Seats(self.board, self._open, self._close, SystemClock())
        self.good = Good(self.unforeseen)
        self.sent_back = 0
        self.faults = Faults(folder / "faults.json", "chat", "w1", SystemClock())
        self.recovery = Recovery(
            self.seats,
            self.good,
            self.faults,
            SystemClock(),
            hang_timeout_s=0.3,
            send_back=self._send_back,
        )
        self.running: asyncio.Task[None] | None = None

    def _send_back(self) -> None:
        fails(self.unforeseen, "send_back")
        self.sent_back += 1

    async def _open(self, launch: EngineLaunch) -> Seat:
        await asyncio.sleep(0)
        fails(self.unforeseen, "open")
        if self.starts and not self.starts.pop(0):
            raise EngineNotStarted("no memory")
        engine = Engine(self.folder / f"engine-{len(self.engines)}", self.unforeseen)
        self.engines.append(engine)
        self.launches.append(launch)
        return Seat(engine, None, launch, None)  # type: ignore[arg-type]

    async def _close(self, seat: Seat) -> None:
        await seat.engine.kill()

    async def begin(self) -> Engine:
        self.seats.seat(await self.seats.open(LAUNCH))
        self.running = asyncio.create_task(self.recovery.run())
        return self.engines[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                if self.running is not None and self.running.done():
                    await self.running
                await asyncio.sleep(0.005)

    def serves(self, number: int) -> bool:
        return len(self.engines) > number and self._served() is self.engines[number]

    def _served(self) -> Any:
        return None if self.seats.current is None else self.seats.current.engine


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(recovery_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(recovery_module, "_START_PAUSE_S", 0.01)
    monkeypatch.setattr(tries, "_AGAIN_S", (0.01,))
    made = World(tmp_path)
    yield made
    if made.running is not None:
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)


async def test_a_crash_is_blamed_on_the_call_in_flight_and_requests_go_on(world: World) -> None:
    first = await world.begin()
    first.calls()
    first.alive = False
    await world.until(lambda: world.serves(1))
    await world.until(lambda: first.heirs == [world.engines[1]])
    assert world.sent_back == 1
    assert world.faults.artifacts == {A}
    (fault,) = Faults(world.folder / "faults.json", "chat", "w1", SystemClock())._kept.faults
    assert (fault.how, fault.definition, fault.revision, fault.generation) == ("crash", "gemm", "r-2", 4)
    assert "call 1 of a kernel on rank 0" in fault.evidence
    assert world.good.restored == [world.engines[1]]
    assert world.seats.current is not None
    assert world.seats.current.revision == "r-1"
    await world.until(lambda: len(world.seats.living) == 1)  # the dead one is gone, with nothing in flight


async def test_a_call_that_does_not_end_is_ended_with_its_engine(world: World) -> None:
    first = await world.begin()
    first.calls()
    await world.until(lambda: world.serves(1))
    assert first.killed
    assert [fault.how for fault in world.faults._kept.faults] == ["hang"]


async def test_calls_that_end_are_left_alone(world: World) -> None:
    first = await world.begin()
    for _ in range(60):
        first.calls()
        await asyncio.sleep(0.01)
        first.record.end()
    assert world.serves(0)


async def test_a_death_without_a_call_blames_nobody(world: World) -> None:
    first = await world.begin()
    first.alive = False
    await world.until(lambda: world.serves(1))
    assert world.faults.artifacts == frozenset()


async def test_after_three_deaths_under_it_a_revision_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.domain.deaths._PAUSES_S", (0.0,))
    await world.begin()
    for number in range(3):
        world.engines[number].alive = False
        await world.until(lambda n=number: world.serves(n + 1))
    assert world.faults._kept.left == {"r-2": "3 engines died under it within 10 minutes"}


async def test_where_engines_die_again_and_again_the_worker_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polymorph.worker.domain.deaths._PAUSES_S", (0.0,))
    world.good.work = AtWork(0, "empty", "unknown", leavable=False)
    await world.begin()
    for number in range(6):
        world.engines[number].alive = False
        await world.until(lambda n=number: world.serves(n + 1))
    world.engines[6].alive = False
    with pytest.raises(Fatal, match="again and again"):
        await world.until(lambda: False)
    assert world.engines[6].given_up[0] == "engines die again and again"


async def test_a_start_that_fails_is_tried_again_and_at_last_given_up(world: World) -> None:
    first = await world.begin()
    world.starts = [False, True]
    first.alive = False
    await world.until(lambda: world.serves(1))
    world.starts = [False] * 3
    world.engines[1].alive = False
    with pytest.raises(Fatal, match="no memory"):
        await world.until(lambda: False)
    assert world.engines[1].given_up[0] == "no memory"


async def test_the_last_good_revision_is_launched_as_it_was(world: World) -> None:
    first = await world.begin()
    world.good.launch = OTHER
    first.alive = False
    await world.until(lambda: world.serves(1))
    assert world.launches == [LAUNCH, OTHER]


async def test_without_its_kernels_the_new_engine_serves_as_well(world: World) -> None:
    first = await world.begin()
    world.good.fails = True
    first.alive = False
    await world.until(lambda: world.serves(1))
    assert world.seats.current is not None
    assert world.seats.current.revision == "empty"


async def test_an_engine_that_dies_while_it_drains_costs_no_restart(world: World) -> None:
    first = await world.begin()
    second = await world.seats.open(LAUNCH)
    world.seats.seat(second)
    first.calls()
    first.alive = False
    await world.until(lambda: first.heirs == [second.engine])
    assert world.faults.artifacts == {A}
    assert len(world.engines) == 2
    assert world.sent_back == 0


async def test_requests_wait_for_the_next_where_their_heir_dies_before_it_serves(world: World) -> None:
    first = await world.begin()
    world.good.kills_first = True
    first.alive = False
    await world.until(lambda: world.serves(2) and len(world.seats.living) == 1)
    assert first.heirs == world.engines[1].heirs == [world.engines[2]]


async def test_requests_of_engines_that_die_together_go_on_in_the_one_that_lives(world: World) -> None:
    first = await world.begin()
    second = await world.seats.open(LAUNCH)
    world.seats.seat(second)
    first.alive = False
    world.engines[1].alive = False
    await world.until(lambda: world.serves(2) and len(world.seats.living) == 1)
    assert first.heirs == world.engines[1].heirs == [world.engines[2]]


async def test_requests_of_an_engine_that_dies_while_none_serves_go_on_in_the_next(world: World) -> None:
    first = await world.begin()
    world.seats.vacate()  # as for a restart, whose new engine is seated by who restarts
    first.alive = False
    await world.until(lambda: first.killed)
    assert first.heirs == []
    world.seats.seat(await world.seats.open(LAUNCH))
    await world.until(lambda: first.heirs == [world.engines[1]])


async def test_newcomers_wait_while_there_is_no_engine(world: World) -> None:
    first = await world.begin()
    world.starts = [False, True]
    assert not world.board.closed
    first.alive = False
    await world.until(lambda: world.board.closed)
    await world.until(lambda: not world.board.closed)
    assert world.serves(1)


async def test_a_worker_that_ends_lets_nobody_wait(world: World) -> None:
    first = await world.begin()
    world.starts = [False] * 3
    recovery_module._START_PAUSE_S = 60.0
    first.alive = False
    await world.until(lambda: world.board.closed and len(world.starts) < 3)
    assert world.running is not None
    world.running.cancel()
    await asyncio.gather(world.running, return_exceptions=True)
    assert first.given_up == ["the worker ends"]


@pytest.mark.parametrize("name", ["send_back", "kill", "at_work", "retreat", "open", "succeed"])
async def test_an_error_that_nobody_foresaw_ends_one_look_alone(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = await world.begin()
    first.calls()
    world.unforeseen[name] = 2
    first.alive = False
    await world.until(lambda: first.heirs == world.engines[1:] != [])
    assert world.serves(1)
    assert (first.killed, world.sent_back, world.faults.artifacts) == (True, 1, {A})
    assert len(world.faults._kept.faults) == 1
    assert caplog.text.count(f"KeyError: 'nobody foresaw it in {name}'") == 2
    world.engines[1].alive = False  # and the next death is seen as the first was
    await world.until(lambda: world.serves(2))


@pytest.mark.parametrize("name", ["send_back", "kill", "at_work"])
async def test_what_fails_again_and_again_keeps_no_successor_from_starting(world: World, name: str) -> None:
    first = await world.begin()
    world.unforeseen[name] = 3
    first.alive = False
    await world.until(lambda: world.serves(1))
    await world.until(lambda: first.heirs == [world.engines[1]])


@pytest.mark.parametrize("name", ["retreat", "open"])
async def test_where_no_successor_can_be_had_the_worker_ends_at_last(world: World, name: str) -> None:
    first = await world.begin()
    world.unforeseen[name] = 3
    first.alive = False
    with pytest.raises(Fatal, match=f"KeyError: 'nobody foresaw it in {name}'"):
        await world.until(lambda: False)
    assert "nobody foresaw it" in first.given_up[0]


async def test_requests_that_can_never_be_handed_over_end_and_keep_no_others_waiting(world: World) -> None:
    first = await world.begin()
    world.unforeseen["succeed"] = 3
    first.alive = False
    await world.until(lambda: world.serves(1) and len(world.seats.living) == 1)
    assert first.given_up == ["KeyError: 'nobody foresaw it in succeed'"]
    world.engines[1].alive = False
    await world.until(lambda: world.engines[1].heirs == world.engines[2:] != [])
