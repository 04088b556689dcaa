"""The table of a GPU's slots: which kernel serves a call, by definition and bucket of M."""

import bisect
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from polymorph.engine.bindings import ANY, BindingRefused, SlotBinding, checked
from polymorph.engine.gpu.artifact import TritonKernel
from polymorph.engine.gpu.counters import Cell, Counters
from polymorph.engine.gpu.source import SourceRefused, operation_of
from polymorph.kernels.buckets import UPPER_BOUNDS

SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_LAST = len(UPPER_BOUNDS) - 1
_SIZES = {"linear": "gemm_n{}_k{}_{}", "silu_and_mul": "silu_and_mul_d{}_{}"}


def definition_name(operation: str, sizes: tuple[int, ...], dtype: Any) -> str:
    """The name of a definition, as `polymorph.kernels.definitions` has it."""
    return _SIZES.get(operation, operation + "_h{}_{}").format(*sizes, SHORT[dtype])


@dataclass(frozen=True)
class Entry:
    """One kernel in one bucket."""

    kernel: TritonKernel
    cell: int


@dataclass(frozen=True, eq=False)
class Table:
    """What every slot runs; a slot that is not in it runs the engine's own code. Never changed, only replaced."""

    bindings: tuple[SlotBinding, ...] = ()
    rows: Mapping[str, tuple[Entry | None, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, bindings: Iterable[SlotBinding], kernels: Mapping[str, TritonKernel], counters: Counters
    ) -> "Table":
        """A table of bindings, with the loaded kernels by artifact.

        Raises:
            BindingRefused: two claim a bucket, a bucket is cut, or a kernel is of another operation or not loaded.
        """
        wanted = tuple(bindings)
        wanted = tuple(checked(map(vars, wanted), [binding.definition for binding in wanted]))
        rows: dict[str, list[Entry | None]] = {}
        for binding in wanted:
            kernel = _fitting(binding, kernels)
            row = rows.setdefault(binding.definition, [None] * len(UPPER_BOUNDS))
            for index in binding.buckets():
                cell = Cell(binding.definition, UPPER_BOUNDS[index], kernel.artifact)
                row[index] = Entry(kernel, counters.index(cell))
        return cls(wanted, {definition: tuple(row) for definition, row in rows.items()})


@dataclass
class SlotTable:
    """The table that serves, and in a thread that captures the one that is to serve."""

    counters: Counters
    engaged: Table = field(default_factory=Table)
    _threads: threading.local = field(default_factory=threading.local)
    _names: dict[tuple[str, tuple[int, ...], Any], str] = field(default_factory=dict)

    def find(self, operation: str, sizes: tuple[int, ...], dtype: Any, m: int) -> Entry | None:
        """What serves a call of `m` tokens; None is the engine's own code."""
        rows = (getattr(self._threads, "table", None) or self.engaged).rows
        if not rows:
            return None
        key = (operation, sizes, dtype)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = definition_name(operation, sizes, dtype) if dtype in SHORT else ""
        row = rows.get(name)
        return None if row is None or m < 1 else row[min(bisect.bisect_left(UPPER_BOUNDS, m), _LAST)]

    @contextmanager
    def using(self, table: Table) -> Iterator[None]:
        """Calls of this thread use `table`; other threads go on with what is engaged."""
        self._threads.table = table
        try:
            yield
        finally:
            self._threads.table = None

    def engage(self, table: Table) -> Table:
        """Makes `table` the one that serves, and gives the one that did. Hold on to that until its launches are done."""
        before, self.engaged = self.engaged, table
        return before


def _fitting(binding: SlotBinding, kernels: Mapping[str, TritonKernel]) -> TritonKernel:
    if (binding.least, binding.most) != (0, ANY):
        raise BindingRefused(
            f"{binding.definition}: slots on a GPU choose by M alone, not from {binding.least} to {binding.most}"
        )
    kernel = kernels.get(binding.artifact)
    if kernel is None:
        raise BindingRefused(f"{binding.definition}: artifact {binding.artifact[:12]} was not loaded")
    try:
        operation = operation_of(binding.definition)
    except SourceRefused as error:
        raise BindingRefused(str(error)) from error
    if kernel.operation != operation:
        raise BindingRefused(
            f"{binding.definition}: artifact {binding.artifact[:12]} computes {kernel.operation}, not {operation}"
        )
    return kernel
