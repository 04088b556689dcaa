"""When a goal that fails is tried again, and when what ran before has its turn."""

import pytest

from polymorph.worker.domain.trying import RETRY_S, Trying


def test_pauses_grow_and_the_last_one_stays() -> None:
    trying = Trying()
    assert trying.pause_s is None
    pauses = []
    for trying.failures in range(1, 8):
        pauses.append(trying.pause_s)
    assert pauses == [*RETRY_S, RETRY_S[-1], RETRY_S[-1]]


def test_after_that_both_have_a_turn() -> None:
    turns = [Trying(failures=failures).owed_first for failures in range(10)]
    assert turns == [False, False, False, False, False, False, True, False, True, False]


def test_a_goal_is_put_off_for_longer_each_time_and_another_one_is_not() -> None:
    trying = Trying()
    trying.of((1, "a"))
    assert [trying.put_off(100.0), trying.put_off(100.0), trying.put_off(100.0)] == [60.0, 120.0, 240.0]
    assert [trying.put_off(100.0) for _ in range(9)][-1] == pytest.approx(900.0)
    trying.failures = 7
    trying.of((1, "a"))
    assert trying.off(999.0)
    assert not trying.off(1000.0)
    assert trying.failures == 7
    trying.of((2, "a"))
    assert not trying.off(100.0)
    assert (trying.failures, trying.put_off(0.0)) == (0, 60.0)
    trying.anew()
    assert not trying.off(0.0)
