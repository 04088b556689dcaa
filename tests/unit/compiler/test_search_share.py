"""The share of an operation is what profiled steps tell, where there are any."""

import pytest

from polymorph.compiler.domain.search_share import LEAST_SAMPLED, MOST_RAISED, measured
from polymorph.compiler.domain.search_target import plan
from polymorph.events.types import SearchOpened
from polymorph.events.values import Operation, StepTime

NORM = "rms_norm_h576_f32"


def half(definition, min_m, max_m):
    return 0.5


def told(sampled=40, **shares):
    return StepTime(shares=shares, reachable=min(1.0, sum(shares.values())), sampled_steps=sampled)


def operations(**shares):
    return tuple(Operation(definition=name, share=share) for name, share in shares.items())


def test_a_slots_share_is_split_as_its_timers_say(lab):
    found = measured(
        operations(**{lab.GATE_UP: 0.3, lab.DOWN: 0.1, NORM: 0.2}), told(linear=0.6, rms_norm=0.1)
    )
    assert found[lab.GATE_UP].share == pytest.approx(0.45)
    assert found[lab.DOWN].share == pytest.approx(0.15)
    assert found[NORM].share == pytest.approx(0.1)
    assert found[NORM].profiled.slot == "rms_norm"


def test_without_a_profile_the_timers_tell(lab):
    timed = operations(**{lab.GATE_UP: 0.3})
    for nothing in (None, told(attention=0.5), told(LEAST_SAMPLED - 1, linear=0.6)):
        share = measured(timed, nothing)[lab.GATE_UP]
        assert (share.share, share.profiled) == (0.3, None)


def test_operators_that_no_slot_calls_are_not_its_operations(lab):
    """A family counts a product wherever it is computed; the timers see what passes through the slot."""
    share = measured(operations(**{lab.GATE_UP: 0.05}), told(linear=0.7))[lab.GATE_UP]
    assert share.share == pytest.approx(0.05 * MOST_RAISED)


def test_an_operation_of_another_release_is_left_to_its_timer():
    assert measured(operations(softmax_h64=0.4), told(linear=0.6))["softmax_h64"].share == 0.4


def test_the_profile_decides_what_is_searched_first(lab):
    timers = {lab.GATE_UP: 0.25, NORM: 0.3}
    seen = lab.window({"8": 1.0}, timers)
    by_timers = plan(seen, half, least_gain=0, limit=2, largest_m=32)
    assert [target.definition for target in by_timers] == [NORM, lab.GATE_UP]
    profiled = seen.model_copy(update={"step_time": told(linear=0.5, rms_norm=0.04)})
    first, second = plan(profiled, half, least_gain=0, limit=2, largest_m=32)
    assert (first.definition, first.share, first.gain) == (lab.GATE_UP, 0.5, 0.25)
    assert second.gain == pytest.approx(0.02)
    paying = plan(profiled, half, least_gain=0.03, limit=2, largest_m=32)
    assert [target.definition for target in paying] == [lab.GATE_UP], "of 4 % no more than 4 % can be won"


def test_a_search_says_what_its_share_was_measured_by(lab):
    seen = lab.window({"8": 1.0}, {lab.GATE_UP: 0.25})
    world = lab.World(lab.loop([["a"]]), lab.TableEvaluator())
    drift = lab.drift_of(seen).model_copy(
        update={"operations": seen.operations, "step_time": told(linear=0.4, attention=0.3)}
    )
    world.window(seen, drift)
    opened = world.told(SearchOpened)[0]
    assert opened.share == pytest.approx(0.4)
    assert (
        "takes 40% of the step time (in 40 profiled steps slot linear takes 40%, all slots together 70%)"
        in (opened.reason)
    )
