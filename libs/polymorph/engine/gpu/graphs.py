"""Captured graphs by bucket of M, replaced while they serve: a second set is captured beside the first, then one flip.

A graph holds the code that was captured. So a new table is captured anew on a lane of its own (stream and memory pool)
while the old set replays, and becomes the one that serves between two runs. The old set stays for rollback, or is
destroyed once no replay of it can be in flight. Where memory does not allow two sets, runs wait for the recapture.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from polymorph.engine.gpu.captured import Body, Captured, CaptureFailed, Capturer
from polymorph.engine.gpu.device import Fence, GraphDevice, Lane
from polymorph.engine.gpu.slots import SlotTable, Table


class NoRoom(RuntimeError):
    """Two sets of graphs do not fit into the device's memory."""


class ChangeRefused(RuntimeError):
    """Another change is under way, or there is nothing to go back to."""


@dataclass(frozen=True)
class Engaged:
    """What a change did. `way` is beside, drained or kept; `inverse` is the table to engage to take it back."""

    epoch: int
    way: str
    inverse: Table
    capture_s: float
    flip_s: float
    paused_s: float = 0.0


class GraphSet:
    """Runs buckets from one thread or several, one at a time; a change may come from another thread.

    `keep` earlier sets stay for rollback. `spare_bytes` of the device's memory are never taken for a second set.
    """

    def __init__(
        self,
        device: GraphDevice,
        slots: SlotTable,
        body: Body,
        buckets: Sequence[int],
        *,
        keep: int = 1,
        spare_bytes: int = 256 << 20,
    ) -> None:
        self._device = device
        self._slots = slots
        self._body = body
        self._capturer = Capturer(device, slots, body, buckets)
        self._keep = keep
        self._spare = spare_bytes
        self._turn = threading.Lock()
        self._change = threading.Lock()
        self._last: Any = None
        self._active = Captured(slots.engaged)
        self._kept: deque[Captured] = deque()
        self._leaving: list[Captured] = []
        self._lanes: list[Lane] = []
        self._set_bytes = 0
        self.epoch = 0

    def run(self, bucket: int, fill: Callable[[], Any] | None = None) -> Any:
        """Replays the bucket's graph on the current stream, or runs the body where it has none; gives the results,
        which the bucket's next run overwrites. Runs on other streams are put in order; `fill` is called when this one
        is, to write the static inputs.
        """
        with self._turn:
            stream = self._device.current_stream()
            if self._last is not None and stream != self._last:
                self._device.wait(stream, self._last)
            self._last = stream
            if fill is not None:
                fill()
            captured = self._active.graphs.get(bucket)
            if captured is None:
                return self._body(bucket)
            graph, results = captured
            graph.replay()
            return results

    def engage(self, table: Table) -> Engaged:
        """Makes `table` what every bucket runs.

        Raises:
            ChangeRefused: another change is under way.
            CaptureFailed: the old table serves on.
            DeviceLost: restart the process.
        """
        with self._one_change():
            try:
                prepared = self._prepared(table)
            except NoRoom:
                return self._drained(table)
            return self._flip(prepared)

    def prepare(self, table: Table) -> Captured:
        """The first half of `engage`, for ranks that must change at one step: captures, and changes nothing.

        Raises:
            NoRoom: it needs a drain. ChangeRefused, CaptureFailed, DeviceLost: as `engage`.
        """
        with self._one_change():
            return self._prepared(table)

    def commit(self, prepared: Captured) -> Engaged:
        """The second half: one flip between two runs."""
        with self._one_change():
            return self._flip(prepared)

    def discard(self, prepared: Captured) -> None:
        """Another rank was not ready: what was prepared has never run, and goes."""
        with self._one_change():
            self._free(prepared)

    def rollback(self) -> Engaged:
        """Back to the set before, without a capture. The one that is left is destroyed.

        Raises:
            ChangeRefused: none is kept.
        """
        with self._one_change():
            if not self._kept:
                raise ChangeRefused("no earlier set of graphs is kept: engage the earlier table instead")
            with self._turn:
                left, engaged = self._flipped(self._kept.popleft(), "kept")
            self._leaving.append(left)
            self._sweep()
            return engaged

    def close(self) -> None:
        """Waits for what is in flight and destroys everything; runs go on without graphs."""
        with self._one_change(), self._turn:
            self._settle()
            for captured in (self._active, *self._kept, *self._leaving):
                captured.destroy()
            self._active = Captured(self._slots.engaged)
            self._kept.clear()
            self._leaving.clear()
            self._lanes.clear()

    @contextmanager
    def _one_change(self) -> Iterator[None]:
        if not self._change.acquire(blocking=False):
            raise ChangeRefused("another change of the graphs is under way")
        try:
            yield
        finally:
            self._change.release()

    def _prepared(self, table: Table) -> Captured:
        self._sweep()
        return self._captured(table, self._lane())

    def _captured(self, table: Table, lane: Lane) -> Captured:
        free = self._device.free_bytes()
        captured = self._capturer.capture(table, lane, self._last)
        self._set_bytes = max(self._set_bytes, free - self._device.free_bytes())
        return captured

    def _lane(self) -> Lane:
        """A lane that no set uses. Memory of a lane that was used is there already; a new one needs as much again."""
        while not self._lanes:
            if self._leaving:
                self._sweep(wait=True)
            elif self._device.free_bytes() >= self._set_bytes + self._spare:
                return self._device.new_lane()
            elif self._kept:
                self._leaving.append(self._kept.pop())
            else:
                raise NoRoom(
                    f"less than {(self._set_bytes + self._spare) >> 20} MiB are free for a second set"
                )
        return self._lanes.pop()

    def _flip(self, captured: Captured) -> Engaged:
        with self._turn:
            before, engaged = self._flipped(captured, "beside")
        if before.graphs:
            self._kept.appendleft(before)
        else:
            self._leaving.append(before)  # there is nothing in it to go back to
        while len(self._kept) > self._keep:
            self._leaving.append(self._kept.pop())
        self._sweep()
        return engaged

    def _flipped(self, captured: Captured, way: str) -> tuple[Captured, Engaged]:
        """The caller has the turn: no run is between its look at the set and its replay."""
        began = time.perf_counter()
        before, self._active = self._active, captured
        self._slots.engage(captured.table)
        before.fence = self._fenced()
        self.epoch += 1
        flip_s = time.perf_counter() - began
        return before, Engaged(self.epoch, way, before.table, captured.seconds, flip_s)

    def _fenced(self) -> Fence | None:
        # Each run waited for the one before it, on whatever stream: the last stream is behind all of them.
        return None if self._last is None else self._device.fence(self._last)

    def _settle(self) -> None:
        fence = self._fenced()
        if fence is not None:
            fence.wait()

    def _drained(self, table: Table) -> Engaged:
        """Runs wait while the only set that fits is captured. On an error the old table is captured again."""
        with self._turn:
            began = time.monotonic()
            old = self._active
            self._settle()
            self._active = Captured(old.table)
            self._free(old)
            try:
                captured = self._captured(
                    table, self._lanes.pop() if self._lanes else self._device.new_lane()
                )
            except CaptureFailed as error:
                self._restore(old.table, error)
                raise
            _, engaged = self._flipped(captured, "drained")
            paused_s = time.monotonic() - began
        return Engaged(engaged.epoch, "drained", old.table, engaged.capture_s, engaged.flip_s, paused_s)

    def _restore(self, table: Table, error: CaptureFailed) -> None:
        try:
            self._active = self._captured(table, self._device.new_lane())
        except CaptureFailed as again:
            raise CaptureFailed(f"{error}; the old table serves without graphs, since {again}") from error

    def _sweep(self, *, wait: bool = False) -> None:
        """Destroys the sets that left, where no replay of them can be in flight."""
        for captured in list(self._leaving):
            if captured.fence is not None and wait:
                captured.fence.wait()
            if captured.fence is None or captured.fence.done():
                self._leaving.remove(captured)
                self._free(captured)

    def _free(self, captured: Captured) -> None:
        captured.destroy()
        if captured.lane is not None:
            self._lanes.append(captured.lane)
            captured.lane = None
