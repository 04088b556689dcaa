"""Cases of a layer's experts, with even routing (`moe`) and with one expert that nearly every token takes (`moe_skewed`).

Weights are values of bfloat16 in float32, as a checkpoint gives them to a machine that computes in float32.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case

from polymorph.engine.slots import Slots

_MOST_LAYERS = 3
"""Far more than a cache holds, and a few of the largest models' layers still fit into memory three times."""
_SKEW = {"moe": 0.0, "moe_skewed": 4.0}
_layers: dict[str, list["_Layer"]] = {}


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """One for each number of tokens, in float32; none for a model without experts."""
    if "num_experts_per_tok" not in shapes.config:
        return
    if shapes.name not in _layers:
        count = min(shapes.layers, _MOST_LAYERS)
        _layers[shapes.name] = [_Layer(shapes, slots) for _ in range(count)]
    layers = _layers[shapes.name]
    for m in tokens:
        calls = [layer.call(m, _SKEW[operation]) for layer in layers]
        yield Case(operation, shapes.name, m, layers[0].definition, calls)


class _Layer:
    """The experts of one layer, packed by vLLM and kept for ours."""

    def __init__(self, shapes: Shapes, slots: Slots) -> None:
        self._experts, self._topk = (
            int(shapes.config[name]) for name in ("num_local_experts", "num_experts_per_tok")
        )
        self._hidden, inner = shapes.hidden, int(shapes.config["moe_intermediate_size"])
        w13 = (torch.randn(self._experts, 2 * inner, self._hidden) / self._hidden**0.5).bfloat16().float()
        w2 = (torch.randn(self._experts, self._hidden, inner) / inner**0.5).bfloat16().float()
        self._packed = tuple(torch.empty_like(weight) for weight in (w13, w2))
        for weight, packed in zip((w13, w2), self._packed, strict=True):
            torch.ops._C.prepack_moe_weight(weight, packed, "vec")  # noqa: SLF001 - what vLLM calls
        self._ops = slots.ops
        self._id = slots.add_moe((w13, w2), self._topk, "vec")
        self.definition = slots.layers[-1].definition

    def call(self, m: int, skew: float) -> Call:
        x = torch.randn(m, self._hidden)
        logits = torch.randn(m, self._experts)
        logits[:, 0] += skew
        weights, ids = torch.topk(torch.softmax(logits, -1), self._topk)
        weights, ids = (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.int().contiguous()
        run, packed, layer_id = self._ops.fused_moe, self._packed, self._id

        def call() -> Any:
            y = torch.empty_like(x)
            run(y, x, *packed, weights, ids, layer_id)
            return y

        return call
