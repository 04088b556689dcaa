"""Run by test_operation_slots.py in a process of its own: importing the extension changes vLLM for good.

vLLM's own layers, before the slots are installed, then with empty slots, then with kernels of the catalogue.
"""

import json
import sys
from pathlib import Path
from typing import Any

import decode_slots
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.platforms import current_platform

HEADS, KEYS, WIDTH, TOKENS = 3, 2, 16, 5


class Inputs:
    """The same for every pass."""

    def __init__(self) -> None:
        self.x, self.residual, self.weight = torch.randn(5, 64), torch.randn(5, 64), torch.rand(64)
        self.positions = torch.randint(0, 20, (TOKENS,))
        self.positions[1] = 19
        self.qkv = torch.randn(TOKENS, (HEADS + 2 * KEYS) * WIDTH)
        self.weights = torch.rand(2, WIDTH)
        self.cache = decode_slots.Cache()
        self.logits = torch.randn(4, decode_slots.VOCABULARY) * 3

    def query_and_key(self) -> tuple[Any, Any]:
        """Views of one matrix, as a model has them."""
        own = self.qkv.clone()
        return own[:, : HEADS * WIDTH], own[:, HEADS * WIDTH : (HEADS + KEYS) * WIDTH]


class Attention(torch.nn.Module):
    """What Qwen3's attention has between its linear layers, with the forward of Qwen3's."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.head_dim, self.q_size, self.kv_size = WIDTH, HEADS * WIDTH, KEYS * WIDTH
        self.q_norm, self.k_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.rotary_emb = rotary(WIDTH, neox=True)
        for norm, weight in zip((self.q_norm, self.k_norm), inputs.weights, strict=True):
            norm.weight.data.copy_(weight)

    def qkv_proj(self, hidden: Any) -> tuple[Any, None]:
        return hidden, None

    def attn(self, query: Any, key: Any, value: Any) -> Any:
        return torch.cat((query, key, value), dim=-1)

    def o_proj(self, x: Any) -> tuple[Any, None]:
        return x, None

    forward = Qwen3Attention.forward


class Scaled(Attention):
    """Does something between norm and rotation."""

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        return Qwen3Attention.forward(self, positions, hidden_states * 2)


class OwnWay(SiluAndMul):
    """Calls what it likes."""

    def forward(self, x: Any) -> Any:
        return x


def in_a_graph(inputs: Inputs, wanted: list[Any]) -> list[str]:
    """The operators that a compiled layer calls; what it is given stays as it is."""
    layer, given, targets = rotary(8, neox=True), inputs.query_and_key(), []

    def backend(graph: Any, example: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    kept = [each.clone() for each in given]
    found = torch.compile(layer, backend=backend, fullgraph=True)(inputs.positions, *given)
    assert all(map(torch.equal, given, kept))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)
    return targets


def captured(slots: Any, inputs: Inputs, folder: Path) -> dict[str, Any]:
    """Shapes of one captured call; of the cache only what the positions reach."""
    from safetensors.torch import load_file

    slots.slots_capture("rotary_q3_k2_d16_r8_neox_f32", 1, str(folder / "captured"))
    rotary(8, neox=True)(inputs.positions, *inputs.query_and_key())
    call = slots.slots_captured()["calls"][0]
    found = load_file(call["path"])
    assert torch.equal(found["positions"], inputs.positions)
    return {name: list(tensor.shape) for name, tensor in found.items()}


def rotary(turned: int, *, neox: bool) -> Any:
    return RotaryEmbedding(WIDTH, turned, 32, 10000.0, neox, torch.float32)


def outputs(inputs: Inputs, *, fused: Any = None) -> dict[str, list[Any]]:
    """Every operation once, by layers made now."""
    from vllm import ir

    found: dict[str, list[Any]] = {"rms_norm": [ir.ops.rms_norm(inputs.x, inputs.weight, 1e-5)]}
    found["fused_add_rms_norm"] = list(
        ir.ops.fused_add_rms_norm(inputs.x, inputs.residual, inputs.weight, 1e-5)
    )
    found["silu_and_mul"] = [SiluAndMul()(inputs.x)]
    for turned, neox in ((WIDTH, True), (8, True), (WIDTH, False)):
        layer = rotary(turned, neox=neox)
        found[f"rotary {turned} {neox}"] = list(layer(inputs.positions, *inputs.query_and_key()))
    query, _ = inputs.query_and_key()
    # A layer that shares another's keys has none; vLLM's operator for CPUs wants some, its code in Python does not.
    found["no key"] = [rotary(WIDTH, neox=True).forward_native(inputs.positions, query)[0]]
    attention = Attention(inputs)
    if fused is not None:
        fused(attention)
    found["attention"] = [attention(inputs.positions, inputs.qkv.clone())]
    found["decode"] = [decode_slots.attended(inputs.cache, 1)]
    found["prefill"] = [decode_slots.attended(inputs.cache, 2)]
    found["masked"] = [decode_slots.masked(inputs.logits)]
    return found


def main(result: str) -> None:
    current_platform.import_kernels()
    torch.manual_seed(0)
    inputs = Inputs()
    native = ["native"]
    IrOpPriorityConfig(rms_norm=native, fused_add_rms_norm=native, gelu_and_mul_sparse=native).set_default()
    stock = outputs(inputs)

    from polymorph.engine.extension import PolymorphExtension
    from polymorph.engine.hooks import HookMissing
    from polymorph.engine.hooks.dispatch import expect_dispatch
    from polymorph.engine.hooks.normed_heads import expect_norms_before_rotation, fuse_norms
    from polymorph.kernels.catalogue.artifacts import artifacts
    from polymorph.kernels.definitions import definition_named

    IrOpPriorityConfig(rms_norm=native, fused_add_rms_norm=native, gelu_and_mul_sparse=native).set_default()
    slots = PolymorphExtension()

    def fused(attention: Any) -> None:
        fuse_norms(attention, torch.ops.polymorph.qk_norm_rotary, (torch.float32,))

    kept = inputs.x.clone()
    empty = outputs(inputs, fused=fused)
    described = slots.slots_describe()
    names = [name for name in described["definitions"] if not name.startswith("gemm")]
    bindings = [artifacts(definition_named(name), most=1)[0].binding() for name in names]
    counted_empty = slots.slots_read(True)
    answer = slots.slots_engage(bindings)
    assert answer["ok"], answer
    tuned = outputs(inputs, fused=fused)
    assert torch.equal(inputs.x, kept)
    for name, wanted in stock.items():
        for one, two, three in zip(wanted, empty[name], tuned[name], strict=True):
            torch.testing.assert_close(three, one, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(two, one, msg=lambda text, name=name: f"{name}, empty: {text}")
    equal = {name: all(map(torch.equal, wanted, empty[name])) for name, wanted in stock.items()}
    refusals = {}
    for name, probe in (
        ("scaled", lambda: expect_norms_before_rotation(Scaled)),
        ("stranger", lambda: expect_norms_before_rotation(torch.nn.Linear)),
        ("own way", lambda: expect_dispatch(OwnWay)),
    ):
        try:
            probe()
        except HookMissing as reason:
            refusals[name] = str(reason)
    told = {
        "missing": described["missing"],
        "names": names,
        "equal": equal,
        "empty": counted_empty,
        "tuned": slots.slots_read(),
        "refusals": refusals,
        "in a graph": in_a_graph(inputs, stock["rotary 8 True"]),
        "captured": captured(slots, inputs, Path(result).parent),
    }
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    with set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["all"]))
    ):
        main(*sys.argv[1:])
