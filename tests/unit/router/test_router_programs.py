"""Programs stay where their prefix is cached, as long as load allows it."""

import datetime as dt

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from polymorph.events.requests import Placed, PlaceRequest
from polymorph.events.state import WorkerRecord
from polymorph.router.domain.accounts import Accounts
from polymorph.router.domain.announcements import Announcements
from polymorph.router.domain.desk import Desk, DeskRules
from polymorph.router.domain.fleet import Fleet
from polymorph.router.domain.policy import Candidate, pick
from polymorph.router.domain.programs import Program, Programs
from polymorph.router.settings import RouterSettings

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def program(name: str, pool: str = "p") -> Program:
    return Program.named(pool, name)


class Desked:
    """A desk with workers of unlimited room, and its programs."""

    def __init__(self, *names: str, margin: int = 1000, seqs: int = 0) -> None:
        self.announcements = Announcements()
        self.programs = Programs(self.announcements)
        rules = DeskRules(seqs_factor=1.0, sticky_margin_tokens=margin)
        self.desk = Desk(rules, Fleet(ttl_s=15), Accounts(ttl_s=900), self.programs)
        for name in names:
            self.see(name, seqs=seqs)

    def see(self, name: str, state: str = "ready", seqs: int = 0) -> None:
        record = WorkerRecord(
            worker_id=name,
            pool="p",
            model="m",
            url=f"http://{name}",
            state=state,
            generation=1,
            revision="empty",
            hardware="h",
            running=1,
            max_num_seqs=seqs,
            started_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        )
        self.desk.worker_seen(record, 0.0)

    def ask(
        self, name: str, of: str | None, *, tokens: int = 10, now: float = 0.0, exclude: tuple[str, ...] = ()
    ) -> str:
        asked = PlaceRequest(
            pool="p",
            request_id=name,
            program_id=of,
            prompt_tokens_estimate=tokens,
            max_tokens=10,
            exclude=exclude,
        )
        answer = self.desk.arrive(asked, now)
        assert isinstance(answer, Placed)
        return answer.worker_id


def other(one: str) -> str:
    return {"a": "b", "b": "a"}[one]


def test_a_program_goes_to_the_worker_that_served_it_last_while_that_is_little_more_loaded():
    made = Desked("a", "b", margin=1000)
    home = made.ask("1", "prog")
    made.desk.finished("1")
    made.ask("load-home", None, tokens=1, exclude=(other(home),))
    for number in range(10):
        assert made.ask(f"next-{number}", "prog") == home
        made.desk.finished(f"next-{number}")
    made.ask("more", None, tokens=2000, exclude=(other(home),))
    assert made.ask("elsewhere", "prog") == other(home), "a cached prefix is not worth a hot worker"
    made.desk.finished("more")
    assert made.ask("follows", "prog") == other(home), "the worker that served it last is another now"


def test_without_a_margin_load_alone_decides_and_nothing_is_kept():
    made = Desked("a", "b", margin=0)
    home = made.ask("1", "prog")
    assert made.ask("2", "prog") == other(home)
    assert (len(made.programs), len(made.announcements)) == (0, 0)


def test_a_home_that_just_failed_or_is_full_or_gone_is_passed_over():
    made = Desked("a", "b", margin=10**6, seqs=2)
    home = made.ask("1", "prog")
    assert made.ask("2", "prog") == home
    assert made.ask("3", "prog") == other(home), "full"
    made.desk.finished("1")
    assert made.ask("4", "prog", exclude=(other(home),)) == home
    made.desk.finished("2")
    assert made.ask("5", "prog", exclude=(home,)) == other(home), "just failed"
    made.desk.finished("5")
    made.see(other(home), state="draining", seqs=2)
    assert made.ask("6", "prog") == home


def test_programs_of_two_pools_and_requests_without_program_do_not_meet():
    made = Desked("a", "b", margin=10**6)
    made.programs.heard(program("prog", pool="q"), "a", 0.0)
    placed = {made.ask(str(number), None) for number in range(2)}
    assert placed == {"a", "b"}
    assert made.programs.home(program("prog"), 0.0) is None


def test_what_a_gateway_placed_by_itself_is_known_and_not_told_again():
    made = Desked("a", "b")
    for home in ("a", "b"):
        made.desk.served_elsewhere("p", "prog", home, 0.0)
        assert len(made.announcements) == 0
        assert made.programs.home(program("prog"), 0.0) == home
    assert made.ask("1", "prog") == "b"
    assert made.announcements.oldest(9) == [(program("prog"), "b")]


def test_a_program_id_leaves_as_a_digest_alone():
    named = program("ann@example.org")
    assert named == program("ann@example.org")
    assert len(named.digest) == 32
    assert "ann" not in named.digest
    assert named != program("bob@example.org")


def test_a_program_is_forgotten_after_its_time_and_the_one_served_longest_ago_first():
    made = Programs(ttl_s=10, limit=2)
    made.served(program("1"), "a", 0.0)
    assert made.home(program("1"), 10.0) == "a"
    assert made.home(program("1"), 10.1) is None
    for number in range(3):
        made.served(program(str(number)), "a", 20.0 + number)
    assert [made.home(program(str(number)), 23.0) for number in range(3)] == [None, "a", "a"]
    made.served(program("1"), "b", 24.0)
    made.served(program("3"), "a", 25.0)
    assert [made.home(program(str(number)), 25.0) for number in (1, 2, 3)] == ["b", None, "a"]
    made.served(program("4"), "a", 50.0)
    assert len(made) == 1, "what expired takes no room"


def test_what_is_loaded_fills_gaps_and_displaces_nothing():
    made = Programs(ttl_s=10, limit=2)
    made.served(program("1"), "a", 0.0)
    assert not made.loaded(program("1"), "old", 1.0)
    assert made.loaded(program("2"), "b", 1.0)
    assert not made.loaded(program("3"), "b", 1.0)
    assert made.full
    made.served(program("4"), "c", 2.0)
    assert [made.home(program(name), 2.0) for name in "1234"] == ["a", None, None, "c"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["served", "heard", "loaded"]),
        st.integers(0, 6),
        st.sampled_from("abc"),
        st.integers(0, 6),
    ),
    max_size=60,
)


@PATIENT
@given(STEPS)
def test_the_map_says_the_last_worker_or_nothing_and_keeps_its_bounds(steps):
    made, last, now = Programs(ttl_s=10, limit=4), {}, 0.0
    for what, number, worker_id, pause in steps:
        now += pause
        one = program(str(number))
        if what != "loaded":
            getattr(made, what)(one, worker_id, now)
            last[one] = (worker_id, now)
            assert made.home(one, now) == worker_id
        elif made.loaded(one, worker_id, now):
            last[one] = (worker_id, now)
        assert len(made) <= 4
        for known, (where, at) in last.items():
            assert made.home(known, now) in ({where, None} if now - at <= 10 else {None})


@PATIENT
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(0, 6),
    st.integers(1, 3000),
    st.integers(0, 6000),
)
def test_no_home_makes_a_worker_more_than_the_margin_hotter(loads, home, margin, capacity):
    workers = [
        Candidate(f"w{n}", "", tokens, requests, capacity_tokens=capacity)
        for n, (tokens, requests) in enumerate(loads)
    ]
    best = pick(workers, 100, "r")
    chosen = pick(workers, 100, "r", home=f"w{home}", margin=margin)
    if best is None:
        assert chosen is None
        return
    assert chosen.has_room(100)
    assert chosen.tokens <= best.tokens + margin
    at_home = next((w for w in workers if w.worker_id == f"w{home}"), None)
    if at_home and at_home.has_room(100) and at_home.tokens <= best.tokens + margin:
        assert chosen == at_home
    else:
        assert chosen == best


def test_announcements_keep_the_last_worker_of_each_program_and_drop_the_oldest():
    made = Announcements(limit=2)
    for name, worker_id in (("1", "a"), ("2", "a"), ("1", "b")):
        made.put(program(name), worker_id)
    assert made.oldest(9) == [(program("2"), "a"), (program("1"), "b")]
    made.put(program("3"), "a")
    assert [one for one, _ in made.oldest(9)] == [program("1"), program("3")]
    assert (made.take_dropped(), made.take_dropped()) == (1, 0)


def test_an_announcement_that_was_replaced_while_it_was_told_is_told_again():
    made = Announcements()
    made.put(program("1"), "a")
    batch = made.oldest(9)
    made.put(program("1"), "b")
    made.told(batch)
    assert made.oldest(9) == [(program("1"), "b")]
    made.told(made.oldest(9))
    made.told(batch)
    assert len(made) == 0


def test_a_url_that_the_client_would_refuse_is_refused_at_start_and_never_printed():
    with pytest.raises(ValidationError, match="redis://"):
        RouterSettings(redis_url="http://127.0.0.1:6379")
    assert "secret" not in str(RouterSettings(redis_url="redis://:secret@127.0.0.1:6379/0").masked())
    for wrong in ("http://:secret@127.0.0.1:6379", "redis://:secret/5@127.0.0.1:6379", "redis://:x@h:secret"):
        with pytest.raises(ValidationError, match="percent-encoded") as refused:
            RouterSettings(redis_url=wrong)
        assert "secret" not in str(refused.value)
