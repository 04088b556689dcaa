"""Cases of silu_and_mul: one of each layer, over what the gate and up projection gave."""

from collections.abc import Iterator, Sequence

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case

from polymorph.engine.slots import Slots


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """One for each number of tokens, in float32; none for a model whose layers are all experts."""
    if "num_local_experts" in shapes.config:
        return
    for m in tokens:
        rows = [torch.randn(m, 2 * shapes.intermediate) for _ in range(shapes.layers)]
        calls = [_call(slots, x) for x in rows]
        calls[0]()  # the first call of a width makes its site
        yield Case(operation, shapes.name, m, f"{operation}_d{shapes.intermediate}_f32", calls)


def _call(slots: Slots, x: torch.Tensor) -> Call:
    return lambda: slots.ops.silu_and_mul(x)
