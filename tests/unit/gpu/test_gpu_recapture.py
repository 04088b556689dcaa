"""vLLM's graphs captured anew behind a drain, on doubles of its runner and of a paused engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from polymorph.engine.gpu.captured import CaptureFailed
from polymorph.engine.gpu.recapture import RecaptureRefused, behind_drain, recapture
from polymorph.engine.gpu.slots import SlotTable, Table

MakeTable = Callable[..., Table]


@dataclass
class FakeRunnerGraphs:
    """Graphs are the name of the table that they were captured under; `fail` is raised by the next captures."""

    slots: SlotTable
    graphs: Any = None
    room: bool = True
    refused: str | None = None
    fail: list[Exception] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def refusal(self) -> str | None:
        return self.refused

    def fits(self) -> bool:
        return self.room

    def take(self) -> Any:
        held, self.graphs = self.graphs, None
        self.log.append("take")
        return held

    def put(self, held: Any) -> None:
        self.graphs = held
        self.log.append("put")

    def capture(self) -> None:
        self.log.append("capture")
        if self.fail:
            raise self.fail.pop(0)
        self.graphs = getattr(self.slots._threads, "table", None) or self.slots.engaged

    def abort(self) -> None:
        self.log.append("abort")

    def settle(self) -> None:
        self.log.append("settle")

    def release(self) -> None:
        self.log.append("release")


@pytest.fixture
def runner(slots: SlotTable) -> FakeRunnerGraphs:
    made = FakeRunnerGraphs(slots)
    made.graphs = slots.engaged
    return made


def test_graphs_are_captured_under_the_new_table_beside_the_old_ones(
    runner: FakeRunnerGraphs, slots: SlotTable, table_of: MakeTable
) -> None:
    before, table = slots.engaged, table_of(3)
    done = recapture(runner, slots, table)
    assert (done.way, done.inverse, runner.graphs, slots.engaged) == ("beside", before, table, table)
    assert runner.log == ["settle", "take", "capture", "settle", "release"]


def test_without_room_the_old_graphs_go_first(
    runner: FakeRunnerGraphs, slots: SlotTable, table_of: MakeTable
) -> None:
    runner.room = False
    table = table_of(3)
    assert recapture(runner, slots, table).way == "drained"
    assert runner.log == ["settle", "take", "release", "capture", "settle", "release"]
    assert runner.graphs is table


@pytest.mark.parametrize("room", [True, False])
def test_after_an_error_the_old_table_serves_with_graphs(
    runner: FakeRunnerGraphs, slots: SlotTable, table_of: MakeTable, room: bool
) -> None:
    before, runner.room = slots.engaged, room
    runner.fail.append(RuntimeError("capture invalidated"))
    with pytest.raises(CaptureFailed, match="capture invalidated"):
        recapture(runner, slots, table_of(3))
    assert (runner.graphs, slots.engaged) == (before, before)
    assert "abort" in runner.log
    assert runner.log.count("capture") == (1 if room else 2)


def test_an_engine_whose_graphs_cannot_be_replaced_is_not_touched(
    runner: FakeRunnerGraphs, slots: SlotTable, table_of: MakeTable
) -> None:
    runner.refused = "an engine with LoRA"
    with pytest.raises(RecaptureRefused, match="LoRA"):
        recapture(runner, slots, table_of(3))
    assert runner.log == []


@dataclass
class FakeRanks:
    """Ranks that answer as told: reasons by (method, rank), consumed once."""

    ranks: int = 2
    refusals: dict[tuple[str, int], str] = field(default_factory=dict)
    hang: bool = False
    log: list[Any] = field(default_factory=list)

    async def pause(self) -> None:
        self.log.append("pause")

    async def resume(self) -> None:
        self.log.append("resume")

    async def call(self, method: str, **keywords: Any) -> list[dict[str, Any]]:
        self.log.append((method, keywords["documents"]))
        if self.hang and method == "gpu_engage":
            await asyncio.Event().wait()
        reasons = [self.refusals.pop((method, rank), "") for rank in range(self.ranks)]
        return [{"ok": not reason, "reason": reason} for reason in reasons]


NEW, OLD = [{"artifact": "new"}], [{"artifact": "old"}]


async def test_kernels_are_made_ready_before_the_pause() -> None:
    engine = FakeRanks()
    assert len(await behind_drain(engine, NEW, OLD)) == 2
    assert engine.log == [("gpu_prepare", NEW), "pause", ("gpu_engage", NEW), "resume"]


async def test_a_rank_that_is_not_ready_keeps_all_from_pausing() -> None:
    engine = FakeRanks(refusals={("gpu_prepare", 1): "the self-test failed"})
    with pytest.raises(RecaptureRefused, match="rank 1: the self-test failed"):
        await behind_drain(engine, NEW, OLD)
    assert engine.log == [("gpu_prepare", NEW)]


async def test_where_one_rank_fails_all_go_back_within_the_pause() -> None:
    engine = FakeRanks(refusals={("gpu_engage", 0): "out of memory"})
    with pytest.raises(RecaptureRefused, match="rank 0: out of memory"):
        await behind_drain(engine, NEW, OLD)
    assert engine.log[1:] == ["pause", ("gpu_engage", NEW), ("gpu_engage", OLD), "resume"]


async def test_the_pause_ends_with_its_lease() -> None:
    engine = FakeRanks(hang=True)
    with pytest.raises(TimeoutError):
        await behind_drain(engine, NEW, OLD, lease_s=0.05)
    assert engine.log[-1] == "resume"


async def test_the_pause_ends_where_who_asked_goes_away() -> None:
    engine = FakeRanks(hang=True)
    asking = asyncio.create_task(behind_drain(engine, NEW, OLD))
    while ("gpu_engage", NEW) not in engine.log:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.log[-1] == "resume"
