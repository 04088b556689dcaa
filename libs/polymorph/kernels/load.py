"""Loads a kernel's library with ctypes and calls it on raw pointers: no torch, no numpy.

Only for libraries that `inspect_library` passed, in a process that may die: a kernel is native code.
"""

import ctypes
import hashlib
import math
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Self

MAX_DIMS = 4
ALIGNMENT = 64


class DtypeCode(IntEnum):
    """enum pm_dtype, by the dtype names of definitions."""

    float32 = 0
    bfloat16 = 1
    float16 = 2
    float64 = 3
    int8 = 4
    uint8 = 5
    int32 = 6
    int64 = 7

    @property
    def item_bytes(self) -> int:
        return (4, 2, 2, 8, 1, 1, 4, 8)[self]


class Tensor(ctypes.Structure):
    """pm_tensor: memory that somebody else owns."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )

    @classmethod
    def at(
        cls, address: int, sizes: Sequence[int], dtype: DtypeCode, strides: Sequence[int] | None = None
    ) -> Self:
        """A tensor at an address; contiguous where no strides (in elements) are given."""
        if len(sizes) > MAX_DIMS:
            raise ValueError(f"{len(sizes)} dimensions: the ABI has {MAX_DIMS}")
        if strides is None:
            strides = contiguous(sizes)
        tensor = cls(data=address, ndim=len(sizes), dtype=dtype)
        tensor.sizes[: len(sizes)] = list(sizes)
        tensor.strides[: len(sizes)] = list(strides)
        return tensor

    @classmethod
    def absent(cls, dtype: DtypeCode = DtypeCode.float32) -> Self:
        """An optional input that a call leaves out."""
        return cls(data=None, ndim=0, dtype=dtype)

    @classmethod
    def packed(cls, address: int, size: int) -> Self:
        """A packed weight of `size` bytes."""
        return cls.at(address, (size,), DtypeCode.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(math.prod(self.sizes[: self.ndim])) * DtypeCode(self.dtype).item_bytes


class Buffer:
    """Memory of our own, aligned to a cache line and filled with one byte."""

    def __init__(self, size: int, fill: int = 0xFF) -> None:
        self.size = size
        self._memory = (ctypes.c_char * (size + ALIGNMENT))()
        start = ctypes.addressof(self._memory)
        self.address = start + -start % ALIGNMENT
        ctypes.memset(self.address, fill, size)

    def content(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


class KernelUnusable(RuntimeError):
    """A library that does not load or lacks what is asked of it."""


class Kernel:
    """A loaded library. Loading the same path twice gives the same code: name files by their content."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
            self._run = self._library.pm_run
        except (OSError, AttributeError) as error:
            raise KernelUnusable(f"{path} does not load as a kernel: {error}") from error
        self._run.restype = ctypes.c_int32
        self.path = path
        self.packs = hasattr(self._library, "pm_pack") and hasattr(self._library, "pm_pack_bytes")
        if self.packs:
            self._library.pm_pack.restype = ctypes.c_int32
            self._library.pm_pack_bytes.restype = ctypes.c_int64

    @classmethod
    def from_content(cls, content: bytes, folder: Path) -> Self:
        """Keeps the bytes in `folder` under their sha256 and loads that file."""
        path = folder.resolve() / f"{hashlib.sha256(content).hexdigest()}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            staged = path.with_name(f"{path.name}.{os.getpid()}")
            staged.write_bytes(content)
            staged.replace(path)
        return cls(path)

    def run(self, context: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Calls pm_run; 0 where it served these arguments."""
        return self.call(context, inputs, outputs)()

    def call(self, context: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> "Call":
        """A call with its arguments made ready, for timing."""
        return Call(self._run, context, inputs, outputs)

    @property
    def address(self) -> int:
        """Where pm_run lies, for callers in C."""
        return ctypes.cast(self._run, ctypes.c_void_p).value or 0

    def pack_bytes(self, weight: Tensor) -> int:
        """Size of the packed weight; below 1 where the kernel cannot pack it."""
        self._must_pack()
        return int(self._library.pm_pack_bytes(ctypes.byref(weight)))

    def pack(self, context: int, weight: Tensor, packed: int) -> int:
        """Packs `weight` to the address `packed`; other than 0 where it cannot (a value that would be rounded, say)."""
        self._must_pack()
        pointer, target = ctypes.c_void_p(context), ctypes.c_void_p(packed)
        return int(self._library.pm_pack(pointer, ctypes.byref(weight), target))

    def _must_pack(self) -> None:
        if not self.packs:
            raise KernelUnusable(f"{self.path} exports no pm_pack and pm_pack_bytes")


class Call:
    """pm_run bound to arguments; keeps them alive."""

    def __init__(
        self, function: object, context: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        self._function = ctypes.CFUNCTYPE(
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_int32,
        )(ctypes.cast(function, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]
        self._inputs = (Tensor * len(inputs))(*inputs)
        self._outputs = (Tensor * len(outputs))(*outputs)
        self._arguments = (
            context,
            ctypes.addressof(self._inputs),
            len(inputs),
            ctypes.addressof(self._outputs),
            len(outputs),
        )

    def __call__(self) -> int:
        return int(self._function(*self._arguments))


def contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
