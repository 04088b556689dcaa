"""Sets of graphs that are replaced while they serve, on a double of CUDA's graphs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.doubles.gpu_graphs import FakeDevice, FakeStream

from polymorph.engine.gpu import ops
from polymorph.engine.gpu.captured import CaptureFailed
from polymorph.engine.gpu.device import DeviceLost
from polymorph.engine.gpu.graphs import ChangeRefused, GraphSet, NoRoom
from polymorph.engine.gpu.slots import SlotTable, Table

MakeTable = Callable[..., Table]
GIB = 1 << 30


class Served:
    """A set of graphs over one layer that calls its slot three times, once for its result."""

    def __init__(self, slots: SlotTable, inputs: dict[int, torch.Tensor], **options: Any) -> None:
        self.slots = slots
        self.inputs = inputs
        self.device = FakeDevice(slots)
        self.graphs = GraphSet(self.device, slots, self.body, list(inputs), spare_bytes=GIB, **options)

    def body(self, bucket: int) -> torch.Tensor:
        operator = torch.ops.polymorph_gpu.silu_and_mul
        for _ in range(2):
            operator(self.inputs[bucket])
        return operator(self.inputs[bucket])

    def factor(self, bucket: int = 4) -> float:
        """By which kernel a run was served: 1 is the engine's own code."""
        result = self.graphs.run(bucket)
        return round(float((result / ops._native_silu(self.inputs[bucket])).mean()), 3)

    def replays(self) -> list[Table]:
        return [entry[1] for entry in self.device.log if entry[0] == "replay"]


@pytest.fixture
def served(slots: SlotTable, inputs: dict[int, torch.Tensor]) -> Served:
    made = Served(slots, inputs)
    made.graphs.engage(Table())
    return made


def test_before_any_capture_runs_go_without_graphs(slots: SlotTable, inputs: dict[int, torch.Tensor]) -> None:
    fresh = Served(slots, inputs)
    assert fresh.factor() == 1.0
    assert fresh.replays() == []


def test_a_change_serves_every_bucket_and_has_an_inverse(served: Served, table_of: MakeTable) -> None:
    assert {bucket: served.factor(bucket) for bucket in served.inputs} == dict.fromkeys(served.inputs, 1.0)
    engaged = served.graphs.engage(table_of(3))
    assert (engaged.way, engaged.epoch) == ("beside", 2)
    assert {bucket: served.factor(bucket) for bucket in served.inputs} == dict.fromkeys(served.inputs, 3.0)
    served.graphs.engage(engaged.inverse)
    assert served.factor() == 1.0


def test_a_graph_is_proved_to_have_run_by_the_cells_that_its_replay_moves(
    served: Served, table_of: MakeTable
) -> None:
    served.graphs.engage(table_of(3))
    assert sum(served.slots.counters.read().values()) == 0, "warming and capturing count nothing"
    for _ in range(5):
        served.graphs.run(4)
    served.graphs.run(8)
    calls = {cell.bucket: calls for cell, calls in served.slots.counters.read().items()}
    assert calls == {1: 0, 2: 0, 4: 15, 8: 3}


def test_the_old_set_serves_while_the_new_one_is_captured(served: Served, table_of: MakeTable) -> None:
    capturing, go_on = threading.Event(), threading.Event()

    def launched() -> None:
        capturing.set()
        assert go_on.wait(30)

    slow = threading.Thread(target=served.graphs.engage, args=(table_of(3, launched),))
    slow.start()
    assert capturing.wait(30)
    during = [served.factor() for _ in range(3)]
    with pytest.raises(ChangeRefused, match="another change"):
        served.graphs.engage(table_of(2))
    go_on.set()
    slow.join(30)
    assert (during, served.factor()) == ([1.0] * 3, 3.0)


def test_everything_is_captured_before_the_flip_and_fenced_after_the_last_old_run(
    served: Served, table_of: MakeTable
) -> None:
    served.factor()
    del served.device.log[:]
    new = table_of(3)
    served.graphs.engage(new)
    served.factor()
    kinds = [entry[0] for entry in served.device.log if entry[0] in {"capture", "fence", "replay"}]
    # A fence ends the warming, four captures follow, a fence closes the old set, and only then the new one runs.
    assert kinds == ["fence", *["capture"] * 4, "fence", "replay"]
    assert served.replays() == [new]


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted when stream is capturing"), KeyError("x")]
)
def test_after_a_failed_capture_the_old_set_serves_and_a_next_change_works(
    served: Served, table_of: MakeTable, error: Exception
) -> None:
    served.graphs.engage(table_of(3))
    served.device.fail.append(error)
    with pytest.raises(CaptureFailed, match=type(error).__name__):
        served.graphs.engage(table_of(5))
    assert (served.factor(), served.slots.engaged.bindings[0].artifact) == (3.0, f"{3:064x}")
    assert sum(lane.abandoned for lane in served.device.lanes) == 1
    served.graphs.engage(table_of(7))
    assert served.factor() == 7.0


def test_a_kernel_whose_launch_raises_is_a_failed_capture(served: Served, table_of: MakeTable) -> None:
    def launched() -> None:
        raise ValueError("no such block size")

    with pytest.raises(CaptureFailed, match="no such block size"):
        served.graphs.engage(table_of(3, launched))
    assert served.factor() == 1.0


def test_a_lost_device_is_told_apart(served: Served, table_of: MakeTable) -> None:
    served.device.fail.append(RuntimeError("an illegal memory access was encountered"))
    served.device.lost = True
    with pytest.raises(DeviceLost):
        served.graphs.engage(table_of(3))


def test_a_set_is_destroyed_only_when_no_replay_of_it_is_in_flight(
    slots: SlotTable, inputs: dict[int, torch.Tensor], table_of: MakeTable
) -> None:
    served = Served(slots, inputs, keep=0)
    first = table_of(2)
    served.graphs.engage(first)
    served.factor()
    assert served.device.stream.busy
    served.graphs.engage(table_of(3))
    assert ("reset", first) not in served.device.log
    served.device.stream.busy = False
    served.graphs.engage(table_of(5))
    assert served.device.log.count(("reset", first)) == len(inputs)


def test_a_busy_lane_is_waited_for_and_lanes_stay_few(
    slots: SlotTable, inputs: dict[int, torch.Tensor], table_of: MakeTable
) -> None:
    served = Served(slots, inputs, keep=2)
    for number in range(2, 22):
        served.graphs.engage(table_of(number))
        assert served.factor() == number
    assert len(served.device.lanes) == 4, "two kept, one serving, one to capture on"


def test_rollback_is_a_flip_without_a_capture_and_happens_once(served: Served, table_of: MakeTable) -> None:
    served.graphs.engage(table_of(3))
    bad = table_of(5)
    served.graphs.engage(bad)
    served.factor()
    captures = sum(entry[0] == "capture" for entry in served.device.log)
    engaged = served.graphs.rollback()
    assert (engaged.way, engaged.inverse, served.factor()) == ("kept", bad, 3.0)
    assert sum(entry[0] == "capture" for entry in served.device.log) == captures
    with pytest.raises(ChangeRefused, match="no earlier set"):
        served.graphs.rollback()


def test_where_memory_is_short_what_is_kept_for_rollback_goes_first(
    slots: SlotTable, inputs: dict[int, torch.Tensor], table_of: MakeTable
) -> None:
    served = Served(slots, inputs)
    served.device.set_bytes, served.device.free = 4 * GIB, 10 * GIB
    for number in (2, 3, 5, 7):
        assert served.graphs.engage(table_of(number)).way == "beside"
        assert served.factor() == number
    assert len(served.device.lanes) == 2


def test_where_two_sets_do_not_fit_runs_wait_for_the_recapture(
    slots: SlotTable, inputs: dict[int, torch.Tensor], table_of: MakeTable
) -> None:
    served = Served(slots, inputs)
    served.device.set_bytes, served.device.free = 4 * GIB, 5 * GIB
    served.graphs.engage(table_of(2))
    with pytest.raises(NoRoom):
        served.graphs.prepare(table_of(3))
    waiting: list[float] = []
    runner = threading.Thread(target=lambda: waiting.append(served.factor()))
    engaged = served.graphs.engage(table_of(3, launched=lambda: None if runner.ident else runner.start()))
    runner.join(30)
    assert (engaged.way, waiting) == ("drained", [3.0]), "a run that came meanwhile saw the new set"
    assert engaged.paused_s > 0
    assert len(served.device.lanes) == 1


def test_a_failed_recapture_behind_a_drain_brings_the_old_graphs_back(
    slots: SlotTable, inputs: dict[int, torch.Tensor], table_of: MakeTable
) -> None:
    served = Served(slots, inputs)
    served.device.set_bytes, served.device.free = 4 * GIB, 5 * GIB
    old = table_of(2)
    served.graphs.engage(old)
    served.device.fail.append(RuntimeError("invalidated"))
    with pytest.raises(CaptureFailed, match="invalidated"):
        served.graphs.engage(table_of(3))
    assert served.factor() == 2.0
    assert served.replays() == [old]
    served.device.fail += [RuntimeError("invalidated"), RuntimeError("again")]
    with pytest.raises(CaptureFailed, match="serves without graphs"):
        served.graphs.engage(table_of(3))
    assert (served.factor(), len(served.replays())) == (2.0, 1), "the old kernels still serve, one by one"


def test_ranks_prepare_and_then_flip_or_none_does(served: Served, table_of: MakeTable) -> None:
    ready = served.graphs.prepare(table_of(3))
    assert served.factor() == 1.0
    served.graphs.discard(ready)
    ready = served.graphs.prepare(table_of(5))
    assert (served.factor(), len(served.device.lanes)) == (1.0, 2)
    served.graphs.commit(ready)
    assert served.factor() == 5.0


def test_runs_on_other_streams_are_put_in_order(served: Served) -> None:
    served.factor()
    served.device.stream = FakeStream("another")
    served.graphs.run(4, fill=lambda: served.device.log.append("fill"))
    served.factor()
    log = [entry for entry in served.device.log if entry == "fill" or entry[-1] == "another"]
    assert log == [("order", "serving", "another"), "fill"]


def test_a_body_that_calls_other_kernels_when_captured_is_refused(
    slots: SlotTable, inputs: dict[int, torch.Tensor], table_of: MakeTable
) -> None:
    device, calls = FakeDevice(slots), iter(range(9))

    def body(bucket: int) -> torch.Tensor:
        for _ in range(next(calls)):
            torch.ops.polymorph_gpu.silu_and_mul(inputs[bucket])
        return inputs[bucket]

    with pytest.raises(CaptureFailed, match="called other kernels"):
        GraphSet(device, slots, body, [4]).engage(table_of(3))


def test_closed_graphs_are_gone_and_runs_go_on(served: Served, table_of: MakeTable) -> None:
    served.graphs.engage(table_of(3))
    served.factor()
    served.graphs.close()
    resets = sum(entry[0] == "reset" for entry in served.device.log)
    assert resets == 2 * len(served.inputs)
    assert (served.factor(), len(served.replays())) == (3.0, 1)
