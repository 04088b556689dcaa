"""Decode attention: a batch of one token a sequence goes through a slot, every other one to vLLM's own code untouched."""

import dataclasses
import functools
from typing import Any

import torch

from polymorph.engine.hooks.hook import (
    Hook,
    HookMissing,
    expect,
    expect_names,
    expect_operator,
    expect_parameters,
)
from polymorph.engine.slots import Slots

# vLLM chooses how a block of the cache lies inside by what it calls the ISA. Of these two the definitions tell.
_LAYOUTS = ("vec", "vec16")
_DTYPES = (torch.float32, torch.bfloat16)
_MARK = "_polymorph_plain"
_FORWARD = (
    "self",
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
)
_PLAIN = {
    "attn_type": "decoder",
    "alibi_slopes": None,
    "sliding_window": -1,
    "logits_soft_cap": 0,
    "sinks": None,
    "kv_cache_dtype": "auto",
}
"""What a layer of vLLM's has to be for its decode attention to be the definition's."""
_METADATA = {
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "scheduler_metadata",
    "causal",
    "dynamic_causal",
}
_OPERATOR = (
    "query",
    "key_cache",
    "value_cache",
    "output",
    "query_start_loc",
    "seq_lens",
    "scale",
    "causal",
    "alibi_slopes",
    "sliding_window_size",
    "block_table",
    "softcap",
    "scheduler_metadata",
    "s_aux",
    "dynamic_causal",
    "k_scale",
    "v_scale",
    "kv_cache_dtype",
)


def probe() -> None:
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415 - only an engine process has vLLM

    layer = expect(cpu_attn, "CPUAttentionBackendImpl")
    forward = expect(layer, "forward")
    expect_parameters(forward, *_FORWARD)
    expect_names(forward, "view", "chunk", "cpu_attention_with_kv_cache", "isa")
    expect_names(layer.__init__, "scale", *_PLAIN)
    fields = {field.name for field in dataclasses.fields(expect(cpu_attn, "CPUAttentionMetadata"))}
    if not fields >= _METADATA:
        raise HookMissing(f"CPUAttentionMetadata has no {', '.join(sorted(_METADATA - fields))}")
    builder = expect(cpu_attn, "CPUAttentionMetadataBuilder")
    names = ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "isa", "kv_cache_dtype")
    expect_names(builder.__init__, *names)
    expect_operator("_C::cpu_attention_with_kv_cache", *_OPERATOR)


def install(slots: Slots) -> None:
    from vllm.v1.attention.backends import cpu_attn  # noqa: PLC0415

    _serve(slots, cpu_attn.CPUAttentionBackendImpl)
    _announce(slots, cpu_attn.CPUAttentionMetadataBuilder)


HOOK = Hook("attention", probe, install, fuses=False)


def _serve(slots: Slots, layer_class: Any) -> None:
    native = layer_class.forward
    attention = slots.ops.attention

    @functools.wraps(native)
    def forward(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        scales = output_scale is not None or output_block_scale is not None
        if scales or not (_decodes(attn_metadata) and _is_plain(self, layer)):
            return native(
                self,
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        tokens = attn_metadata.num_actual_tokens
        blocks, kv_heads, block, _ = kv_cache.shape
        key_cache, value_cache = kv_cache.view(blocks, kv_heads, 2 * block, -1).chunk(2, dim=2)
        attention(
            query[:tokens],
            key_cache,
            value_cache,
            output[:tokens],
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            self.scale,
            attn_metadata.block_table,
            attn_metadata.scheduler_metadata,
        )
        return output

    layer_class.forward = forward


def _announce(slots: Slots, builder_class: Any) -> None:
    """A model's definition is known once its cache is laid out, and not only with the first call."""
    native = builder_class.__init__

    @functools.wraps(native)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        native(self, *arguments, **named)
        if self.isa in _LAYOUTS and self.kv_cache_dtype == "auto" and self.dtype in _DTYPES:
            slots.ops.add_attention(
                self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.dtype
            )

    builder_class.__init__ = __init__


def _decodes(metadata: Any) -> bool:
    """Whether every sequence of the batch has one token to compute."""
    return (
        metadata is not None
        and metadata.max_query_len == 1
        and metadata.num_actual_tokens == metadata.seq_lens.shape[0]
        and metadata.causal is True
        and metadata.dynamic_causal is None
        and metadata.scheduler_metadata is not None
    )


def _is_plain(layer: Any, owner: Any) -> bool:
    plain: bool | None = layer.__dict__.get(_MARK)
    if plain is None:
        plain = owner.isa in _LAYOUTS and all(
            getattr(layer, name) == wanted for name, wanted in _PLAIN.items()
        )
        setattr(layer, _MARK, plain)
    return plain
