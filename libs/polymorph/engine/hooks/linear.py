"""Unquantised linear layers: their weight is packed by vLLM as before, and their call goes through a slot."""

import inspect
import logging
from typing import Any

import torch

from polymorph.engine.hooks.hook import Hook, HookMissing, expect, expect_parameters
from polymorph.engine.slots import Slots

_log = logging.getLogger(__name__)

_ONEDNN, _PACKED_SGL, _TORCH = 0, 1, 2
_DTYPES = (torch.float32, torch.bfloat16)
_MARK = "_polymorph_layer_id"


def probe() -> None:
    """VLLM chooses a linear layer's code in one function, and its closure tells which."""
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - only an engine process has vLLM

    choose = expect(utils, "dispatch_cpu_unquantized_gemm")
    expect_parameters(choose, "layer", "remove_weight")
    if "cpu_linear" not in choose.__code__.co_names:
        raise HookMissing("dispatch_cpu_unquantized_gemm does not set layer.cpu_linear")


def install(slots: Slots) -> None:
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    native = utils.dispatch_cpu_unquantized_gemm

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach()
        native(layer, remove_weight)
        _attach(slots, layer, weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


HOOK = Hook("linear", probe, install, fuses=False)


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
