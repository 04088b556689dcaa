"""How vLLM chooses the code of a layer (`CustomOp`): a method chosen once, when the layer is made."""

from typing import Any

from polymorph.engine.hooks.hook import HookMissing, expect, expect_parameters


def expect_dispatch(layer: Any) -> None:
    """A layer's call is what `dispatch_forward` gave it, kept in `_forward_method`.

    Raises:
        HookMissing: this vLLM does it otherwise, or the layer goes a way of its own.
    """
    from vllm.model_executor.custom_op import CustomOp  # noqa: PLC0415 - only an engine process has vLLM

    expect_parameters(expect(CustomOp, "dispatch_forward"), "self", "compile_native")
    if "_forward_method" not in expect(CustomOp, "forward").__code__.co_names:
        raise HookMissing("CustomOp.forward does not call _forward_method")
    if not issubclass(layer, CustomOp):
        raise HookMissing(f"{layer.__qualname__} is no CustomOp")
    for method in ("forward", "dispatch_forward"):
        if getattr(layer, method) is not getattr(CustomOp, method):
            raise HookMissing(f"{layer.__qualname__} has a {method} of its own")
