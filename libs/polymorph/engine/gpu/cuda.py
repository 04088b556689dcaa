"""Streams, pools and captures of one CUDA device, as torch has them.

Captures use CUDAGraph itself and not `torch.cuda.graph`: that one waits for the whole device and gives back cached
memory, which stops whoever serves beside it. They are thread-local: what another thread does is no part of them.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from polymorph.engine.gpu.device import DeviceLost

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: work on the legacy default stream neither waits for such a stream nor spoils its capture."""


@dataclass(eq=False)
class CudaLane:
    """`keeper` is a graph that is never replayed. It holds the pool, so that graphs which come later find the memory of
    those that went: a pool without any graph is given up by the allocator, and its name may not be used again.
    """

    stream: Any
    pool: Any
    keeper: Any = None


class CudaFence:
    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """The device that is current where this is made."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device(device or f"cuda:{torch.cuda.current_device()}")
        self._cell = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._cell.add_(0)
        _ = self._cell + 1  # what a capture launches has been loaded before
        # The allocator keeps asking a capture that failed whether an allocation is its own: it must not be freed.
        self._failed: list[Any] = []

    def free_bytes(self) -> int:
        """As the driver tells it; memory that torch has cached is not counted."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def new_lane(self) -> CudaLane:
        lane = CudaLane(self._new_stream(), torch.cuda.graph_pool_handle())
        lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.on(lane):
            # A cell of its own within the pool: a pool is only there once something was allocated in it.
            lane.keeper, _ = self.capture(lane, lambda: self._cell + 1)
        return lane

    def _new_stream(self) -> Any:
        """A stream that nobody else is given. torch hands out 32 in turn: whoever got the same one while it captures
        would be captured with it.
        """
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info()  # makes the device's context current in this thread
            handle = ctypes.c_void_p()
            try:
                status = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
            except (OSError, AttributeError) as error:
                raise DeviceLost(f"libcuda.so.1 cannot be called: {error}") from error
            if status != 0:
                raise DeviceLost(f"the driver gives no stream (cuStreamCreate: {status})")
            return torch.cuda.ExternalStream(handle.value, device=self.device)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def wait(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)

    @contextmanager
    def on(self, lane: CudaLane) -> Iterator[None]:
        with torch.cuda.stream(lane.stream), torch.inference_mode():
            yield

    def capture(self, lane: CudaLane, body: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=lane.pool, capture_error_mode="thread_local")
            results = self._within(graph, body)
            graph.capture_end()
        except RuntimeError:
            self._end_allocation(graph, lane)
            raise
        return graph, results

    def abandon(self, lane: CudaLane) -> None:
        try:
            with self.on(lane):
                self._cell.add_(0)
            lane.stream.synchronize()
            lane.keeper = None
            # Its memory goes back to the driver. That halts the device for a moment, and errors are rare.
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLost(f"{self.device} answers no more after a failed capture: {error}") from error

    def fence(self, stream: Any) -> CudaFence:
        return CudaFence(stream)

    def _within(self, graph: Any, body: Callable[[], Any]) -> Any:
        try:
            return body()
        except BaseException:
            # Half a capture is ended like a whole one, and thrown away.
            graph.capture_end()
            graph.reset()
            raise

    def _end_allocation(self, graph: Any, lane: CudaLane) -> None:
        """An invalid capture makes `capture_end` raise before it has told the allocator that the capture is over."""
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, lane.pool)  # noqa: SLF001 - there is no other way
        except RuntimeError:
            return  # it had been told
        self._failed.append(graph)
        torch._C._cuda_releasePool(self.device.index, lane.pool)  # noqa: SLF001 - what the graph's end would do
