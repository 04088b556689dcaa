"""Both arms of a comparison in one process: packed weights, slots of fresh inputs, and timed batches."""

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from polymorph.evaluator.adapters.sandbox import buffers
from polymorph.evaluator.adapters.sandbox.buffers import Window
from polymorph.evaluator.adapters.sandbox.lane import Process
from polymorph.evaluator.domain.number import ITEM, STORED, Array, Floats, load, poison, store
from polymorph.evaluator.domain.operation import Operation
from polymorph.evaluator.gates.calling import EPSILON, WEIGHTS
from polymorph.evaluator.gates.subject import GateFailed

_ALIGN = 64


class IncumbentRefused(RuntimeError):
    """The incumbent did not serve a call: there is nothing to compare with."""


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
    inputs: dict[str, Array]
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
        if not self._op.packs:
            self._map_weights("w")
        for name, window in {**self._inputs, "eps": self._scalar}.items():
            self._map(name, window, writable=False)
        for name, window in self._outputs.items():
            self._map(f"out-{name}", window, writable=True)

    def prepare(self, arm: str, *, raw: bool) -> None:
        """Packs every copy and lays out the slots of one arm."""
        if self._op.packs:
            name = f"w-{arm}"
            self._map_weights(name)
            specs = [self._weight(index, name) for index in range(len(self._weights.values))]
            answer = self._process.ask("pack", arm=arm, name=WEIGHTS, weights=specs, raw=raw, timeout_s=120)
            self.packed_bytes[arm] = int(answer["bytes"])
            if not raw and arm != "native":
                # An engine packs from a tensor that is gone afterwards: what was packed must not need it.
                self._process.ask("forbid", names=[name])
        self._process.ask(
            "pool", arm=arm, slots=self._slots, copies=len(self._weights.values), weights=WEIGHTS,
            inputs=self._specs(), outputs=self._out_specs(),
        )  # fmt: skip

    def run(self, arm: str, load: int, start: int, rng: np.random.Generator) -> Batch:
        """One batch of fresh contents, timed from here.

        Raises:
            GateFailed: the candidate refused a call, which it did not while it was checked.
            IncumbentRefused.
        """
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
            text = f"returned {answer['rc']} for M = {self._m}, which it claims to serve, when it was timed"
            raise GateFailed(text) if arm == "candidate" else IncumbentRefused(f"the incumbent {text}")
        share = (waited_after - waited) / max(waited_after - waited + ran_after - ran, 1e-9)
        inputs = {name: np.array(self._stored(window)) for name, window in self._inputs.items()}
        return Batch(arm, seconds, share, start, inputs, outputs)

    def call(self, batch: Batch, slot: int) -> tuple[dict[str, Floats], dict[str, Array]]:
        """Every input of one call of a batch, as exact values, and every output, as stored."""
        dtype, m = self._op.dtype, self._m
        at, out = slot * self._step // ITEM[dtype], slot * self._out_step // ITEM[dtype]
        inputs = {
            name: load(flat[at : at + self._rows].reshape(m, self._op.depth), dtype)
            for name, flat in batch.inputs.items()
        }
        inputs["weight"] = self._weights.values[(batch.start + slot) % len(self._weights.values)]
        inputs["eps"] = np.asarray(EPSILON, dtype=np.float32)
        outputs = {
            name: flat[out : out + m * self._op.columns].reshape(m, self._op.columns)
            for name, flat in batch.outputs.items()
        }
        return inputs, outputs

    def close(self) -> None:
        for window in (*self._inputs.values(), *self._outputs.values(), self._scalar):
            window.close()

    @property
    def _dtype(self) -> Any:
        return STORED[self._op.dtype]

    def _map_weights(self, name: str) -> None:
        fd = os.dup(self._weights.fd)
        self._process.ask("map", fds=(fd,), name=name, length=self._weights.length, writable=False)

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

    def _weight(self, index: int, name: str = "w") -> dict[str, Any]:
        shape = list(self._op.weight_shape())
        return {"map": name, "offset": index * self._weights.step, "shape": shape, "dtype": self._op.dtype}

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
