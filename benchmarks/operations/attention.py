"""Cases of decode attention: one call of each layer, each with a cache of its own, at several lengths of context."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from benchmarks.operations.models import Shapes
from benchmarks.operations.paired import Call, Case, close

from polymorph.engine.slots import Slots

CONTEXTS = (32, 256, 1024)
BLOCK = 128
_MOST_TOKENS = 1 << 15
_MOST_BYTES = 1 << 28


def cases(operation: str, shapes: Shapes, tokens: Sequence[int], slots: Slots) -> Iterator[Case]:
    """One for each number of sequences and context, in float32; none for the model that has another's heads."""
    if shapes.name == "tiny-moe":
        return
    heads, kv_heads, d = shapes.heads, shapes.kv_heads, shapes.head_dim
    slots.ops.add_attention(heads, kv_heads, d, BLOCK, torch.float32)
    name = f"{operation}_q{heads}_kv{kv_heads}_d{d}_b{BLOCK}_f32"
    for m in tokens:
        for context in CONTEXTS:
            if m * context > _MOST_TOKENS:
                continue
            one = m * context * kv_heads * d * 8
            layers = [
                _Layer(shapes, m, context) for _ in range(max(1, min(shapes.layers, _MOST_BYTES // one)))
            ]
            calls = [layer.through_slot(slots) for layer in layers]
            stock = [layer.without_slot() for layer in layers]
            yield Case(
                operation, f"{shapes.name} @{context}", m, name, calls, without_slot=stock,
                same=_same_as(stock[-1]),
            )  # fmt: skip


def _same_as(stock: Call) -> Callable[[Any, Any], bool]:
    """Compares with what vLLM gives: the calls of a case all write into the memory of its layers."""
    wanted = stock().clone()
    return lambda found, _: close(found, wanted)


class _Layer:
    """The cache of one layer, as vLLM lays it out and plans its work."""

    def __init__(self, shapes: Shapes, m: int, context: int) -> None:
        from vllm import _custom_ops as vllm_ops  # noqa: PLC0415 - after the environment is set

        heads, kv_heads, d = shapes.heads, shapes.kv_heads, shapes.head_dim
        pages = -(-context // BLOCK)
        whole = torch.randn(m * pages, kv_heads, 2 * BLOCK, d)
        self._keys, self._values = whole.chunk(2, dim=2)
        self._query, self._output = torch.randn(m, heads, d), torch.empty(m, heads, d)
        self._starts = torch.arange(m + 1, dtype=torch.int32)
        self._lengths = torch.full((m,), context, dtype=torch.int32)
        self._table = torch.randperm(m * pages).to(torch.int32).view(m, pages)
        self._scale = d**-0.5
        self._plan = vllm_ops.cpu_attn_get_scheduler_metadata(
            m, heads, kv_heads, d, self._lengths, torch.float32, self._starts, True, -1, "vec", True
        )

    def through_slot(self, slots: Slots) -> Call:
        arguments = (
            self._query,
            self._keys,
            self._values,
            self._output,
            self._starts,
            self._lengths,
            self._scale,
            self._table,
            self._plan,
        )

        def call() -> torch.Tensor:
            slots.ops.attention(*arguments)
            return self._output

        return call

    def without_slot(self) -> Call:
        from vllm import _custom_ops as vllm_ops  # noqa: PLC0415

        def call() -> torch.Tensor:
            vllm_ops.cpu_attention_with_kv_cache(
                self._query, self._keys, self._values, self._output, self._starts, self._lengths, self._scale,
                True, None, -1, self._table, 0.0, self._plan, None,
            )  # fmt: skip
            return self._output

        return call
