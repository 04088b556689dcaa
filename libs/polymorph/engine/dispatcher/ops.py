"""Loads the dispatcher into this process and tells torch.compile what its operators give back."""

import functools
from typing import Any

import torch

from polymorph.engine.dispatcher.build import ensure_built


@functools.cache
def load() -> Any:
    """The namespace `torch.ops.polymorph`, loaded once a process.

    Raises:
        DispatcherBuildError: it cannot be built here.
    """
    torch.ops.load_library(str(ensure_built()))
    torch.library.register_fake("polymorph::linear", _linear)
    torch.library.register_fake("polymorph::fused_moe", _written_in_place)
    torch.library.register_fake("polymorph::rms_norm", _rms_norm)
    torch.library.register_fake("polymorph::fused_add_rms_norm", _fused_add_rms_norm)
    torch.library.register_fake("polymorph::silu_and_mul", _silu_and_mul)
    torch.library.register_fake("polymorph::rotary", _rotary)
    torch.library.register_fake("polymorph::qk_norm_rotary", _rotary)
    return torch.ops.polymorph


def _linear(x: Any, bias: Any, layer_id: int, n: int) -> Any:
    del bias, layer_id
    return x.new_empty((*x.shape[:-1], n))


def _written_in_place(*arguments: Any) -> None:
    del arguments


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    del weight, eps
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fused_add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    del weight, eps
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    )


def _silu_and_mul(x: Any) -> Any:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _rotary(positions: Any, query: Any, key: Any, *others: Any) -> tuple[Any, Any]:
    del positions, others
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(key, memory_format=torch.contiguous_format),
    )
