"""When a revision is left and when the worker gives up; which call is blamed, and which hangs."""

from hypothesis import given
from hypothesis import strategies as st

from polymorph.engine.flight import Flight
from polymorph.worker.domain.deaths import MOST, UNDER_ONE, WITHIN_S, Deaths, Verdict
from polymorph.worker.domain.hanging import Hanging, blamed

A, B = "a" * 64, "b" * 64


def died(
    deaths: Deaths, now: float, revision: str = "r", *, blamed: bool = False, leavable: bool = True
) -> Verdict:
    return deaths.died(revision, blamed=blamed, leavable=leavable, now=now)


def test_a_revision_is_left_with_its_third_death_that_nobody_is_blamed_for() -> None:
    deaths = Deaths()
    assert [died(deaths, at).leave for at in (0, 100, 200)] == [False, False, True]
    assert not died(deaths, 210, "before").leave


def test_deaths_long_ago_and_under_others_do_not_count() -> None:
    deaths = Deaths()
    assert not died(deaths, 0).leave
    assert not died(deaths, WITHIN_S + 1).leave
    assert not died(deaths, WITHIN_S + 2, "other").leave
    assert not died(deaths, WITHIN_S + 3).leave
    assert died(deaths, WITHIN_S + 4).leave


def test_a_blamed_kernel_does_not_count_against_its_revision() -> None:
    deaths = Deaths()
    assert not any(died(deaths, at, blamed=True).leave for at in range(MOST))


def test_the_engines_own_code_cannot_be_left_and_ends_the_worker() -> None:
    deaths = Deaths()
    verdicts = [died(deaths, at, "empty", leavable=False) for at in range(MOST + 1)]
    assert not any(verdict.leave for verdict in verdicts)
    assert [verdict.give_up for verdict in verdicts] == [False] * MOST + [True]


@given(st.lists(st.tuples(st.floats(0, 400), st.sampled_from("ab"), st.booleans()), max_size=40))
def test_pauses_grow_and_nothing_is_restarted_for_ever(gaps: list[tuple[float, str, bool]]) -> None:
    deaths, now, recent = Deaths(), 0.0, []
    for gap, revision, blame in gaps:
        now += gap
        recent = [at for at in recent if now - at <= WITHIN_S] + [now]
        verdict = died(deaths, now, revision, blamed=blame)
        assert verdict.give_up == (len(recent) > MOST)
        assert verdict.pause_s >= (2.0 if len(recent) >= UNDER_ONE else 0.0)


def flight(began: int = 1, artifact: str = A, rank: int = 0, calls: int = 1) -> Flight:
    return Flight(rank, artifact, began, 1, calls)


def test_the_first_that_began_is_blamed() -> None:
    assert blamed([]) is None
    assert blamed([flight(9, B, 1), flight(5, A, 0)]) == flight(5, A, 0)


def test_a_call_hangs_when_it_was_seen_for_long_enough() -> None:
    hanging = Hanging(2.0)
    looks = [hanging.look([flight()], 0.5) for _ in range(5)]
    assert looks == [None] * 4 + [flight()]


def test_calls_that_end_do_not_hang_however_many_there_are() -> None:
    hanging = Hanging(2.0)
    assert all(hanging.look([flight(began=n, calls=n)], 1.0) is None for n in range(1, 50))


def test_time_in_which_nobody_looked_does_not_count() -> None:
    hanging = Hanging(20.0)
    hanging.look([flight()], 0.25)
    assert hanging.look([flight()], 0.5) is None  # the worker was stopped for a minute: its looks are bounded


def test_the_one_that_hangs_is_told_among_others() -> None:
    hanging = Hanging(1.0)
    hanging.look([flight(rank=0), flight(rank=1, artifact=B)], 1.0)
    assert hanging.look([flight(began=7, rank=0), flight(rank=1, artifact=B)], 1.0) == flight(
        rank=1, artifact=B
    )
