"""A double of CUDA streams, pools and graphs on the CPU: what is captured is recorded, and runs again at each replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polymorph.engine.gpu.device import DeviceLost
from polymorph.engine.gpu.slots import SlotTable


@dataclass(eq=False)
class FakeStream:
    name: str
    busy: bool = False


@dataclass(eq=False)
class FakeLane:
    stream: FakeStream
    abandoned: bool = False


@dataclass(eq=False)
class FakeFence:
    stream: FakeStream
    log: list[Any]

    def done(self) -> bool:
        return not self.stream.busy

    def wait(self) -> None:
        self.log.append(("wait for", self.stream.name))
        self.stream.busy = False


@dataclass(eq=False)
class FakeGraph:
    """Replays with the table that it was captured under, into the results of the capture."""

    device: "FakeDevice"
    body: Callable[[], Any]
    table: Any
    results: Any
    alive: bool = True

    def replay(self) -> None:
        if not self.alive:
            raise AssertionError("a destroyed graph was replayed")
        with self.device.slots.using(self.table):
            self.results.copy_(self.body())
        self.device.stream.busy = True
        self.device.log.append(("replay", self.table))

    def reset(self) -> None:
        self.alive = False
        self.device.log.append(("reset", self.table))


@dataclass
class FakeDevice:
    """`set_bytes` is what each lane's first capture takes; `fail` is raised by the next capture, once it has begun."""

    slots: SlotTable
    free: int = 1 << 40
    set_bytes: int = 0
    fail: list[Exception] = field(default_factory=list)
    lost: bool = False
    log: list[Any] = field(default_factory=list)
    lanes: list[FakeLane] = field(default_factory=list)
    stream: FakeStream = field(default_factory=lambda: FakeStream("serving"))
    _used: set[int] = field(default_factory=set)

    def free_bytes(self) -> int:
        return self.free

    def new_lane(self) -> FakeLane:
        self.lanes.append(FakeLane(FakeStream(f"lane {len(self.lanes)}")))
        return self.lanes[-1]

    def current_stream(self) -> FakeStream:
        return self.stream

    def wait(self, stream: FakeStream, other: FakeStream) -> None:
        self.log.append(("order", other.name, stream.name))

    @contextmanager
    def on(self, lane: FakeLane) -> Iterator[None]:
        if lane.abandoned:
            raise AssertionError("an abandoned lane was used again")
        yield

    def capture(self, lane: FakeLane, body: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        counted = self.slots.counters._in_graphs.clone()
        try:
            results = body()
        finally:
            self.slots.counters._in_graphs.copy_(counted)  # a capture runs nothing
        if self.fail:
            raise self.fail.pop(0)
        if id(lane) not in self._used:
            self._used.add(id(lane))
            self.free -= self.set_bytes
        table = self.slots._threads.table
        self.log.append(("capture", table))
        return FakeGraph(self, body, table, results), results

    def abandon(self, lane: FakeLane) -> None:
        lane.abandoned = True
        if id(lane) in self._used:
            self._used.remove(id(lane))
            self.free += self.set_bytes
        if self.lost:
            raise DeviceLost("the double was told to be lost")

    def fence(self, stream: FakeStream) -> FakeFence:
        self.log.append(("fence", stream.name))
        return FakeFence(stream, self.log)
