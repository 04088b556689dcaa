"""Puts slots where vLLM chooses the code of its layers. Written against vLLM 0.32; what it does not know it leaves."""

import functools
import inspect
import logging
from typing import Any

import torch

from polymorph.engine.slots import Slots

_log = logging.getLogger(__name__)

PROVIDER = "polymorph"
SPIN_S = 0.005
_ONEDNN, _PACKED_SGL, _TORCH = 0, 1, 2
_DTYPES = (torch.float32, torch.bfloat16)
_MARK = "_polymorph_layer_id"


def slot_linear_layers(slots: Slots) -> None:
    """From now on a linear layer's weight is packed by vLLM as before, and its call goes through a slot."""
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - only an engine process has vLLM

    native = utils.dispatch_cpu_unquantized_gemm

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach()
        native(layer, remove_weight)
        _attach(slots, layer, weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def slot_norms(ops: Any) -> None:
    """Registers the norms' slots with vLLM IR, first in priority in this process."""
    from vllm import ir  # noqa: PLC0415
    from vllm.config.kernel import IrOpPriorityConfig  # noqa: PLC0415

    _register_norms(ir, ops)
    native = IrOpPriorityConfig.set_default

    def set_default(self: Any) -> None:
        native(self)
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            op.set_default([PROVIDER, *op.get_priority()])

    IrOpPriorityConfig.set_default = set_default


def shorten_spin(seconds: float = SPIN_S) -> None:
    """An engine's process that waits for its next step gives its core back after `seconds`, not after a second.

    vLLM polls its queue of steps with a whole core for a second after each (`SpinCondition.busy_loop_s`), also while
    the engine is paused for a measurement on the same host. Between the steps of a running batch nothing changes.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    native = SpinCondition.__init__

    @functools.wraps(native)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        native(self, *arguments, **named)
        if self.is_reader:
            self.busy_loop_s = min(self.busy_loop_s, seconds)

    SpinCondition.__init__ = __init__


def _attach(slots: Slots, layer: Any, weight: Any) -> None:
    if weight.is_meta or weight.ndim != 2 or weight.dtype not in _DTYPES or not weight.is_contiguous():
        return
    chosen = _native_choice(layer.cpu_linear, layer)
    if chosen is None:
        _log.warning(
            "a linear layer of %s gets no slot: vLLM runs code that is not known", tuple(weight.shape)
        )
        return
    native, state = chosen
    held = layer.weight.numel() > 0
    known = getattr(layer, _MARK, None)
    if known is None:
        known = slots.add_linear(weight, native, state, held_by_model=held)
        setattr(layer, _MARK, known)
    else:
        slots.reload_linear(known, weight, native, state, held_by_model=held)
    layer.cpu_linear = _through_slot(slots.ops.linear, known, weight.shape[0])


def _through_slot(linear: Any, layer_id: int, n: int) -> Any:
    def cpu_linear(x: Any, weight: Any, bias: Any) -> Any:
        del weight
        return linear(x, bias, layer_id, n)

    return cpu_linear


def _native_choice(cpu_linear: Any, layer: Any) -> tuple[int, Any] | None:
    """Which code vLLM chose, told by what its closure holds."""
    if cpu_linear is torch.nn.functional.linear:
        return _TORCH, layer.weight.detach()
    held = inspect.getclosurevars(cpu_linear).nonlocals
    if "handler" in held:
        # The handler frees its oneDNN primitive when it is collected: the layer has to hold on to it.
        layer._polymorph_onednn = held["handler"]  # noqa: SLF001
        return _ONEDNN, held["handler"].handler_tensor
    if "packed_weight" in held:
        return _PACKED_SGL, held["packed_weight"]
    if not held and layer.weight.numel() > 0:
        return _TORCH, layer.weight.detach()
    return None


def _register_norms(ir: Any, ops: Any) -> None:
    def plain(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        del epsilon
        return weight is not None and variance_size is None and x.dtype in _DTYPES and weight.dtype == x.dtype

    def fused(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        return plain(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype

    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        del variance_size
        return ops.rms_norm(x, weight, epsilon)

    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del variance_size
        normed, carried = ops.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return normed, carried

    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=plain)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=fused)(fused_add_rms_norm)
