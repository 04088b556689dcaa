import numpy as np
import pytest

from polymorph.evaluator.domain.budget import Errors, beyond
from polymorph.evaluator.domain.cases import checked_columns, largest_tried, plan, rows, spoiled, weights
from polymorph.evaluator.domain.number import (
    exact_in_bfloat16,
    from_bfloat16,
    load,
    poison,
    poisoned,
    store,
    to_bfloat16,
)
from polymorph.evaluator.domain.operation import UnknownOperation, expected, operation

RNG = np.random.default_rng(5)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.asarray([1.0, 1.00390625, 1.01171875, -2.5, 3.0e38], dtype=np.float32)
    rounded = from_bfloat16(to_bfloat16(values))
    assert rounded[:4].tolist() == [1.0, 1.0, 1.015625, -2.5]
    assert np.array_equal(exact_in_bfloat16(rounded), rounded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_poison_is_counted_and_survives_nothing_else(dtype: str) -> None:
    stored = store(np.zeros((3, 4), dtype=np.float32), dtype)
    assert poisoned(stored, dtype) == 0
    poison(stored, dtype)
    assert poisoned(stored, dtype) == 12
    assert np.isnan(load(stored, dtype)).all()
    stored[0, 0] = 0
    assert poisoned(stored, dtype) == 11


@pytest.mark.parametrize("name", ["gemm_n8_k4_f64", "softmax_h4_f32", "gemm_n8_k4_f32; rm", ""])
def test_only_known_operations_have_a_reference(name: str) -> None:
    with pytest.raises(UnknownOperation, match="none of"):
        operation(name)


def test_references_are_the_definitions_own() -> None:
    torch = pytest.importorskip("torch")
    op = operation("gemm_n6_k5_f32")
    given = {
        name: RNG.standard_normal(shape)
        for name, shape in (("x", (3, 5)), ("weight", (6, 5)), ("bias", (6,)))
    }
    scope: dict[str, object] = {}
    exec(op.definition.reference, scope)  # noqa: S102 - our own definition
    wanted = scope["run"](*(torch.from_numpy(given[name]) for name in ("x", "weight", "bias")))  # type: ignore[operator]
    found = expected(op, given, np.arange(6))["y"].value
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12)


def test_norm_references_are_the_definitions_own() -> None:
    torch = pytest.importorskip("torch")
    op = operation("fused_add_rms_norm_h7_f32")
    given = {
        "x": RNG.standard_normal((3, 7)),
        "residual": RNG.standard_normal((3, 7)),
        "weight": RNG.standard_normal(7),
    }
    scope: dict[str, object] = {}
    exec(op.definition.reference, scope)  # noqa: S102 - our own definition
    tensors = [torch.from_numpy(given[name]) for name in ("x", "residual", "weight")]
    wanted = scope["run"](*tensors, 1e-5)  # type: ignore[operator]
    found = expected(op, {**given, "eps": np.asarray([1e-5])}, np.arange(7))
    np.testing.assert_allclose(found["y"].value, wanted[0].numpy(), rtol=1e-12)
    np.testing.assert_allclose(found["residual_out"].value, wanted[1].numpy(), rtol=1e-12)


def _errors(change: float) -> Errors:
    op = operation("gemm_n32_k64_f32")
    x, weight = rows("normal", 4, 64, RNG), weights(op, RNG)
    reference = expected(op, {"x": x, "weight": weight}, np.arange(32))["y"]
    errors = Errors()
    errors.add("a", (x @ weight.T) * np.float32(1 + change), reference)
    return errors


def test_rounding_is_within_the_budget_and_a_lost_bit_is_not() -> None:
    incumbent = _errors(0.0)
    assert beyond(_errors(0.0), incumbent) is None
    assert "units" in (beyond(_errors(1e-5), incumbent) or "")


def test_a_wrong_case_is_not_diluted_by_right_ones() -> None:
    incumbent, candidate = _errors(0.0), _errors(0.0)
    candidate.count += 10**9
    candidate.by_case["b"] = 500.0
    incumbent.by_case["b"] = 1.0
    assert "case b" in (beyond(candidate, incumbent) or "")


def test_zeros_must_be_zeros_and_nan_is_an_error() -> None:
    op = operation("gemm_n8_k4_f32")
    zero = {"x": np.zeros((1, 4), dtype=np.float32), "weight": np.ones((8, 4), dtype=np.float32)}
    reference = expected(op, zero, np.arange(8))["y"]
    for output in (np.full((1, 8), 1e-30, dtype=np.float32), np.full((1, 8), np.nan, dtype=np.float32)):
        errors = Errors()
        errors.add("zeros", output, reference)
        assert beyond(errors, Errors(by_case={"zeros": 0.0})) is not None


def test_a_plan_holds_boundaries_ragged_sizes_and_every_kind() -> None:
    op = operation("gemm_n64_k64_f32")
    cases = plan(op, 5, 40, 32, np.random.default_rng(1))
    sizes = {case.m for case in cases}
    assert {5, 6, 32, 40} <= sizes
    assert all(5 <= m <= 40 for m in sizes)
    assert {"zeros", "one-hot", "mixed", "cancel"} <= {case.kind for case in cases}
    assert any(case.bias for case in cases)
    assert {case.end for case in cases} == {True, False}
    other = plan(op, 5, 40, 32, np.random.default_rng(2))
    assert [(c.m, c.kind) for c in cases] != [(c.m, c.kind) for c in other], "another seed, other cases"


def test_what_is_not_tried_is_not_signed() -> None:
    op = operation("gemm_n49152_k576_f32")
    assert largest_tried(op, 32) == 32
    assert largest_tried(op, 8192) == 512


def test_a_spoiled_weight_differs_in_one_place() -> None:
    op = operation("gemm_n16_k8_f32")
    weight = weights(op, RNG)
    assert np.array_equal(exact_in_bfloat16(weight), weight)
    changed, row, column = spoiled(weight, RNG)
    assert np.argwhere(changed != weight).tolist() == [[row, column]]
    assert exact_in_bfloat16(changed)[row, column] != changed[row, column]


def test_a_wide_output_is_checked_in_a_secret_draw_with_both_ends() -> None:
    op = operation("gemm_n49152_k576_f32")
    columns = checked_columns(op, 8, RNG)
    assert {0, 49151} <= set(columns.tolist())
    assert 64 < len(columns) < 49152
