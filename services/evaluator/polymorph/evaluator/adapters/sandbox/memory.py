"""Memory as a candidate sees it: shared or private mappings, each between two pages that no access survives."""

import ctypes
import mmap
import os
from dataclasses import dataclass

MAX_DIMS = 4
PM_U8 = 5

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PmTensor(ctypes.Structure):
    """`pm_tensor` of polymorph_kernel.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of memory; one page before it and one behind it are forbidden."""

    address: int
    length: int

    def protect(self) -> None:
        """Read-only from now on."""
        _checked(_libc.mprotect(self.address, self.length, _PROT_READ), "mprotect")

    def forbid(self) -> None:
        """No access survives from now on; the addresses stay taken, so that nothing else comes to lie there."""
        _checked(_libc.mprotect(self.address, self.length, _PROT_NONE), "mprotect")

    def unmap(self) -> None:
        page = mmap.PAGESIZE
        _checked(_libc.munmap(self.address - page, self.length + 2 * page), "munmap")

    def buffer(self, offset: int, length: int) -> "ctypes.Array[ctypes.c_char]":
        """The bytes in place, for torch.frombuffer."""
        return (ctypes.c_char * length).from_address(self.address + offset)


def shared(fd: int, length: int, *, writable: bool) -> Mapping:
    """Maps a memory file between guard pages and closes the descriptor; `length` is a multiple of the page."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    mapping = _between_guards(length, protection, _MAP_SHARED, fd)
    os.close(fd)
    return mapping


def private(length: int) -> Mapping:
    """Fresh zeroed memory between guard pages."""
    rounded = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    return _between_guards(rounded, _PROT_READ | _PROT_WRITE, _MAP_PRIVATE | _MAP_ANONYMOUS, -1)


def stir(pages: int) -> None:
    """Moves where the next mappings land, so that loads of one process do not share their placement."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    _mapped(0, pages * mmap.PAGESIZE, _PROT_NONE, flags, -1)


def _between_guards(length: int, protection: int, flags: int, fd: int) -> Mapping:
    page = mmap.PAGESIZE
    outer = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
    base = _mapped(0, length + 2 * page, _PROT_NONE, outer, -1)
    _mapped(base + page, length, protection, flags | _MAP_FIXED, fd)
    return Mapping(base + page, length)


def _mapped(address: int, length: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address or None, length, protection, flags, fd, 0)
    if result in (None, _FAILED):
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {length} bytes: {os.strerror(error)}")
    return int(result)


def _checked(result: int, call: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
