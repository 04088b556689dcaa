"""The evaluator's side of memory that a candidate maps: filled, poisoned and read here."""

import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def rounded(length: int) -> int:
    """The next multiple of the page."""
    return max(1, -(-length // mmap.PAGESIZE)) * mmap.PAGESIZE


def sealed(parts: list[tuple[int, Bytes]], length: int) -> int:
    """A descriptor of a memory file with `parts` at their offsets that nobody can write again, not even its maker."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    for offset, part in parts:
        _write(fd, part, offset)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


class Window:
    """Memory that the evaluator and a candidate share: the evaluator writes, or reads, whenever it wants."""

    def __init__(self, length: int) -> None:
        self.length = rounded(length)
        self._fd = os.memfd_create("window", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.length)
        self._map = mmap.mmap(self._fd, self.length)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    def descriptor(self, *, writable: bool) -> int:
        """A descriptor to send; without `writable` it can never be mapped for writing."""
        flags = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{self._fd}", flags | os.O_CLOEXEC)

    def view(self, offset: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`count` elements in place."""
        return np.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        os.close(self._fd)


def _write(fd: int, part: Bytes, offset: int) -> None:
    view = np.ascontiguousarray(part).data.cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
