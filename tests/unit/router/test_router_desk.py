"""Placement, holding and accounts, without a bus."""

import datetime as dt

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polymorph.events.requests import Held, Placed, PlaceRequest, Unplaceable
from polymorph.events.state import WorkerRecord
from polymorph.router.domain.accounts import Accounts
from polymorph.router.domain.desk import Desk, DeskRules
from polymorph.router.domain.fleet import Fleet
from polymorph.router.domain.policy import Candidate, pick
from polymorph.router.domain.programs import Programs

# A busy machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def worker(name: str, *, state: str = "ready", pool: str = "p", seqs: int = 4, **more: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        pool=pool,
        model="m",
        url=f"http://{name}",
        state=state,
        generation=1,
        revision="empty",
        hardware="h",
        max_num_seqs=seqs,
        started_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        **more,
    )


def request(name: str, *, tokens: int = 100, exclude: tuple[str, ...] = (), pool: str = "p") -> PlaceRequest:
    return PlaceRequest(
        pool=pool, request_id=name, prompt_tokens_estimate=tokens, max_tokens=100, exclude=exclude
    )


def desk(*workers: WorkerRecord, **rules: float) -> Desk:
    fleet = Fleet(ttl_s=15)
    made = Desk(DeskRules(**{"seqs_factor": 1.0, **rules}), fleet, Accounts(ttl_s=900), Programs())
    for one in workers:
        made.worker_seen(one.model_copy(update={"running": 1}), 0.0)
    return made


def test_the_worker_with_fewest_tokens_in_flight_gets_it():
    made = desk(worker("a"), worker("b"))
    first = made.arrive(request("big", tokens=5000), 0.0).worker_id
    other = "b" if first == "a" else "a"
    assert made.arrive(request("1", tokens=10), 0.0).worker_id == other
    assert made.arrive(request("2", tokens=10), 0.0).worker_id == other
    made.finished("big")
    assert made.arrive(request("3", tokens=10), 0.0).worker_id == first


@PATIENT
@given(st.integers(2, 6), st.integers(1, 60))
def test_equal_requests_spread_evenly_since_each_counts_before_its_answer(count, requests):
    made = desk(*(worker(f"w{n}", seqs=0) for n in range(count)))
    placed = [made.arrive(request(str(n)), 0.0).worker_id for n in range(requests)]
    loads = [placed.count(f"w{n}") for n in range(count)]
    assert max(loads) - min(loads) <= 1


def test_only_ready_workers_of_the_pool_that_did_not_just_fail():
    made = desk(worker("a"), worker("b", state="starting"), worker("c", pool="q"), worker("d"))
    assert made.arrive(request("1", exclude=("a",)), 0.0).worker_id == "d"
    answer = made.arrive(request("1", exclude=("a", "d")), 0.0)
    assert isinstance(answer, Unplaceable)
    assert answer.cause == "no-worker"
    assert "a, d, which just failed" in answer.reason
    assert made.arrive(request("2", pool="none"), 0.0).cause == "no-worker"


def test_a_full_fleet_holds_in_order_and_places_as_room_comes():
    made = desk(worker("a", seqs=1))
    assert isinstance(made.arrive(request("1"), 0.0), Placed)
    held = made.arrive(request("2"), 1.0)
    assert isinstance(held, Held)
    assert held.deadline_s == 60
    assert isinstance(made.arrive(request("3"), 2.0), Held)
    assert made.settle(3.0) == []
    assert [(name, beat.deadline_s) for name, beat in made.beats(11.0)] == [("2", 50), ("3", 51)]
    assert made.finished("1")
    assert isinstance(made.arrive(request("4"), 4.0), Held), "who waits already goes first"
    assert [name for name, _ in made.settle(4.0)] == ["2"]
    assert made.settle(4.0) == []
    made.finished("2")
    assert [name for name, _ in made.settle(5.0)] == ["3"]


def test_a_held_request_is_turned_away_at_its_deadline():
    made = desk(worker("a", seqs=1), hold_deadline_s=10)
    made.arrive(request("1"), 0.0)
    made.arrive(request("2"), 1.0)
    assert made.settle(10.9) == []
    ((name, answer),) = made.settle(11.0)
    assert name == "2"
    assert answer.cause == "full"
    assert answer.reason == "all workers stayed full for 10 s"
    assert made.beats(12.0) == []


def test_a_client_that_leaves_frees_its_place_in_line():
    made = desk(worker("a", seqs=1))
    made.arrive(request("1"), 0.0)
    made.arrive(request("2"), 0.0)
    assert made.finished("2")
    made.finished("1")
    assert made.settle(1.0) == []
    assert not made.finished("never seen")


def test_the_line_has_an_end():
    made = desk(worker("a", seqs=1), hold_limit=1)
    made.arrive(request("1"), 0.0)
    assert isinstance(made.arrive(request("2"), 0.0), Held)
    answer = made.arrive(request("3"), 0.0)
    assert isinstance(answer, Unplaceable)
    assert answer.reason == "1 requests wait already"


def test_tokens_fill_a_worker_but_an_idle_one_takes_anything():
    made = desk(worker("a", seqs=0, kv_capacity_tokens=1000))
    assert isinstance(made.arrive(request("huge", tokens=9000), 0.0), Placed)
    assert isinstance(made.arrive(request("small", tokens=10), 0.0), Held)
    made.finished("huge")
    assert [name for name, _ in made.settle(1.0)] == ["small"]


def test_what_gateways_place_by_themselves_counts_too():
    made = desk(worker("a"), worker("b"))
    for number in range(3):
        made.started(f"own-{number}", "a", 0.0)
    assert made.arrive(request("1"), 0.0).worker_id == "b"
    made.started("1", "b", 0.0)
    made.finished("1")
    assert made.arrive(request("2"), 0.0).worker_id == "b"


def test_forgotten_reservations_and_silent_workers_go():
    made = desk(worker("a", seqs=1))
    made.arrive(request("1"), 0.0)
    made.arrive(request("2"), 0.0)
    # The worker says that it has nothing, long after: whatever we still count was lost.
    made.worker_seen(worker("a", seqs=1), 5.0)
    assert made.settle(5.0) == []
    made.worker_seen(worker("a", seqs=1), 20.0)
    assert [name for name, _ in made.settle(20.0)] == ["2"]
    made.tick(40.0)
    assert made.arrive(request("3"), 40.0).cause == "no-worker"


def test_a_reservation_expires():
    accounts = Accounts(ttl_s=10)
    accounts.reserve("1", "a", 50, 0.0)
    assert accounts.expire(9.0) == 0
    assert accounts.expire(11.0) == 1
    assert accounts.load("a").tokens == 0


def test_a_worker_that_is_gone_takes_its_reservations_along():
    made = desk(worker("a", seqs=1))
    made.arrive(request("1"), 0.0)
    made.worker_gone("a")
    made.worker_seen(worker("a", seqs=1, running=0), 1.0)
    assert isinstance(made.arrive(request("2"), 1.0), Placed)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "release", "seen"]), st.integers(0, 5), st.sampled_from("ab")),
    max_size=60,
)


@PATIENT
@given(OPERATIONS)
def test_accounts_always_add_up(operations):
    accounts, model = Accounts(ttl_s=900), {}
    for what, number, where in operations:
        name = str(number)
        if what == "reserve":
            accounts.reserve(name, where, 10, 0.0)
            model[name] = where
        elif what == "seen":
            accounts.seen(name, where, 0.0)
            model[name] = where
        else:
            assert accounts.release(name) == (model.pop(name, None) is not None)
    for where in "ab":
        assert accounts.load(where).requests == sum(1 for at in model.values() if at == where)
        assert accounts.load(where).tokens >= 0


def test_ties_are_shared_by_request():
    equal = [Candidate(name, "", 0, 0) for name in "abcd"]
    chosen = {pick(equal, 1, f"r{number}").worker_id for number in range(64)}
    assert chosen == set("abcd")
    assert pick([], 1, "r") is None


def test_requests_that_share_a_request_id_are_counted_and_held_each_by_itself():
    """An agent gives its parallel calls one trace id; what the router keys by is the placement id."""

    def twin(placement_id: str) -> PlaceRequest:
        return request("trace").model_copy(update={"placement_id": placement_id})

    made = desk(worker("a", seqs=2))
    for number in range(2):
        assert isinstance(made.arrive(twin(f"placed-{number}"), 0.0), Placed)
    for number in range(2):
        assert isinstance(made.arrive(twin(f"held-{number}"), 0.0), Held)
    assert [key for key, _ in made.beats(1.0)] == ["held-0", "held-1"]
    assert made.finished("placed-0")
    assert [(key, answer.status) for key, answer in made.settle(1.0)] == [("held-0", "placed")]


def test_a_sender_without_placement_ids_is_counted_by_its_request_id():
    assert request("r").placement_id == "r"
    assert PlaceRequest.model_validate_json('{"pool": "p", "request_id": "r"}').placement_id == "r"


def test_a_worker_that_restarts_its_engine_is_sent_nothing_unless_nobody_is_ready():
    recovering = worker("a", state="starting", holds=True)
    made = desk(recovering, worker("b"), worker("c", state="starting"))
    assert {made.arrive(request(str(n)), 0.0).worker_id for n in range(3)} == {"b"}
    made.worker_gone("b")
    assert made.arrive(request("late"), 0.0).worker_id == "a"
    made.worker_seen(worker("b"), 1.0)
    assert made.arrive(request("later"), 1.0).worker_id == "b"
    made.worker_gone("a")
    made.worker_gone("b")
    assert made.arrive(request("none"), 1.0).cause == "no-worker"
