"""One set of captured graphs, and how it is captured without a word to what serves meanwhile."""

import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polymorph.engine.gpu.device import Fence, Graph, GraphDevice, Lane
from polymorph.engine.gpu.slots import SlotTable, Table

Body = Callable[[int], Any]
"""Runs the model for a bucket on static inputs, and gives its results. It must write to nothing that outlives the call
but what it returns: before a capture it is run for real, while the old set serves."""


class CaptureFailed(RuntimeError):
    """The new table could not be captured; what served before still does."""


@dataclass(eq=False)
class Captured:
    """Graphs with all that they need: the table (and so its compiled kernels), results, counter steps, the lane."""

    table: Table
    lane: Lane | None = None
    graphs: dict[int, tuple[Graph, Any]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    fence: Fence | None = None
    """Passed when no replay is in flight; set where the set stops to serve."""

    def destroy(self) -> None:
        """Only when its fence is passed."""
        for graph, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.held.clear()


class Capturer:
    """Captures the body for all buckets under a table. The largest comes first: smaller ones fit into its memory."""

    def __init__(self, device: GraphDevice, slots: SlotTable, body: Body, buckets: Sequence[int]) -> None:
        self._device = device
        self._slots = slots
        self._body = body
        self._buckets = sorted(buckets, reverse=True)

    def capture(self, table: Table, lane: Lane, after: Any) -> Captured:
        """A set on `lane`. What it reads was written on stream `after` or on this thread's stream.

        Raises:
            CaptureFailed: whatever it was; the lane is gone.
            DeviceLost: the device's context is.
        """
        began = time.monotonic()
        captured = Captured(table, lane)
        try:
            for stream in (after, self._device.current_stream()):
                if stream is not None:
                    self._device.wait(lane.stream, stream)
            with self._slots.using(table), self._device.on(lane), _no_collection():
                tallies = {bucket: self._warmed(bucket) for bucket in self._buckets}
                self._slots.counters.warm()
                # An error of what ran shows here, not within a capture.
                self._device.fence(lane.stream).wait()
                for bucket, tally in tallies.items():
                    steps = self._slots.counters.increments(tally)
                    captured.held.append(steps)
                    captured.graphs[bucket] = self._graph(lane, bucket, tally, steps)
        except Exception as error:  # whatever a kernel's launch raises, the old set serves on
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the lane
            captured.destroy()
            self._device.abandon(lane)
            raise CaptureFailed(f"{type(error).__name__}: {error}") from error
        captured.seconds = time.monotonic() - began
        return captured

    def _warmed(self, bucket: int) -> "Counter[int]":
        """Once for real: kernels compile and libraries take their workspaces outside of any capture."""
        with self._slots.counters.tallying() as tally:
            self._body(bucket)
        return tally

    def _graph(self, lane: Lane, bucket: int, expected: "Counter[int]", steps: Any) -> tuple[Graph, Any]:
        def body() -> Any:
            with self._slots.counters.tallying() as tally:
                results = self._body(bucket)
            if tally != expected:
                raise ValueError(f"bucket {bucket} called other kernels when captured than when warmed")
            self._slots.counters.add(steps)
            return results

        return self._device.capture(lane, body)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection within a capture could destroy a graph, or free memory of the device."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
