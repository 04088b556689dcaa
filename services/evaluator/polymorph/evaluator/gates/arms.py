"""Both arms of a comparison in one process: packed weights, slots of fresh inputs, and timed batches."""

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from polymorph.evaluator.adapters.sandbox import buffers
from polymorph.evaluator.adapters.sandbox.buffers import Window
from polymorph.evaluator.adapters.sandbox.lane import Process
from polymorph.evaluator.domain.number import ITEM, STORED, Array, Floats, poison, store
from polymorph.evaluator.domain.operation import Operation
from polymorph.evaluator.gates.calling import EPSILON, WEIGHTS

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of a weight in one sealed memory file, and their exact values for checking."""

    values: list[Floats]
    fd: int
    step: int
    length: int

    @classmethod
    def draw(cls, op: Operation, base: Floats, copies: int, rng: np.random.Generator) -> "Weights":
        """Copies that differ: the same values from another place on."""
        flat = base.reshape(-1)
        values = [np.roll(flat, int(rng.integers(flat.size))).reshape(base.shape) for _ in range(copies)]
        step = -(-base.size * ITEM[op.dtype] // _ALIGN) * _ALIGN
        length = buffers.rounded(step * copies)
        parts = [
            (index * step, np.ascontiguousarray(store(value, op.dtype)).reshape(-1).view(np.uint8))
            for index, value in enumerate(values)
        ]
        return cls(values, buffers.sealed(parts, length), step, length)


@dataclass(frozen=True, slots=True)
class Batch:
    """One timed batch: its seconds, the share of processor time it had to wait for, and what was computed."""

    arm: str
    seconds: float
    waited: float
    start: int
    x: Array
    outputs: dict[str, Array]


class Arms:
    """Prepares one process and times batches in it. The clock and all contents are the evaluator's."""

    def __init__(
        self, process: Process, op: Operation, weights: Weights, m: int, slots: int, bank: Array
    ) -> None:
        self._process, self._op, self._weights = process, op, weights
        self._m, self._slots, self._bank = m, slots, bank
        self._rows = m * op.depth
        self._step = -(-self._rows * ITEM[op.dtype] // _ALIGN) * _ALIGN
        self._out_step = -(-m * op.columns * ITEM[op.dtype] // _ALIGN) * _ALIGN
        names = ["x", "residual"] if op.kind == "fused_add_rmsnorm" else ["x"]
        self._inputs = {name: Window(self._step * slots) for name in names}
        self._outputs = {name: Window(self._out_step * slots) for name in op.definition.outputs}
        self._scalar = Window(ITEM["float32"])
        self._scalar.view(0, 1, np.float32)[0] = EPSILON
        self.packed_bytes: dict[str, int] = {}

    def map(self) -> None:
        """Maps weights, inputs and outputs into the process."""
        self._process.ask(
            "map", fds=(os.dup(self._weights.fd),), name="w", length=self._weights.length, writable=False
        )
        for name, window in {**self._inputs, "eps": self._scalar}.items():
            self._map(name, window, writable=False)
        for name, window in self._outputs.items():
            self._map(f"out-{name}", window, writable=True)

    def prepare(self, arm: str, *, raw: bool) -> None:
        """Packs every copy and lays out the slots of one arm."""
        if self._op.packs:
            specs = [self._weight(index) for index in range(len(self._weights.values))]
            answer = self._process.ask("pack", arm=arm, name=WEIGHTS, weights=specs, raw=raw, timeout_s=120)
            self.packed_bytes[arm] = int(answer["bytes"])
        self._process.ask(
            "pool", arm=arm, slots=self._slots, copies=len(self._weights.values), weights=WEIGHTS,
            inputs=self._specs(), outputs=self._out_specs(),
        )  # fmt: skip

    def run(self, arm: str, load: int, start: int, rng: np.random.Generator) -> Batch:
        """One batch of fresh contents, timed from here."""
        for window in self._inputs.values():
            self._refresh(window, rng)
        for window in self._outputs.values():
            self._poison(window)
        ran, waited = self._process.waited()
        began = time.perf_counter()
        answer = self._process.ask("batch", arm=arm, load=load, start=start, count=self._slots)
        seconds = time.perf_counter() - began
        # What is there now is what was computed in time: anything written later is not in this copy.
        outputs = {name: np.array(self._stored(window)) for name, window in self._outputs.items()}
        ran_after, waited_after = self._process.waited()
        if answer["rc"] != 0:
            raise ValueError(f"returned {answer['rc']} for M = {self._m}, which it claims to serve")
        share = (waited_after - waited) / max(waited_after - waited + ran_after - ran, 1e-9)
        x = np.array(self._inputs["x"].view(0, self._inputs["x"].length // ITEM[self._op.dtype], self._dtype))
        return Batch(arm, seconds, share, start, x, outputs)

    def call(self, batch: Batch, slot: int) -> tuple[Array, Array, Floats]:
        """x, the first output and the weight of one call of a batch."""
        item = ITEM[self._op.dtype]
        at, out = slot * self._step // item, slot * self._out_step // item
        x = batch.x[at : at + self._rows].reshape(self._m, self._op.depth)
        flat = next(iter(batch.outputs.values()))
        y = flat[out : out + self._m * self._op.columns].reshape(self._m, self._op.columns)
        return x, y, self._weights.values[(batch.start + slot) % len(self._weights.values)]

    def close(self) -> None:
        for window in (*self._inputs.values(), *self._outputs.values(), self._scalar):
            window.close()

    @property
    def _dtype(self) -> Any:
        return STORED[self._op.dtype]

    def _map(self, name: str, window: Window, *, writable: bool) -> None:
        fd = window.descriptor(writable=writable)
        self._process.ask("map", fds=(fd,), name=name, length=window.length, writable=writable)

    def _stored(self, window: Window) -> Array:
        return window.view(0, window.length // ITEM[self._op.dtype], self._dtype)

    def _refresh(self, window: Window, rng: np.random.Generator) -> None:
        stored = self._stored(window)
        offset = int(rng.integers(self._bank.size - stored.size))
        stored[:] = self._bank[offset : offset + stored.size]

    def _poison(self, window: Window) -> None:
        poison(self._stored(window), self._op.dtype)

    def _weight(self, index: int) -> dict[str, Any]:
        shape = list(self._op.weight_shape())
        return {"map": "w", "offset": index * self._weights.step, "shape": shape, "dtype": self._op.dtype}

    def _specs(self) -> list[dict[str, Any]]:
        row = {"offset": 0, "shape": [self._m, self._op.depth], "dtype": self._op.dtype, "step": self._step}
        known: dict[str, dict[str, Any]] = {
            "x": {**row, "map": "x"},
            "residual": {**row, "map": "residual"},
            "weight": {"packed": WEIGHTS} if self._op.packs else self._weight(0),
            "eps": {"map": "eps", "offset": 0, "shape": [1], "dtype": "float32", "scalar": True},
        }
        return [known.get(name, {}) for name in self._op.definition.inputs]

    def _out_specs(self) -> list[dict[str, Any]]:
        shape = [self._m, self._op.columns]
        return [
            {
                "map": f"out-{name}",
                "offset": 0,
                "shape": shape,
                "dtype": self._op.dtype,
                "step": self._out_step,
            }
            for name in self._outputs
        ]
