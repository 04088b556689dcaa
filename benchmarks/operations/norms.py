"""Cases of rms_norm and fused_add_rms_norm: two of each layer, over the hidden state."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case

from polymorph.engine.slots import Slots


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """One for each number of tokens, in float32."""
    for m in tokens:
        layers = [_Layer(shapes, m) for _ in range(2 * shapes.layers)]
        calls = [layer.call(operation, slots.ops) for layer in layers]
        calls[0]()  # the first call of a width makes its site
        yield Case(operation, shapes.name, m, f"{operation}_h{shapes.hidden}_f32", calls)


class _Layer:
    """Data of one norm."""

    def __init__(self, shapes: Shapes, m: int) -> None:
        self._x, self._residual = torch.randn(m, shapes.hidden), torch.randn(m, shapes.hidden)
        self._weight = torch.randn(shapes.hidden)
        self._eps = shapes.eps

    def call(self, operation: str, ops: Any) -> Call:
        x, residual, weight, eps = self._x, self._residual, self._weight, self._eps
        if operation == "rms_norm":
            return lambda: ops.rms_norm(x, weight, eps)
        return lambda: ops.fused_add_rms_norm(x, residual, weight, eps)
