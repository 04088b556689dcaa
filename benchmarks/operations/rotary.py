"""Cases of the rotary embedding, with the norm of the heads where the model has one: one of each layer, over a projection."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case

from polymorph.engine.slots import Slots
from polymorph.kernels.definitions import Heads, qk_norm_rotary_definition, rotary_definition


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """One for each number of tokens, in float32; none where the model has the other of the operations. `rotary` is what a
    compiled graph calls, `rotary_in_place` what a layer calls without one.
    """
    normed = str(shapes.config["model_type"]).startswith("qwen3")
    if normed != (operation == "qk_norm_rotary"):
        return
    heads = Heads(shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.head_dim)
    name = (qk_norm_rotary_definition if normed else rotary_definition)(heads, "float32").name
    cache = _angles(shapes.head_dim)
    for m in tokens:
        layers = [_Layer(shapes, m) for _ in range(shapes.layers)]
        calls = [layer.call(operation, slots.ops, cache) for layer in layers]
        calls[0]()  # the first call of a shape makes its site
        apart = [layer.apart(slots.ops, cache) for layer in layers] if normed else ()
        yield Case(operation, shapes.name, m, name, calls, without_slot=apart)


def _angles(width: int) -> Any:
    """Cosines and sines of 2,048 positions: turning again and again keeps the size of values."""
    angles = torch.outer(torch.arange(2048.0), 1e4 ** -torch.arange(0, 1, 2 / width))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class _Layer:
    """Data of one attention layer; query and key are views of what the projection gave."""

    def __init__(self, shapes: Shapes, m: int) -> None:
        self._shapes = shapes
        query, key = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
        self._query, self._key, _ = torch.randn(m, query + 2 * key).split([query, key, key], dim=-1)
        self._positions = torch.randint(0, 2048, (m,))
        self._weights = torch.rand(shapes.head_dim), torch.rand(shapes.head_dim)

    def call(self, operation: str, ops: Any, cache: Any) -> Call:
        positions, query, key, width = self._positions, self._query, self._key, self._shapes.head_dim
        weights, eps = self._weights, self._shapes.eps
        if operation == "rotary":
            return lambda: ops.rotary(positions, query, key, cache, width, True)
        if operation == "rotary_in_place":
            return lambda: ops.rotary_(positions, query, key, cache, width, True)
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
