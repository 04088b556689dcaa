"""The experts of unquantised mixture-of-experts layers: vLLM packs their weights as before, and their call goes through
a slot. Routing is not part of it, nor are shared experts, which are linear layers of their own.
"""

import dataclasses
import functools
import logging
from typing import Any

import torch

from polymorph.engine.hooks.hook import Hook, HookMissing, expect, expect_operator, expect_parameters
from polymorph.engine.slots import Slots

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)
_MARK = "_polymorph_layer_id"
_OPERATOR = (
    "output",
    "input",
    "w13",
    "w2",
    "w13_bias",
    "w2_bias",
    "topk_weights",
    "topk_id",
    "skip_weighted",
    "act",
    "isa",
)
_APPLY = ("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation")


def probe() -> None:
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415

    _probe_fitness()
    method = expect(unquantized_fused_moe_method, "UnquantizedFusedMoEMethod")
    expect_parameters(expect(method, "process_weights_after_loading"), "self", "layer")
    experts = expect(cpu_moe, "CPUUnquantizedExperts")
    expect(experts, "isa")
    expect_parameters(expect(experts, "process_weights_after_loading"), "self", "layer")
    apply = expect(experts, "apply")
    expect_parameters(apply, *_APPLY)
    if "cpu_fused_moe" not in apply.__code__.co_names:
        raise HookMissing("CPUUnquantizedExperts.apply does not call cpu_fused_moe")
    expect_operator("_C::cpu_fused_moe")
    found = tuple(each.name for each in torch.ops._C.cpu_fused_moe.default._schema.arguments)  # noqa: SLF001
    if found != _OPERATOR:
        raise HookMissing(f"_C::cpu_fused_moe takes {', '.join(found)}, not {', '.join(_OPERATOR)}")


def _probe_fitness() -> None:
    """What `_unfit` looks at."""
    from vllm.model_executor import utils  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe import activation, config  # noqa: PLC0415

    expect(utils, "is_weights_pre_processed")
    if not hasattr(expect(activation, "MoEActivation"), "SILU"):
        raise HookMissing("MoEActivation has no SILU")
    wanted = {
        "FusedMoEConfig": {"experts_per_token", "has_bias", "moe_parallel_config"},
        "FusedMoEParallelConfig": {"use_ep", "enable_eplb"},
    }
    for name, fields in wanted.items():
        missing = fields - {each.name for each in dataclasses.fields(expect(config, name))}
        if missing:
            raise HookMissing(f"{name} has no {', '.join(sorted(missing))}")


def install(slots: Slots) -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (  # noqa: PLC0415
        UnquantizedFusedMoEMethod,
    )

    native = UnquantizedFusedMoEMethod.process_weights_after_loading

    @functools.wraps(native)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        again = self.moe_kernel is not None
        plain = (layer.w13_weight.data, layer.w2_weight.data)
        weights = tuple(each.clone() for each in plain) if again else plain
        native(self, layer)
        if again:
            _pack(self.moe_kernel.fused_experts, layer, weights)
        _attach(slots, self, layer, weights)

    UnquantizedFusedMoEMethod.process_weights_after_loading = process_weights_after_loading
    CPUUnquantizedExperts.apply = _through_slot(slots.ops.fused_moe, CPUUnquantizedExperts.apply)


HOOK = Hook("moe", probe, install, fuses=False)


def _through_slot(fused_moe: Any, native: Any) -> Any:
    @functools.wraps(native)
    def apply(
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        known = getattr(self, _MARK, None)
        if known is None:
            native(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *others, **named)
        else:
            fused_moe(output, hidden_states, w1, w2, topk_weights, topk_ids, known)

    return apply


def _pack(experts: Any, layer: Any, weights: tuple[Any, ...]) -> None:
    """What vLLM (0.32) leaves out where weights are loaded anew: its operator would read them as if they were packed."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts  # noqa: PLC0415
    from vllm.model_executor.utils import is_weights_pre_processed  # noqa: PLC0415

    if not isinstance(experts, CPUUnquantizedExperts) or is_weights_pre_processed():
        return
    if torch.equal(layer.w13_weight.data, weights[0]):
        experts.process_weights_after_loading(layer)


def _attach(slots: Slots, method: Any, layer: Any, weights: tuple[Any, ...]) -> None:
    experts: Any = getattr(method.moe_kernel, "fused_experts", None)
    reason = _unfit(method, layer, experts, weights)
    if reason is not None:
        _tell(reason)
        return
    known = getattr(experts, _MARK, None)
    if known is not None:
        slots.reload_moe(known, weights)
        return
    setattr(experts, _MARK, slots.add_moe(weights, method.moe.experts_per_token, experts.isa))


@functools.cache
def _tell(reason: str) -> None:
    """Once for all layers."""
    _log.warning("experts get no slot, vLLM's own code computes them: %s", reason)


def _unfit(method: Any, layer: Any, experts: Any, weights: tuple[Any, ...]) -> str | None:
    """Why a layer stays with vLLM's own code, which knows cases that no definition describes."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: PLC0415
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts  # noqa: PLC0415
    from vllm.model_executor.utils import is_weights_pre_processed  # noqa: PLC0415

    parallel = method.moe.moe_parallel_config
    reasons = {
        f"they are computed by {type(experts).__name__}": not isinstance(experts, CPUUnquantizedExperts),
        "zentorch computes them": getattr(experts, "_use_zentorch", False),
        "their weights were loaded as packed": is_weights_pre_processed(),
        "they are spread over ranks by expert": parallel.use_ep or parallel.enable_eplb,
        "they have biases": method.moe.has_bias,
        f"their activation is {layer.activation}": layer.activation is not MoEActivation.SILU,
        "the router's weights go into their inputs": layer.apply_router_weight_on_input,
        f"their weights are {weights[0].dtype}": weights[0].dtype not in _DTYPES,
        "their weights are not contiguous": not all(each.is_contiguous() for each in weights),
        "their weights have no memory": any(each.is_meta for each in weights),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
