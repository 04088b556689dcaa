"""The slots of decode attention and of top-k and top-p in this process, without vLLM: kernels, counters, captures."""

import json
from typing import Any

import pytest
import torch

from polymorph.engine.capture import collect
from polymorph.engine.dispatcher.ops import load
from polymorph.engine.packed import PackedWeights
from polymorph.engine.slots import Slots
from polymorph.engine.weights import WeightStore
from polymorph.kernels.catalogue.artifacts import Artifact, artifacts
from polymorph.kernels.definitions import definition_named

ATTENTION = "attn_decode_q6_kv2_d32_b32_f32"
SAMPLING = "top_k_top_p_v97_f32"


@pytest.fixture(scope="module")
def slots() -> Slots:
    made = Slots(ops=load(), weights=WeightStore(1 << 20), packed=PackedWeights(1 << 20))
    made.ops.add_attention(6, 2, 32, 32, torch.float32)
    made.ops.add_top_k_top_p(97)
    return made


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Artifact, ...]]:
    folder = tmp_path_factory.mktemp("kernels")
    return {name: artifacts(definition_named(name), folder=folder, most=2) for name in (ATTENTION, SAMPLING)}


def _counts(slots: Slots) -> Any:
    return json.loads(slots.ops.read_counters(False))


def _reference(name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(compile(definition_named(name).reference, name, "exec"), scope)  # noqa: S102
    return scope["run"]


class Batch:
    """Sequences of these lengths in a cache of vLLM's shape."""

    def __init__(self, *lengths: int) -> None:
        pages = [-(-length // 32) for length in lengths]
        self.cache = torch.randn(sum(pages) + 3, 2, 32, 64)
        self.q, self.o = torch.randn(len(lengths), 6, 32), torch.empty(len(lengths), 6, 32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.zeros(len(lengths), max(pages) + 2, dtype=torch.int32)
        first = 3
        for row, count in enumerate(pages):
            self.table[row, :count] = torch.arange(first, first + count)
            first += count

    def caches(self) -> tuple[Any, Any]:
        keys, values = self.cache.view(-1, 2, 64, 32).chunk(2, dim=2)
        return keys, values

    def call(self, slots: Slots) -> Any:
        starts = torch.arange(len(self.lengths) + 1, dtype=torch.int32)
        keys, values = self.caches()
        slots.ops.attention(
            self.q, keys, values, self.o, starts, self.lengths, 0.25, self.table, torch.empty(0)
        )
        return self.o

    def wanted(self) -> Any:
        keys, values = self.caches()
        turned = keys.as_strided((len(keys), 2, 32, 32), (keys.stride(0), keys.stride(1), 32, 1))
        return _reference(ATTENTION)(self.q, turned, values, self.table, self.lengths, 0.25)


def test_definitions_are_known_before_the_first_call(slots: Slots) -> None:
    assert {ATTENTION, SAMPLING} <= set(slots.definitions())


def test_a_kernel_serves_decode_attention(slots: Slots, kernels: Any) -> None:
    slots.engage([kernels[ATTENTION][0].binding()])
    slots.ops.read_counters(True)
    batch = Batch(40, 1, 97)
    torch.testing.assert_close(batch.call(slots), batch.wanted())
    counts = _counts(slots)
    assert counts["artifacts"][kernels[ATTENTION][0].digest]["served"]["calls"] == 1
    assert counts["definitions"][ATTENTION]["by_m"]["4"]["calls"] == 1


def test_the_longest_context_decides_which_kernel_serves(slots: Slots, kernels: Any) -> None:
    short, long = kernels[ATTENTION]
    slots.engage([short.binding(most=64), long.binding(least=65)])
    slots.ops.read_counters(True)
    for lengths in ((64, 2), (3, 65), (64,)):
        batch = Batch(*lengths)
        torch.testing.assert_close(batch.call(slots), batch.wanted())
    served = _counts(slots)["artifacts"]
    assert [served[each.digest]["served"]["calls"] for each in (short, long)] == [2, 1]


def test_a_captured_call_holds_the_blocks_it_used(slots: Slots, kernels: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    slots.engage([kernels[ATTENTION][0].binding()])
    slots.ops.capture_start(ATTENTION, 1, 1, 1 << 20, 1, 4)
    batch = Batch(40, 1, 97)
    o = batch.call(slots)
    call = collect(slots, tmp_path)["calls"][0]
    inputs = load_file(call["path"])
    assert call["m"] == 3
    assert inputs["key_cache"].shape == (7, 2, 32, 32)
    assert inputs["block_table"].shape == (3, 4)
    torch.testing.assert_close(_reference(ATTENTION)(**inputs), o)


def test_top_k_and_top_p_are_served_in_place_or_left(slots: Slots, kernels: Any) -> None:
    slots.clear()
    slots.ops.read_counters(True)
    logits, k = torch.randn(3, 97) * 3, torch.tensor([97, 5, 1], dtype=torch.int32)
    p = torch.tensor([0.9, 1.0, 0.5])
    masked = logits.clone()
    assert slots.ops.top_k_top_p(masked, k, p) is False
    assert torch.equal(masked, logits)
    slots.ops.count_native_top_k_top_p(97, 3, 1500)
    assert _counts(slots)["definitions"][SAMPLING] == {
        "native": {"calls": 1, "ns": 1500},
        "by_m": {"4": {"calls": 1, "ns": 1500}},
    }
    slots.engage([kernels[SAMPLING][0].binding(1, 4)])
    assert slots.ops.top_k_top_p(masked, k, p) is True
    assert torch.equal(masked, _reference(SAMPLING)(logits, k, p))
    assert slots.ops.top_k_top_p(torch.randn(5, 97), None, torch.full((5,), 0.9)) is False
    assert _counts(slots)["artifacts"][kernels[SAMPLING][0].digest]["served"]["calls"] == 1


def test_a_k_that_no_row_has_is_left_to_the_native_code(slots: Slots, kernels: Any) -> None:
    slots.engage([kernels[SAMPLING][0].binding()])
    slots.ops.read_counters(True)
    logits = torch.randn(1, 97)
    assert slots.ops.top_k_top_p(logits, torch.tensor([98], dtype=torch.int32), None) is False
    assert _counts(slots)["artifacts"][kernels[SAMPLING][0].digest]["errors"] == 1
    slots.clear()
