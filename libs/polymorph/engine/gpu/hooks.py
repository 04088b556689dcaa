"""Puts the slots of a GPU where vLLM chooses the code of its layers. Written against vLLM 0.32.

Each hook is probed first: where vLLM is not as it was, its slot stays off with an error in the log, and nothing else.
"""

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from polymorph.engine.gpu import ops
from polymorph.engine.gpu.slots import SHORT, SlotTable
from polymorph.engine.hooks.hook import HookMissing, expect

_log = logging.getLogger(__name__)

PROVIDER = "polymorph_gpu"


def install(wanted: Iterable[str], slots: SlotTable) -> list[str]:
    """Installs the slots by name, before the model is made; gives those that are in.

    Raises:
        ValueError: there is no slot of that name.
    """
    unknown = set(wanted) - set(HOOKS)
    if unknown:
        raise ValueError(f"no slot on a GPU is named {', '.join(sorted(unknown))}: use {', '.join(HOOKS)}")
    namespace = ops.serve(slots)
    installed = []
    for name in wanted:
        try:
            HOOKS[name](namespace)
        except HookMissing as error:
            _log.error("slot %s stays off: %s", name, error)
        else:
            installed.append(name)
    return installed


def _rms_norm(namespace: Any) -> None:
    def supports(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        del epsilon
        return _plain(x, weight, variance_size)

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        del variance_size
        return namespace.rms_norm(x, weight, epsilon)

    _provide("rms_norm", rms_norm, supports)


def _fused_add_rms_norm(namespace: Any) -> None:
    def supports(
        x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None
    ) -> bool:
        del epsilon
        return _plain(x, weight, variance_size) and x_residual.dtype == x.dtype

    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del variance_size
        normed, carried = namespace.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return normed, carried

    _provide("fused_add_rms_norm", fused_add_rms_norm, supports)


def _silu_and_mul(namespace: Any) -> None:
    """The layer asks for its CUDA code where custom operators are on, else for plain torch, which Inductor would fuse:
    both become the slot. Where it is empty, vLLM's CUDA operator serves.
    """
    layer = expect(vllm_module("vllm.model_executor.layers.activation"), "SiluAndMul")
    for method in ("forward_cuda", "forward_native"):
        expect(layer, method)
    operator = expect(torch.ops._C, "silu_and_mul")  # noqa: SLF001 - vLLM's library

    def stock(x: Any) -> Any:
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        operator(y, x)
        return y

    ops.replace_native("silu_and_mul", stock)
    layer.forward_cuda = layer.forward_native = staticmethod(namespace.silu_and_mul)


HOOKS: dict[str, Callable[[Any], None]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "silu_and_mul": _silu_and_mul,
}


def _provide(name: str, function: Any, supports: Any) -> None:
    """Registers a provider of vLLM IR, first in priority in this process; the next one is what an empty slot runs."""
    op = expect(expect(vllm_module("vllm.ir"), "ops"), name)
    configuration = expect(vllm_module("vllm.config.kernel"), "IrOpPriorityConfig")
    for attribute in ("register_impl", "set_default", "get_priority", "impls"):
        expect(op, attribute)
    set_stock = expect(configuration, "set_default")
    try:
        op.register_impl(PROVIDER, supports_args=supports)(function)
    except ValueError as error:  # another signature, which vLLM tells so
        raise HookMissing(f"vllm.ir.ops.{name} is not as it was: {error}") from error

    def stock(*arguments: Any) -> Any:
        for provider in op.get_priority():
            found = op.impls[provider]
            if provider != PROVIDER and found.supports_args(*arguments, None):
                return found.func_impl_fn(*arguments, None)
        return op.impls["native"].func_impl_fn(*arguments, None)

    @functools.wraps(set_stock)
    def set_default(self: Any) -> None:
        set_stock(self)
        op.set_default([PROVIDER, *op.get_priority()])

    ops.replace_native(name, stock)
    configuration.set_default = set_default


def _plain(x: Any, weight: Any, variance_size: int | None) -> bool:
    return weight is not None and variance_size is None and x.dtype in SHORT and weight.dtype == x.dtype


def vllm_module(name: str) -> Any:
    """A module of vLLM.

    Raises:
        HookMissing: it is not there.
    """
    import importlib  # noqa: PLC0415 - only an engine process has vLLM

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise HookMissing(f"there is no {name}: {error}") from error
