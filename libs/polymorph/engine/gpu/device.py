"""What a set of graphs asks of a device: lanes to capture on, fences, memory. `cuda.py` has the real one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class DeviceLost(RuntimeError):
    """The device's context no longer answers: nothing in this process can be saved, restart it."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Destroys it; no replay may be in flight."""


class Fence(Protocol):
    """A point in a stream."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Blocks the host until the stream has passed the point."""


Lane = Any
"""A stream to capture on (`.stream`), and a pool that its graphs' memory stays in when they are gone."""


class GraphDevice(Protocol):
    """Streams, pools and captures. A stream is compared with `==`."""

    def free_bytes(self) -> int: ...

    def new_lane(self) -> Lane: ...

    def current_stream(self) -> Any: ...

    def wait(self, stream: Any, other: Any) -> None:
        """What is put on `stream` from now on starts after what is on `other` now."""

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """This thread's current stream is the lane's."""

    def capture(self, lane: Lane, body: Callable[[], Any]) -> tuple[Graph, Any]:
        """Captures `body` on the lane; it may raise what `body` raises, and RuntimeError where the capture is invalid.
        After an error the lane must be abandoned.
        """

    def abandon(self, lane: Lane) -> None:
        """The lane is never used again.

        Raises:
            DeviceLost: the error was more than a failed capture.
        """

    def fence(self, stream: Any) -> Fence: ...
