"""Run by test_moe_layer.py in a process of its own: importing the extension changes vLLM for good.

One of vLLM's own mixture-of-experts layers, before the slots are installed, then with an empty slot, then with kernels of
the catalogue, chosen by the load of the busiest expert, then with other weights.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.platforms import current_platform

EXPERTS, TOPK, HIDDEN, INNER, TOKENS = 4, 2, 64, 32, 4
# Which experts a token takes: one that all take, or each as many as another.
ROUTINGS = {"skewed": ((0, 1), (0, 2), (0, 3), (0, 1)), "even": ((0, 1), (2, 3), (1, 2), (3, 0))}


class Inputs:
    """The same for every layer; weights are values of bfloat16, as a checkpoint has them."""

    def __init__(self) -> None:
        self.x = torch.randn(TOKENS, HIDDEN)
        self.w13 = (torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 8).bfloat16().float()
        self.w2 = (torch.randn(EXPERTS, HIDDEN, INNER) / 8).bfloat16().float()
        self.logits = {name: self._logits(pairs) for name, pairs in ROUTINGS.items()}

    def _logits(self, pairs: tuple[tuple[int, int], ...]) -> Any:
        logits = torch.rand(TOKENS, EXPERTS)
        for token, experts in enumerate(pairs):
            logits[token, list(experts)] += 5
        return logits


def layer(name: str, inputs: Inputs) -> Any:
    made = FusedMoEFactory(
        num_experts=EXPERTS, top_k=TOPK, hidden_size=HIDDEN, intermediate_size=INNER, prefix=name
    )
    load(made, inputs)
    return made


def load(made: Any, inputs: Inputs) -> None:
    experts = made.routed_experts
    experts.w13_weight.data.copy_(inputs.w13)
    experts.w2_weight.data.copy_(inputs.w2)
    experts.quant_method.process_weights_after_loading(experts)


def outputs(made: Any, inputs: Inputs, config: Any) -> dict[str, Any]:
    with set_forward_context(None, config, num_tokens=TOKENS):
        return {name: made(inputs.x, logits).clone() for name, logits in inputs.logits.items()}


def differences(one: dict[str, Any], two: dict[str, Any]) -> dict[str, float]:
    return {name: float((one[name] - two[name]).abs().max()) for name in one}


def main(result: str, config: Any) -> None:
    current_platform.import_kernels()
    torch.manual_seed(0)
    inputs = Inputs()
    stock = outputs(layer("stock", inputs), inputs, config)

    from polymorph.engine.extension import PolymorphExtension
    from polymorph.kernels.catalogue.artifacts import artifacts
    from polymorph.kernels.definitions import definition_named

    slots = PolymorphExtension()
    slotted = layer("slotted", inputs)
    empty = outputs(slotted, inputs, config)
    described = slots.slots_describe()
    counted = slots.slots_read(True)
    (name,) = described["definitions"]
    few, many = artifacts(definition_named(name), most=2)
    answer = slots.slots_engage([few.binding(most=75), many.binding(least=76)])
    assert answer["ok"], answer
    tuned = outputs(slotted, inputs, config)
    told = {
        "definitions": described["definitions"],
        "missing": described["missing"],
        "empty": counted["definitions"][name],
        "tuned": slots.slots_read(True),
        "artifacts": [few.digest, many.digest],
        "stock and empty": differences(stock, empty),
        "stock and tuned": differences(stock, tuned),
    }
    inputs.w13, inputs.w2 = 2 * inputs.w13, inputs.w2.neg()
    load(slotted, inputs)
    told["engaged after a reload"] = slots.slots_describe()["engaged"]
    told["layers after a reload"] = slots.slots_describe()["definitions"][name]
    fresh, reloaded = outputs(layer("fresh", inputs), inputs, config), outputs(slotted, inputs, config)
    told["fresh and reloaded"] = differences(fresh, reloaded)
    answer = slots.slots_engage([many.binding()])
    assert answer["ok"], answer
    told["fresh and reloaded, tuned"] = differences(fresh, outputs(slotted, inputs, config))
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    made = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{sys.argv[1]}.rendezvous", 0, "gloo")
        initialize_model_parallel()
        main(sys.argv[1], made)
