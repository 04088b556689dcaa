"""The slot of experts: vLLM's own operator as native code, kernels by bucket and by histogram, counts by expert."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polymorph.engine.bindings import BindingRefused
from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore
from polymorph.kernels.build import build
from polymorph.kernels.catalogue.artifacts import Artifact
from polymorph.kernels.catalogue.moe import PATTERNS, moe_solution
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.isa import detect_isa
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.toolchain import detect_toolchain, run_command

pytestmark = pytest.mark.engine
EXPERTS, TOPK, HIDDEN, INNER = 4, 2, 64, 32
DEFINITION = f"moe_e{EXPERTS}_k{TOPK}_h{HIDDEN}_i{INNER}_f32"
NARROW, EXACT = "stream", "exact"


@pytest.fixture(scope="module")
def native() -> Any:
    """vLLM's operators, as an engine loads them."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """One that holds weights as bfloat16, and one that holds all."""
    folder = tmp_path_factory.mktemp("kernels")
    found = {}
    for name in (NARROW, EXACT):
        solution = moe_solution(definition_named(DEFINITION), detect_isa(), name, PATTERNS[name])
        built = build(solution, folder / name, detect_toolchain(), run_command)
        found[name] = Artifact(solution, built.path, built.digest, layout_digest(solution))
    return found


class Layer:
    """Experts that vLLM packed, and that are kept for kernels; counting begins anew."""

    def __init__(self, native: Any, *, rounded: bool = True, budget: int = 1 << 30) -> None:
        self.native = native
        self.slots = Slots(ops=load(), weights=WeightStore(budget), packed=PackedWeights(1 << 30))
        self.load(*self.weights(rounded))
        self.layer_id = self.slots.add_moe((self.w13, self.w2), TOPK, "vec")
        self.slots.clear()
        self.slots.ops.read_counters(True)

    def weights(self, rounded: bool) -> tuple[Any, Any]:
        made = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, INNER) / 8
        return tuple(each.bfloat16().float() for each in made) if rounded else made

    def load(self, w13: Any, w2: Any) -> None:
        self.w13, self.w2 = w13, w2
        self.packed = tuple(torch.empty_like(each) for each in (w13, w2))
        for plain, packed in zip((w13, w2), self.packed, strict=True):
            self.native.prepack_moe_weight(plain, packed, "vec")

    def __call__(self, x: Any, weights: Any, ids: Any) -> Any:
        y = torch.full_like(x, float("nan"))
        self.slots.ops.fused_moe(y, x, *self.packed, weights, ids, self.layer_id)
        return y

    def by_vllm(self, x: Any, weights: Any, ids: Any) -> Any:
        y = torch.full_like(x, float("nan"))
        self.native.cpu_fused_moe(y, x, *self.packed, None, None, weights, ids, False, "silu", "vec")
        return y

    def by_reference(self, x: Any, weights: Any, ids: Any) -> Any:
        scope: dict[str, Any] = {}
        exec(definition_named(DEFINITION).reference, scope)  # noqa: S102
        return scope["run"](x, self.w13, self.w2, weights, ids)

    def counts(self) -> dict[str, Any]:
        document = json.loads(self.slots.ops.read_counters(False))
        return {**document["definitions"][DEFINITION], "artifacts": document["artifacts"]}

    def served(self, kernel: Artifact) -> int:
        return self.counts()["artifacts"][kernel.digest]["served"]["calls"]


def routing(*experts: tuple[int, int]) -> tuple[Any, Any]:
    """The experts of each token, and weights."""
    weights = torch.softmax(torch.randn(len(experts), TOPK), -1)
    return weights, torch.tensor(experts, dtype=torch.int32)


SKEWED = ((0, 1), (0, 2), (0, 3), (0, 1))
EVEN = ((0, 1), (2, 3), (1, 2), (3, 0))


def test_an_empty_slot_is_vllms_operator_bit_for_bit(native: Any) -> None:
    layer = Layer(native)
    call = (torch.randn(4, HIDDEN), *routing(*SKEWED))
    assert torch.equal(layer(*call), layer.by_vllm(*call))
    assert layer.counts()["native"]["calls"] == 1
    torch.testing.assert_close(layer.by_vllm(*call), layer.by_reference(*call))


def test_tokens_are_counted_by_expert_and_layer(native: Any) -> None:
    layer = Layer(native)
    second = layer.slots.add_moe((layer.w13, layer.w2), TOPK, "vec")
    assert second != layer.layer_id
    layer(torch.randn(4, HIDDEN), *routing(*SKEWED))
    layer(torch.randn(4, HIDDEN), *routing(*EVEN))
    assert layer.counts()["experts"][-2:] == [[6, 4, 3, 3], [0, 0, 0, 0]]
    layer.slots.ops.read_counters(True)
    assert layer.counts()["experts"][-2:] == [[0] * 4, [0] * 4]


def test_two_kernels_share_a_bucket_and_the_histogram_decides(
    native: Any, kernels: dict[str, Artifact]
) -> None:
    layer = Layer(native)
    few, many = kernels[NARROW], kernels[EXACT]
    layer.slots.engage([few.binding(3, 4, most=60), many.binding(3, 4, least=61, most=100)])
    x = torch.randn(4, HIDDEN)
    for experts in (EVEN, SKEWED, SKEWED):
        call = (x, *routing(*experts))
        torch.testing.assert_close(layer(*call), layer.by_reference(*call))
    assert (layer.served(few), layer.served(many)) == (1, 2)
    assert layer.counts()["native"]["calls"] == 0


def test_what_no_range_holds_is_vllms(native: Any, kernels: dict[str, Artifact]) -> None:
    layer = Layer(native)
    layer.slots.engage([kernels[EXACT].binding(3, 4, least=61)])
    call = (torch.randn(4, HIDDEN), *routing(*EVEN))
    assert torch.equal(layer(*call), layer.by_vllm(*call))
    with pytest.raises(BindingRefused, match="claim M up to 4"):
        layer.slots.engage([kernels[EXACT].binding(3, 4, least=61), kernels[NARROW].binding(3, 4, most=61)])


def test_routing_that_no_definition_describes_is_vllms(native: Any, kernels: dict[str, Artifact]) -> None:
    layer = Layer(native)
    layer.slots.engage([kernels[EXACT].binding()])
    weights, ids = routing(*EVEN)
    call = (torch.randn(4, HIDDEN), torch.stack([weights, weights], -1)[..., 0], ids)
    assert torch.equal(layer(*call), layer.by_vllm(*call))
    assert layer.served(kernels[EXACT]) == 0


def test_weights_that_are_not_bfloat16_are_refused_by_narrow_kernels(
    native: Any, kernels: dict[str, Artifact]
) -> None:
    layer = Layer(native, rounded=False)
    with pytest.raises(BindingRefused, match="pm_pack refused"):
        layer.slots.engage([kernels[NARROW].binding()])
    layer.slots.engage([kernels[EXACT].binding()])
    call = (torch.randn(4, HIDDEN), *routing(*EVEN))
    torch.testing.assert_close(layer(*call), layer.by_reference(*call))


def test_both_weights_are_packed_within_the_budgets(native: Any, kernels: dict[str, Artifact]) -> None:
    layer = Layer(native)
    kernel = kernels[NARROW]
    layer.slots.engage([kernel.binding()])
    assert layer.slots.packed.bytes == 2 * (layer.w13.numel() + layer.w2.numel())
    assert layer.slots.weights.bytes == layer.slots.packed.bytes
    forgotten = Layer(native, budget=2 * layer.w13.numel())
    with pytest.raises(BindingRefused, match="was not kept"):
        forgotten.slots.engage([kernel.binding()])


def test_reloaded_weights_empty_the_slot_and_are_packed_anew(
    native: Any, kernels: dict[str, Artifact]
) -> None:
    layer = Layer(native)
    kernel = kernels[NARROW]
    layer.slots.engage([kernel.binding()])
    layer.load(*layer.weights(rounded=True))
    layer.slots.reload_moe(layer.layer_id, (layer.w13, layer.w2))
    call = (torch.randn(4, HIDDEN), *routing(*EVEN))
    assert torch.equal(layer(*call), layer.by_vllm(*call))
    layer.slots.engage([kernel.binding()])
    torch.testing.assert_close(layer(*call), layer.by_reference(*call))
    assert layer.served(kernel) == 1


def test_a_call_is_captured_with_its_routing_and_both_weights(native: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    layer = Layer(native)
    layer.slots.ops.capture_start(DEFINITION, 1, 1, 1 << 20, 1, 8)
    x, weights, ids = torch.randn(4, HIDDEN), *routing(*EVEN)
    layer(x, weights, ids)
    call = collect(layer.slots, tmp_path / "captured", weight=True)["calls"][0]
    found = load_file(call["path"])
    assert torch.equal(found["x"], x)
    assert torch.equal(found["topk_weights"], weights)
    assert torch.equal(found["topk_ids"], ids)
    kept = load_file(call["weight"])
    assert torch.equal(kept["w13"], layer.w13)
    assert torch.equal(kept["w2"], layer.w2)


def test_the_call_stays_one_operator_in_a_compiled_graph(native: Any) -> None:
    layer = Layer(native)
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(x: Any, weights: Any, ids: Any) -> Any:
        return layer(x, weights, ids) * 2

    call = (torch.randn(4, HIDDEN), *routing(*EVEN))
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*call), layer.by_vllm(*call) * 2)
    assert any("polymorph.fused_moe" in str(node.target) for node in graphs[0].graph.nodes)
