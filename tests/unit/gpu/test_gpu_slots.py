"""Slots of a GPU, here on the CPU: which kernel a call gets, and what serves where there is none."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polymorph.engine.bindings import BindingRefused, SlotBinding
from polymorph.engine.gpu import counters, ops, reference
from polymorph.engine.gpu.counters import Cell, Counters, CountersFull
from polymorph.engine.gpu.slots import SlotTable, Table, definition_name
from polymorph.kernels.definitions import definition_named

MakeTable = Callable[..., Table]
SIZES = {"rms_norm": (48,), "fused_add_rms_norm": (48,), "silu_and_mul": (24,), "linear": (40, 48)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def silu(x: Any) -> Any:
    return torch.ops.polymorph_gpu.silu_and_mul(x)


def factor(x: Any) -> float:
    return round(float((silu(x) / ops._native_silu(x)).mean()), 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", SIZES)
def test_an_empty_slot_computes_its_definition(slots: SlotTable, operation: str, dtype: Any) -> None:
    for m in (1, 3):
        given = reference.inputs(operation, SIZES[operation], m, dtype, "cpu", seed=m)
        result = getattr(torch.ops.polymorph_gpu, operation)(*given)
        # The chain of plain torch rounds in between, in bfloat16 and float16.
        slack = 1.0 if dtype is torch.float32 else 4.0
        assert reference.worst(result, reference.bounds(operation, given)) <= slack


@pytest.mark.parametrize("operation", SIZES)
def test_the_reference_here_is_that_of_the_signed_definition(operation: str) -> None:
    given = reference.inputs(operation, SIZES[operation], 3, torch.float32, "cpu", seed=1)
    wide = [one.double() if torch.is_tensor(one) else one for one in given]
    namespace: dict[str, Any] = {}
    definition = definition_named(definition_name(operation, SIZES[operation], torch.float32))
    exec(definition.reference, namespace)  # noqa: S102 - our own text
    assert reference.worst(namespace["run"](*wide), reference.bounds(operation, given)) < 1e-6


def test_a_wrong_result_is_told_from_a_right_one() -> None:
    given = reference.inputs("silu_and_mul", (24,), 2, torch.float32, "cpu", seed=1)
    expected = reference.bounds("silu_and_mul", given)
    right = ops._native_silu(given[0])
    off = right.clone()
    off[1, 3] += 1e-3
    gone = right.clone()
    gone[0, 0] = float("nan")
    used = [reference.worst(each, expected) for each in (right, off, gone, right[:1], (right, right))]
    assert used[0] <= 1 < used[1]
    assert used[2:] == [float("inf")] * 3


def test_a_call_gets_the_kernel_of_its_bucket(slots: SlotTable, table_of: MakeTable) -> None:
    slots.engage(table_of(3))
    assert [factor(torch.ones(m, 32)) for m in (1, 5, 8, 9)] == [3.0, 3.0, 3.0, 1.0]
    served = {cell.bucket: calls for cell, calls in slots.counters.read().items()}
    assert served == {1: 1, 2: 0, 4: 0, 8: 2}
    assert factor(torch.ones(2, 4, 32)) == 3.0, "M is all dimensions but the last"
    slots.engage(Table())
    assert factor(torch.ones(1, 32)) == 1.0


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 64)[:, ::2],
        torch.ones(2, 32, dtype=torch.bfloat16),
        torch.ones(2, 30),
        torch.ones(65)[1:].view(2, 32),
    ],
    ids=["not contiguous", "other dtype", "other width", "not aligned"],
)
def test_a_call_that_a_kernel_was_not_made_for_gets_the_engines_own_code(
    slots: SlotTable, table_of: MakeTable, x: Any
) -> None:
    slots.engage(table_of(3))
    assert factor(x) == 1.0


def test_a_thread_that_captures_sees_its_own_table(slots: SlotTable, table_of: MakeTable) -> None:
    slots.engage(table_of(3))
    seen: list[float] = []
    with slots.using(table_of(5)):
        other = threading.Thread(target=lambda: seen.append(factor(torch.ones(1, 32))))
        other.start()
        other.join()
        seen.append(factor(torch.ones(1, 32)))
    assert [*seen, factor(torch.ones(1, 32))] == [3.0, 5.0, 3.0]


def test_what_traces_a_model_sees_shapes_alone(slots: SlotTable) -> None:
    with FakeTensorMode() as mode:
        x, weight = torch.empty(3, 48), torch.empty(48)
        namespace = torch.ops.polymorph_gpu
        assert namespace.rms_norm(x, weight, 1e-6).shape == (3, 48)
        assert [each.shape[0] for each in namespace.fused_add_rms_norm(x, x, weight, 1e-6)] == [3, 3]
        assert namespace.silu_and_mul(x).shape == (3, 24)
        assert namespace.linear(x, torch.empty(7, 48), None).shape == (3, 7)
        assert mode is not None


def test_a_slots_own_code_can_be_replaced(slots: SlotTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "NATIVE", dict(ops.NATIVE))
    ops.replace_native("silu_and_mul", lambda x: x[..., :1])
    assert silu(torch.ones(3, 32)).shape == (3, 1)
    with pytest.raises(ValueError, match="'moe' has no slot"):
        ops.replace_native("moe", lambda x: x)


@pytest.mark.parametrize(
    ("definition", "min_m", "max_m", "reason"),
    [
        ("silu_and_mul_d16_f32", 3, 8, None),
        ("silu_and_mul_d16_f32", 2, 7, "cuts a bucket"),
        ("rms_norm_h16_f32", 1, 8, "computes silu_and_mul, not rms_norm"),
        ("moe_e8", 1, 8, "no slot on a GPU serves moe_e8"),
    ],
)
def test_a_table_holds_what_fits(
    slots: SlotTable, table_of: MakeTable, definition: str, min_m: int, max_m: int, reason: str | None
) -> None:
    row = table_of(3).rows["silu_and_mul_d16_f32"]
    kernel = next(entry.kernel for entry in row if entry is not None)
    binding = SlotBinding(definition, min_m, max_m, "none.py", kernel.artifact)
    if reason is None:
        assert Table.of([binding], {kernel.artifact: kernel}, slots.counters).bindings == (binding,)
        with pytest.raises(BindingRefused, match="was not loaded"):
            Table.of([binding], {}, slots.counters)
        with pytest.raises(BindingRefused, match="by M alone"):
            Table.of([replace(binding, most=4)], {kernel.artifact: kernel}, slots.counters)
        return
    with pytest.raises(BindingRefused, match=reason):
        Table.of([binding], {kernel.artifact: kernel}, slots.counters)


def test_calls_that_somebody_elses_graph_captures_carry_their_own_increment() -> None:
    inside = [False]
    counted = Counters("cpu", lambda: inside[0])
    cell = counted.index(Cell("d", 1, "a"))
    inside[0] = True
    counted.served(cell)
    assert int(counted._in_graphs[cell]) == 1
    inside[0] = False
    counted.served(cell)
    assert counted.read() == {Cell("d", 1, "a"): 2}


def test_cells_run_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "CAPACITY", 1)
    counted = Counters("cpu")
    assert counted.index(Cell("d", 1, "a")) == counted.index(Cell("d", 1, "a"))
    with pytest.raises(CountersFull, match="restart the engine"):
        counted.index(Cell("d", 2, "a"))
