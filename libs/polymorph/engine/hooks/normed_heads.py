"""Attention layers that normalise each head of query and key and then rotate: both in one call."""

from typing import Any

import torch

from polymorph.engine.hooks.dispatch import expect_dispatch
from polymorph.engine.hooks.hook import HookMissing, expect, expect_parameters


class _Stub:
    """An attention layer of numbers that tell where they went: two heads of query and one of key, two wide."""

    q_size, kv_size, head_dim, num_heads, num_kv_heads = 4, 2, 2, 2, 1

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def qkv_proj(self, hidden: Any) -> tuple[Any, None]:
        return hidden, None

    def q_norm(self, x: Any) -> Any:
        self.shapes.append(tuple(x.shape))
        return 2 * x

    def k_norm(self, x: Any) -> Any:
        self.shapes.append(tuple(x.shape))
        return 3 * x

    def rotary_emb(self, positions: Any, query: Any, key: Any) -> tuple[Any, Any]:
        return query + positions[:, None], key - positions[:, None]

    def attn(self, query: Any, key: Any, value: Any) -> Any:
        return torch.cat((query, key, value), dim=-1)

    def o_proj(self, x: Any) -> tuple[Any, None]:
        return x, None


def expect_norms_before_rotation(attention: Any) -> None:
    """Its forward, run on a stub, normalises by head, rotates, and does nothing in between.

    Raises:
        HookMissing: it does something else.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: PLC0415 - only an engine process has vLLM

    expect_dispatch(RMSNorm)
    expect_parameters(expect(attention, "forward"), "self", "positions", "hidden_states")
    stub, positions, hidden = _Stub(), torch.arange(3), torch.arange(24.0).view(3, 8)
    try:
        found = attention.forward(stub, positions, hidden)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise HookMissing(f"{attention.__qualname__}.forward needs more than was known: {error}") from error
    query, key, value = hidden.split([4, 2, 2], dim=-1)
    wanted = torch.cat((2 * query + positions[:, None], 3 * key - positions[:, None], value), dim=-1)
    if stub.shapes != [(3, 2, 2), (3, 1, 2)] or not torch.equal(found, wanted):
        raise HookMissing(f"{attention.__qualname__}.forward does not just normalise the heads and rotate")


def fuse_norms(attention: Any, turn: Any, dtypes: tuple[Any, ...]) -> None:
    """Makes the layer's norms pass what they get, and its rotation do all; leaves a layer alone that does not fit."""
    query_norm, key_norm, rotary = attention.q_norm, attention.k_norm, attention.rotary_emb
    if not all(_fits(norm, rotary, dtypes) for norm in (query_norm, key_norm)):
        return
    if query_norm.variance_epsilon != key_norm.variance_epsilon:
        return
    # The module that loads and holds a weight stays: only what it computes moves.
    query_norm._forward_method = key_norm._forward_method = _passed  # noqa: SLF001
    attention.rotary_emb = NormedRotation(turn, rotary, query_norm, key_norm)


def _fits(norm: Any, rotary: Any, dtypes: tuple[Any, ...]) -> bool:
    from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: PLC0415

    return (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and norm.hidden_size == rotary.head_size
        and norm.weight.dtype in dtypes
        and norm.weight.device.type == "cpu"
    )


def _passed(x: Any) -> Any:
    return x


class NormedRotation(torch.nn.Module):  # type: ignore[misc]
    """Stands where the rotary embedding stood. One embedding serves many layers, so it is not among our modules, nor are
    the norms, whose names in the checkpoint are those of the attention layer.
    """

    def __init__(self, turn: Any, rotary: Any, query_norm: Any, key_norm: Any) -> None:
        super().__init__()
        self._turn = turn
        self._parts = (rotary, query_norm, key_norm)

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        rotary, query_norm, key_norm = self._parts
        return self._turn(
            positions,
            query,
            key,
            rotary._match_cos_sin_cache_dtype(query),  # noqa: SLF001 - as vLLM's own methods do
            query_norm.weight.data,
            key_norm.weight.data,
            query_norm.variance_epsilon,
            rotary.head_size,
            rotary.is_neox_style,
        )
