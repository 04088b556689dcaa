"""The gated activation's slot: a layer `SiluAndMul` gets its method from us when it is made."""

from typing import Any

import torch

from polymorph.engine.hooks.dispatch import expect_dispatch
from polymorph.engine.hooks.hook import Hook, HookMissing, expect, expect_parameters
from polymorph.engine.slots import Slots

_DTYPES = (torch.float32, torch.bfloat16)


def probe() -> None:
    from vllm.model_executor.layers import activation  # noqa: PLC0415 - only an engine process has vLLM

    layer = expect(activation, "SiluAndMul")
    expect_dispatch(layer)
    native = expect(layer, "forward_native")
    expect_parameters(native, "x")
    x = torch.linspace(-3, 3, 12).view(2, 6)
    if not torch.equal(native(x), torch.nn.functional.silu(x[:, :3]) * x[:, 3:]):
        raise HookMissing("SiluAndMul.forward_native computes something else than silu(gate) * up")


def install(slots: Slots) -> None:
    from vllm.model_executor.layers.activation import SiluAndMul  # noqa: PLC0415

    choose = SiluAndMul.dispatch_forward

    def dispatch_forward(self: Any, compile_native: bool) -> Any:
        return _through_slot(slots.ops.silu_and_mul, choose(self, compile_native))

    SiluAndMul.dispatch_forward = dispatch_forward


HOOK = Hook("silu_and_mul", probe, install, fuses=False)


def _through_slot(silu_and_mul: Any, native: Any) -> Any:
    def forward(x: Any) -> Any:
        if x.dtype in _DTYPES and x.device.type == "cpu":
            return silu_and_mul(x)
        return native(x)

    return forward
