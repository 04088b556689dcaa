"""The rotary embedding's slot. Where a model normalises each head of query and key just before, norms and rotation are one
call: the two norms then do nothing, and the rotation does their work.
"""

import importlib
import logging
from typing import Any

import torch

from polymorph.engine.hooks.dispatch import expect_dispatch
from polymorph.engine.hooks.hook import (
    Hook,
    HookMissing,
    expect,
    expect_operator,
    expect_parameters,
)
from polymorph.engine.hooks.normed_heads import expect_norms_before_rotation, fuse_norms
from polymorph.engine.slots import Slots

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
_NORMED = (("qwen3", "Qwen3Attention"), ("qwen3_moe", "Qwen3MoeAttention"))
"""Attention layers of vLLM's models that normalise the heads of query and key, and then rotate."""


def probe() -> None:
    from vllm.model_executor.layers.rotary_embedding import base  # noqa: PLC0415 - only an engine process has vLLM

    layer = expect(base, "RotaryEmbedding")
    expect_dispatch(layer)
    for method in ("forward_native", "forward_cpu"):
        expect_parameters(expect(layer, method), "self", "positions", "query", "key")
    expect_parameters(expect(layer, "_match_cos_sin_cache_dtype"), "self", "query")
    expect_operator("_C::rotary_embedding")
    expect_operator("_C::rms_norm")


def install(slots: Slots) -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: PLC0415

    choose = RotaryEmbedding.dispatch_forward

    def dispatch_forward(self: Any, compile_native: bool) -> Any:
        native = choose(self, compile_native)
        return _through_slot(slots.ops, self, native) if _is_plain(type(self)) else native

    RotaryEmbedding.dispatch_forward = dispatch_forward
    for module, name in _NORMED:
        try:
            _install_normed(slots, module, name)
        except HookMissing as reason:
            _log.error("%s rotates in a slot, and its norms stay apart: %s", name, reason)
            slots.missing[f"rotary of {name}"] = str(reason)


HOOK = Hook("rotary", probe, install, fuses=False)


def _is_plain(kind: Any) -> bool:
    """Whether a kind of rotary embedding differs in its angles alone, if at all."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # noqa: PLC0415

    methods = ("forward", "forward_native", "forward_cpu", "_match_cos_sin_cache_dtype")
    return issubclass(kind, RotaryEmbedding) and all(
        getattr(kind, method) is getattr(RotaryEmbedding, method) for method in methods
    )


def _through_slot(ops: Any, layer: Any, native: Any) -> Any:
    def forward(positions: Any, query: Any, key: Any = None) -> Any:
        if key is None or query.dtype not in _DTYPES or query.device.type != "cpu":
            return native(positions, query, key)
        cache = layer._match_cos_sin_cache_dtype(query)  # noqa: SLF001 - as vLLM's own methods do
        arguments = (positions, query, key, cache, layer.head_size, layer.is_neox_style)
        if torch.compiler.is_compiling():
            return ops.rotary(*arguments)
        ops.rotary_(*arguments)  # as vLLM's own method does then
        return query, key

    return forward


def _install_normed(slots: Slots, module: str, name: str) -> None:
    try:
        found = importlib.import_module(f"vllm.model_executor.models.{module}")
    except ImportError as error:
        raise HookMissing(f"no model {module}: {error}") from error
    attention = expect(found, name)
    expect_norms_before_rotation(attention)
    make = attention.__init__

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        make(self, *arguments, **named)
        if _is_plain(type(self.rotary_emb)):
            fuse_norms(self, slots.ops.qk_norm_rotary, _DTYPES)

    attention.__init__ = __init__
