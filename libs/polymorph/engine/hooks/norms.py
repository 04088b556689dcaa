"""The norms' slots: providers of vLLM IR, first in priority in this process."""

from typing import Any

import torch

from polymorph.engine.hooks.hook import Hook, HookMissing, expect, expect_operator
from polymorph.engine.slots import Slots

PROVIDER = "polymorph"
_PARAMETERS = {
    "rms_norm": ("x", "weight", "epsilon", "variance_size"),
    "fused_add_rms_norm": ("x", "x_residual", "weight", "epsilon", "variance_size"),
}
_DTYPES = (torch.float32, torch.bfloat16)


def probe() -> None:
    from vllm import ir  # noqa: PLC0415 - only an engine process has vLLM
    from vllm.config.kernel import IrOpPriorityConfig  # noqa: PLC0415

    expect(IrOpPriorityConfig, "set_default")
    for name, wanted in _PARAMETERS.items():
        op = expect(ir.ops, name)
        found = tuple(expect(op, "_py_signature").parameters)
        if found != wanted:
            raise HookMissing(f"vLLM's {name} takes {', '.join(found)}, not {', '.join(wanted)}")
        for method in ("register_impl", "set_default", "get_priority"):
            expect(op, method)
        expect_operator(f"_C::{name}")


def install(slots: Slots) -> None:
    from vllm import ir  # noqa: PLC0415
    from vllm.config.kernel import IrOpPriorityConfig  # noqa: PLC0415

    _register(ir, slots.ops)
    native = IrOpPriorityConfig.set_default

    def set_default(self: Any) -> None:
        native(self)
        for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            op.set_default([PROVIDER, *op.get_priority()])

    IrOpPriorityConfig.set_default = set_default


HOOK = Hook("rms_norm", probe, install, fuses=True)


def _register(ir: Any, ops: Any) -> None:
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
