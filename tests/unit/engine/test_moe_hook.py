"""Which layers' experts get a slot, and what is left to vLLM alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polymorph.engine.dispatcher.ops import load
from polymorph.engine.hooks import moe
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore

pytestmark = pytest.mark.engine


@pytest.fixture
def experts() -> Any:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    made = CPUUnquantizedExperts.__new__(CPUUnquantizedExperts)
    made._use_zentorch = False
    return made


@pytest.fixture
def slots() -> Slots:
    return Slots(ops=load(), weights=WeightStore(1 << 20), packed=PackedWeights(1 << 20))


def method_of(experts: Any, **changes: Any) -> Any:
    parallel = SimpleNamespace(
        use_ep=changes.pop("use_ep", False), enable_eplb=changes.pop("enable_eplb", False)
    )
    described = {"has_bias": False, "experts_per_token": 2, "moe_parallel_config": parallel} | changes
    return SimpleNamespace(
        moe=SimpleNamespace(**described), moe_kernel=SimpleNamespace(fused_experts=experts)
    )


def layer_of(**changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return SimpleNamespace(
        **({"activation": MoEActivation.SILU, "apply_router_weight_on_input": False} | changes)
    )


def weights(dtype: Any = torch.float32) -> tuple[Any, Any]:
    return torch.randn(3, 64, 32, dtype=dtype), torch.randn(3, 32, 32, dtype=dtype)


@pytest.mark.parametrize(
    ("of_method", "of_layer", "reason"),
    [
        ({}, {}, None),
        ({"has_bias": True}, {}, "biases"),
        ({"use_ep": True}, {}, "spread over ranks"),
        ({"enable_eplb": True}, {}, "spread over ranks"),
        ({}, {"activation": "gelu"}, "activation is gelu"),
        ({}, {"apply_router_weight_on_input": True}, "into their inputs"),
    ],
)
def test_cases_that_no_definition_describes_stay_with_vllm(
    experts: Any, slots: Slots, of_method: dict[str, Any], of_layer: dict[str, Any], reason: str | None
) -> None:
    method, layer = method_of(experts, **of_method), layer_of(**of_layer)
    found = moe._unfit(method, layer, experts, weights())
    assert (found is None) if reason is None else (reason in str(found))
    moe._attach(slots, method, layer, weights())
    assert len(slots.layers) == (reason is None)


def test_other_code_and_other_weights_stay_with_vllm(experts: Any) -> None:
    method, layer = method_of(experts), layer_of()
    assert "float16" in str(moe._unfit(method, layer, experts, weights(torch.float16)))
    turned = tuple(each.transpose(1, 2) for each in weights())
    assert "contiguous" in str(moe._unfit(method, layer, experts, turned))
    assert "SimpleNamespace" in str(moe._unfit(method, layer, SimpleNamespace(), weights()))
    experts._use_zentorch = True
    assert "zentorch" in str(moe._unfit(method, layer, experts, weights()))


def test_weights_that_come_again_are_kept_in_place_of_the_old(experts: Any, slots: Slots) -> None:
    method, layer = method_of(experts), layer_of()
    moe._attach(slots, method, layer, weights())
    again = weights()
    moe._attach(slots, method, layer, again)
    (known,) = slots.layers
    assert known.definition == "moe_e3_k2_h32_i32_f32"
    assert [torch.equal(kept.restore(), each) for kept, each in zip(known.kept, again, strict=True)] == [
        True
    ] * 2


def test_experts_without_a_slot_are_vllms_own(experts: Any) -> None:
    called = []
    apply = moe._through_slot(None, lambda *arguments, **named: called.append((arguments, named)))
    apply(experts, 1, 2, 3, 4, 5, 6, "silu", expert_map=None)
    assert called == [((experts, 1, 2, 3, 4, 5, 6, "silu"), {"expert_map": None})]
