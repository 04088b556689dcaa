"""The gated activation's operator in this process, without vLLM: torch's own silu is the native code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore
from polymorph.kernels.catalogue.artifacts import artifacts
from polymorph.kernels.definitions import silu_and_mul_definition

D = 72  # a width that no other test uses, so that counters are its own
DEFINITION = silu_and_mul_definition(D, "float32")


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots(ops=load(), weights=WeightStore(1 << 20), packed=PackedWeights(1 << 20))
    made.ops.silu_and_mul(torch.zeros(1, 2 * D))
    made.ops.read_counters(True)
    yield made
    made.clear()


def _native(x: Any) -> Any:
    return torch.nn.functional.silu(x[..., :D]) * x[..., D:]


def _counts(slots: Slots) -> Any:
    return json.loads(slots.ops.read_counters(False))["definitions"][DEFINITION.name]


@pytest.mark.parametrize("shape", [(1, 2 * D), (5, 2 * D), (2, 3, 2 * D), (0, 2 * D)])
def test_an_empty_slot_is_torchs_own_bit_for_bit(slots: Slots, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(slots.ops.silu_and_mul(x), _native(x))
    assert _counts(slots)["native"]["calls"] == (1 if x.numel() else 0)


def test_a_kernel_takes_rows_of_something_wider(slots: Slots, tmp_path: Path) -> None:
    kernel = artifacts(DEFINITION, folder=tmp_path, most=1)[0]
    slots.engage([kernel.binding(1, 8)])
    x = torch.randn(5, 3 * D)[:, : 2 * D]
    torch.testing.assert_close(slots.ops.silu_and_mul(x), _native(x))
    torch.testing.assert_close(slots.ops.silu_and_mul(x.T.contiguous().T), _native(x))
    assert _counts(slots)["native"]["calls"] == 0
    many = torch.randn(9, 2 * D)
    assert torch.equal(slots.ops.silu_and_mul(many), _native(many))


def test_values_at_the_ends_of_the_exponential(slots: Slots, tmp_path: Path) -> None:
    slots.engage([kernel.binding() for kernel in artifacts(DEFINITION, folder=tmp_path, most=1)])
    gate = torch.tensor([0.0, -0.0, 1e-30, 87.0, 88.0, 1e4, -87.0, -88.0, -1e4, 3e38, -3e38, float("nan")])
    x = torch.zeros(1, 2 * D)
    x[0, : len(gate)] = gate
    x[0, D:] = 1
    found, wanted = slots.ops.silu_and_mul(x), _native(x.double()).float()
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-33, rtol=1e-6)


def test_an_odd_row_is_refused(slots: Slots) -> None:
    with pytest.raises(ValueError, match="no two halves"):
        slots.ops.silu_and_mul(torch.zeros(1, 3))


def test_it_stays_one_operator_in_a_compiled_graph(slots: Slots) -> None:
    targets: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        del example
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x: slots.ops.silu_and_mul(x) * 2, backend=backend, fullgraph=True)
    x = torch.randn(3, 2 * D)
    assert torch.equal(compiled(x), _native(x) * 2)
    assert any("polymorph.silu_and_mul" in target for target in targets)


def test_its_inputs_are_captured(slots: Slots, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    slots.ops.capture_start(DEFINITION.name, 1, 1, 1 << 20, 1, 8, False)
    x = torch.randn(2, 2 * D)
    slots.ops.silu_and_mul(x)
    call = collect(slots, tmp_path / "captured")["calls"][0]
    assert call["m"] == 2
    assert torch.equal(load_file(call["path"])["x"], x)
