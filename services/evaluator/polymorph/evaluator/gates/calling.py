"""Lays out one call's tensors in memory files, with poison where the candidate must write and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polymorph.evaluator.adapters.sandbox import buffers
from polymorph.evaluator.adapters.sandbox.buffers import Window
from polymorph.evaluator.adapters.sandbox.lane import Process
from polymorph.evaluator.domain.cases import Case, rows
from polymorph.evaluator.domain.number import ITEM, STORED, Array, Floats, load, poison, store
from polymorph.evaluator.domain.operation import Operation
from polymorph.evaluator.gates.subject import GateFailed

EPSILON = 1e-5
WEIGHTS = "w"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Stored values at a place in a mapping."""

    name: str
    stored: Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    length: int

    def spec(self) -> dict[str, Any]:
        return {
            "map": self.name, "offset": self.offset, "shape": list(self.shape), "strides": list(self.strides),
            "dtype": self.dtype,
        }  # fmt: skip


def place(name: str, values: Floats, dtype: str, *, end: bool, row_gap: int = 0) -> Tensor:
    """Rows with `row_gap` elements between them, against the page behind (`end`) or the page before."""
    stored = store(values, dtype)
    strides: tuple[int, ...] = (1,)
    if stored.ndim == 2:
        pitch = stored.shape[1] + row_gap
        strides = (pitch, 1)
        wide = np.full(
            (stored.shape[0], pitch), 0x7F7F if dtype == "bfloat16" else np.nan, dtype=stored.dtype
        )
        wide[:, : stored.shape[1]] = stored
        stored = wide.reshape(-1)[: wide.size - row_gap]
    nbytes = stored.nbytes
    length = buffers.rounded(nbytes)
    return Tensor(
        name, stored.reshape(-1), values.shape, strides, dtype, length - nbytes if end else 0, length
    )


@dataclass(slots=True)
class Inputs:
    """One case's values, exact as stored, and where they lie."""

    values: dict[str, Floats]
    tensors: dict[str, Tensor]


def inputs(
    op: Operation,
    case: Case,
    weight: Floats,
    rng: np.random.Generator,
    given: Mapping[str, Floats] | None = None,
) -> Inputs:
    """Draws the contents of a case; what is `given` by its name takes the place of what would be drawn."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Floats] = {"weight": weight}
    known = given or {}
    drawn: dict[str, Floats] = {"x": known["x"] if "x" in known else rows(case.kind, case.m, op.depth, rng)}
    if op.kind == "fused_add_rmsnorm":
        drawn["residual"] = (
            known["residual"] if "residual" in known else rows("normal", case.m, op.depth, rng)
        )
    if case.bias:
        drawn["bias"] = rng.standard_normal(op.columns, dtype=np.float32)
    for name, value in drawn.items():
        gap = case.row_gap if name != "bias" else 0
        tensors[name] = place(name, value, op.dtype, end=case.end, row_gap=gap)
        values[name] = load(store(value, op.dtype), op.dtype)
    if "eps" in op.definition.inputs:
        epsilon = np.asarray([EPSILON], dtype=np.float32)
        tensors["eps"], values["eps"] = place("eps", epsilon, "float32", end=True), epsilon
    return Inputs(values, tensors)


def specs(op: Operation, given: Inputs) -> list[dict[str, Any]]:
    """The inputs in the definition's order; the weight that is packed is named, an absent one is empty."""
    found: list[dict[str, Any]] = []
    for name in op.definition.inputs:
        if name == "weight":
            found.append({"packed": WEIGHTS} if op.packs else {**weight_spec(op), "map": "weight0"})
        elif name == "eps":
            found.append({**given.tensors[name].spec(), "scalar": True})
        else:
            found.append(given.tensors[name].spec() if name in given.tensors else {})
    return found


def weight_spec(op: Operation) -> dict[str, Any]:
    shape = list(op.weight_shape())
    length = int(np.prod(shape)) * ITEM[op.dtype]
    return {"offset": buffers.rounded(length) - length, "shape": shape, "dtype": op.dtype}


def send_weight(process: Process, op: Operation, weight: Floats, name: str) -> dict[str, Any]:
    """Maps a weight read-only with its last byte before a forbidden page."""
    spec = weight_spec(op)
    stored = np.ascontiguousarray(store(weight, op.dtype)).reshape(-1)
    length = buffers.rounded(stored.nbytes)
    fd = buffers.sealed([(spec["offset"], stored.view(np.uint8))], length)
    process.ask("map", fds=(fd,), name=name, length=length, writable=False)
    return {**spec, "map": name}


def send_inputs(process: Process, given: Inputs) -> None:
    for tensor in given.tensors.values():
        fd = buffers.sealed([(tensor.offset, tensor.stored.view(np.uint8))], tensor.length)
        process.ask("map", fds=(fd,), name=tensor.name, length=tensor.length, writable=False)


@dataclass(slots=True)
class Outputs:
    """Windows that a candidate writes its outputs to."""

    op: Operation
    case: Case
    windows: dict[str, Window] = field(default_factory=dict)

    def send(self, process: Process) -> list[dict[str, Any]]:
        found = []
        for name in self.op.definition.outputs:
            nbytes = self.case.m * self.op.columns * ITEM[self.op.dtype]
            window = Window(nbytes)
            self.windows[name] = window
            fd = window.descriptor(writable=True)
            process.ask("map", fds=(fd,), name=f"out-{name}", length=window.length, writable=True)
            offset = self._offset(window)
            shape = [self.case.m, self.op.columns]
            found.append({"map": f"out-{name}", "offset": offset, "shape": shape, "dtype": self.op.dtype})
        return found

    def poison(self) -> None:
        for window in self.windows.values():
            poison(window.view(0, window.length // ITEM[self.op.dtype], STORED[self.op.dtype]), self.op.dtype)

    def fill(self, name: str, given: Tensor) -> None:
        """An input's values where the output will lie: the call finds them there and nowhere else."""
        window = self.windows[name]
        offset = self._offset(window)
        window.bytes[offset : offset + given.stored.nbytes] = given.stored.view(np.uint8)

    def read(self) -> dict[str, Array]:
        """Copies of the outputs; raises where something beside them was written."""
        found = {}
        for name, window in self.windows.items():
            dtype = self.op.dtype
            everything = np.array(window.view(0, window.length // ITEM[dtype], STORED[dtype]))
            start, count = self._offset(window) // ITEM[dtype], self.case.m * self.op.columns
            found[name] = everything[start : start + count].reshape(self.case.m, self.op.columns).copy()
            poison(everything[start : start + count], dtype)
            clean = np.empty_like(everything)
            poison(clean, dtype)
            if everything.tobytes() != clean.tobytes():
                raise GateFailed(f"case {self.case.name}: wrote beside its output {name}")
        return found

    def close(self) -> None:
        for window in self.windows.values():
            window.close()

    def _offset(self, window: Window) -> int:
        nbytes = self.case.m * self.op.columns * ITEM[self.op.dtype]
        return window.length - nbytes if self.case.end else 0
