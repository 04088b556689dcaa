"""Cases of the rotary embedding, with the norm of the heads where the model has one: one of each layer, over a projection."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case

from polymorph.engine.slots import Slots
from polymorph.kernels.definitions import Heads, qk_norm_rotary_definition, rotary_definition


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """One for each number of tokens, in float32; none where the model has the other of the two operations."""
    normed = str(shapes.config["model_type"]).startswith("qwen3")
    if normed != (operation == "qk_norm_rotary"):
        return
    heads = Heads(shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.head_dim)
    definition = qk_norm_rotary_definition if normed else rotary_definition
    cache = torch.randn(2048, shapes.head_dim)
    for m in tokens:
        layers = [_Layer(shapes, m) for _ in range(shapes.layers)]
        if normed:
            calls = [layer.normed(slots.ops, cache) for layer in layers]
            without_slot = [layer.apart(slots.ops, cache) for layer in layers]
        else:
            calls = [layer.turned(slots.ops, cache) for layer in layers]
            without_slot = [layer.in_place(cache) for layer in layers]
        calls[0]()  # the first call of a shape makes its site
        yield Case(
            operation, shapes.name, m, definition(heads, "float32").name, calls, without_slot=without_slot
        )


class _Layer:
    """Data of one attention layer; query and key are views of what the projection gave."""

    def __init__(self, shapes: Shapes, m: int) -> None:
        self._shapes = shapes
        query, key = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
        self._query, self._key, _ = torch.randn(m, query + 2 * key).split([query, key, key], dim=-1)
        self._positions = torch.randint(0, 2048, (m,))
        self._weights = torch.rand(shapes.head_dim), torch.rand(shapes.head_dim)

    def turned(self, ops: Any, cache: Any) -> Call:
        positions, query, key, width = self._positions, self._query, self._key, self._shapes.head_dim
        return lambda: ops.rotary(positions, query, key, cache, width, True)

    def in_place(self, cache: Any) -> Call:
        """What vLLM's layer calls in eager mode."""
        positions, query, key, width = self._positions, self._query, self._key, self._shapes.head_dim
        turn = torch.ops._C.rotary_embedding  # noqa: SLF001 - what vLLM calls
        return lambda: turn(positions, query, key, width, cache, True)

    def normed(self, ops: Any, cache: Any) -> Call:
        positions, query, key, width = self._positions, self._query, self._key, self._shapes.head_dim
        weights, eps = self._weights, self._shapes.eps
        return lambda: ops.qk_norm_rotary(positions, query, key, cache, *weights, eps, width, True)

    def apart(self, ops: Any, cache: Any) -> Call:
        """The norms and the rotation as three calls, as vLLM's layer has them, the norms through their (empty) slot."""
        positions, query, key, width = self._positions, self._query, self._key, self._shapes.head_dim
        (query_weight, key_weight), eps = self._weights, self._shapes.eps
        turn = torch.ops._C.rotary_embedding  # noqa: SLF001 - what vLLM calls

        def call() -> Any:
            normed_query = ops.rms_norm(query.unflatten(-1, (-1, width)), query_weight, eps).view(query.shape)
            normed_key = ops.rms_norm(key.unflatten(-1, (-1, width)), key_weight, eps).view(key.shape)
            turn(positions, normed_query, normed_key, width, cache, True)
            return normed_query, normed_key

        return call
