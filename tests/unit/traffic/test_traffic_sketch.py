"""Sketches and mixtures of quantiles."""

import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polymorph.traffic.sketch import ZERO, Sketch, mixture, of, quantile

# A busy machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LENGTHS = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def test_quantiles_are_linear_between_order_statistics():
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


@PATIENT
@given(LENGTHS)
def test_quantiles_are_ordered_and_inside(values):
    found = of(values)
    assert min(values) <= found.p10 <= found.p50 <= found.p90 <= found.p99 <= max(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)


def test_a_full_sketch_keeps_its_room_and_its_shape():
    sketch = Sketch(capacity=256)
    for value in range(100_000):
        sketch.add((value * 7919) % 1000)
    found = sketch.quantiles()
    assert sketch.count == 100_000
    assert len(sketch._kept) <= 256
    assert found.mean == pytest.approx(499.5)
    assert found.p50 == pytest.approx(500, abs=80)


def test_nothing_has_no_quantiles():
    assert Sketch().quantiles() is None
    assert of([]) == ZERO
    assert mixture([]) == ZERO


@PATIENT
@given(LENGTHS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_mixture_of_one_distribution_with_itself_is_itself(values, one, other):
    found = of(values)
    mixed = mixture([(one, found), (other, found)])
    for level in ("p10", "p50", "p90", "p99"):
        assert getattr(mixed, level) == pytest.approx(getattr(found, level), rel=1e-6, abs=1e-3)


def test_a_mixture_lies_between_its_parts_by_weight():
    low, high = of(range(100)), of(range(1000, 1100))
    assert mixture([(9, low), (1, high)]).p50 < 100
    assert mixture([(1, low), (9, high)]).p50 > 1000
    assert mixture([(1, low), (1, high)]).mean == pytest.approx((low.mean + high.mean) / 2)
