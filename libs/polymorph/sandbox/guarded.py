"""Memory that a process and those it forks share, between two pages that no access survives."""

import ctypes
import mmap
import os

ALIGNMENT = 64
_MARGIN = b"\xa5"
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """`length` bytes that end, but for alignment, where a guard page begins; `shut` makes that so, in one process."""

    def __init__(self, length: int) -> None:
        page = mmap.PAGESIZE
        self.length = length
        self._inner = max(1, -(-length // page)) * page
        self._map = mmap.mmap(-1, self._inner + 2 * page)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._offset = page + (self._inner - length) // ALIGNMENT * ALIGNMENT
        for margin in self._margins():
            self._map[margin] = _MARGIN * (margin.stop - margin.start)

    @property
    def address(self) -> int:
        return self._base + self._offset

    def view(self) -> memoryview:
        """The bytes in place, to write and to read."""
        return memoryview(self._map)[self._offset : self._offset + self.length]

    def intact(self) -> bool:
        """Whether nobody wrote what lies between the bytes and their guards."""
        return not any(self._map[margin].strip(_MARGIN) for margin in self._margins())

    def _margins(self) -> tuple[slice, slice]:
        page, end = mmap.PAGESIZE, self._offset + self.length
        return slice(page, self._offset), slice(end, page + self._inner)

    def shut(self, *, writable: bool) -> None:
        """From now on this process dies where it writes what is not `writable`, or touches what lies beside."""
        page = mmap.PAGESIZE
        inner = _PROT_READ | (_PROT_WRITE if writable else 0)
        _protect(self._base, page, _PROT_NONE)
        _protect(self._base + page, self._inner, inner)
        _protect(self._base + page + self._inner, page, _PROT_NONE)


def _protect(address: int, length: int, protection: int) -> None:
    if _libc.mprotect(address, length, protection) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mprotect of {length} bytes: {os.strerror(error)}")
