"""The gateway's pure parts: scanning, placing, the fleet, refusals, event text."""

import datetime as dt
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polymorph.bus.port import Gap, StreamRecord
from polymorph.events.envelope import wrap
from polymorph.events.requests import Placed, Unplaceable
from polymorph.events.state import WorkerRecord
from polymorph.events.types import WorkerRefused
from polymorph.gateway.domain.circuit import Circuit
from polymorph.gateway.domain.event_text import gap_event, is_filter, is_position, record_event
from polymorph.gateway.domain.fleet import Fleet, FleetRules
from polymorph.gateway.domain.placing import check_model, choose
from polymorph.gateway.domain.refusal import Refusal, cut_off
from polymorph.gateway.domain.rendezvous import rendezvous
from polymorph.gateway.domain.request_id import request_id
from polymorph.gateway.domain.scan import scan

# A busy machine is no failure.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def worker(name: str, *, model: str = "m", state: str = "ready", holds: bool = False) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        pool="p",
        model=model,
        url=f"http://{name}",
        state=state,
        generation=1,
        revision="empty",
        hardware="h",
        started_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        holds=holds,
    )


def encoded(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


# --- scan ----------------------------------------------------------------------------------------------------------


def test_sizes_of_prompts_of_every_form():
    assert scan(encoded(prompt="x" * 40)).prompt_tokens_estimate == 10
    assert scan(encoded(prompt=["ab", "cd"])).prompt_chars == 4
    assert scan(encoded(prompt=[1, 2, 3])).prompt_tokens_estimate == 3
    assert scan(encoded(prompt=[[1, 2], [3]])).prompt_tokens_estimate == 3
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    messages = [{"role": "user", "content": parts}, {"role": "tool", "content": None}, {"content": "efgh"}]
    assert scan(encoded(messages=messages)).prompt_chars == 8
    assert scan(encoded(prompt=None)).prompt_chars == 0


def test_max_tokens_and_stream():
    assert scan(encoded(max_tokens=5, max_completion_tokens=7)).max_tokens == 7
    assert scan(encoded(max_tokens=True)).max_tokens is None
    assert scan(encoded(max_tokens="5")).max_tokens is None
    assert scan(encoded(stream=True)).stream
    assert not scan(encoded(stream="yes")).stream


def test_the_program_is_named_by_the_first_of_its_ids_and_leaves_as_a_digest():
    every = encoded(program_id="a", prompt_cache_key="c", user="d")
    assert scan(every, "b").program_id == scan(encoded(program_id="a")).program_id
    assert scan(encoded(user="d"), "b").program_id == scan(encoded(program_id="b")).program_id
    assert scan(encoded(user="ann@example.org")).program_id.startswith("prog-")
    assert "ann" not in scan(encoded(user="ann@example.org")).program_id
    assert scan(encoded(user="")).program_id is None


@PATIENT
@given(st.binary(max_size=200))
def test_any_bytes_are_scanned_or_refused_with_400(body):
    status = 200
    try:
        scan(body)
    except Refusal as refusal:
        status = refusal.status
    assert status in (200, 400)


@PATIENT
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=20))
def test_any_prompt_and_messages_are_scanned(value):
    body = json.dumps({"model": "m", "prompt": value, "messages": value, "user": value, "max_tokens": value})
    assert scan(body.encode()).model == "m"


# --- the fleet -----------------------------------------------------------------------------------------------------


def test_a_silent_worker_counts_until_a_probe_fails():
    fleet = Fleet(FleetRules(suspect_after_s=10))
    fleet.put(worker("a"), 0.0)
    assert fleet.to_probe(9.0) == []
    assert [w.worker_id for w in fleet.to_probe(11.0)] == ["a"]
    assert fleet.ready()
    fleet.confirm("a", 11.0)
    assert [w.worker_id for w in fleet.to_probe(12.0)] == ["a"], "nobody vouches for it: look again"
    fleet.refute("a", 12.0, refused=True)
    assert not fleet.ready()
    fleet.put(worker("a"), 13.0)
    assert fleet.ready()
    assert fleet.to_probe(14.0) == []


def test_a_slow_probe_is_believed_only_the_third_time():
    fleet = Fleet()
    fleet.put(worker("a"), 0.0)
    fleet.depart("a", 1.0)
    for second in (1.0, 2.0):
        fleet.refute("a", second, refused=False)
        assert fleet.ready()
    fleet.refute("a", 3.0, refused=False)
    assert not fleet.ready()


def test_the_trusted_come_first_and_nobody_is_ejected_to_the_last():
    fleet = Fleet()
    for name in "ab":
        fleet.put(worker(name), 0.0)
    fleet.doubt("a", 1.0)
    assert [w.worker_id for w in fleet.live("m")] == ["b"]
    assert [w.worker_id for w in fleet.live("m", exclude=["b"])] == ["a"]
    for name in "ab":
        fleet.refute(name, 2.0, refused=True)
    assert {w.worker_id for w in fleet.live("m")} == {"a", "b"}
    assert not fleet.ready()


def test_a_dead_worker_is_forgotten_in_time_and_not_kept_on_disk():
    fleet = Fleet(FleetRules(forget_after_s=100))
    fleet.put(worker("a"), 0.0)
    fleet.refute("a", 50.0, refused=True)
    assert fleet.records() == []
    assert fleet.knows("m")
    fleet.refute("a", 101.0, refused=True)
    assert not fleet.knows("m")


def test_a_remembered_worker_that_was_starting_is_ready_once_it_answers():
    fleet = Fleet()
    fleet.remember(worker("a", state="starting"), 0.0)
    assert not fleet.ready()
    fleet.confirm("a", 1.0)
    assert fleet.ready()


def test_a_draining_worker_gets_nothing_new():
    fleet = Fleet()
    fleet.put(worker("a", state="draining"), 0.0)
    assert fleet.live("m") == []
    assert fleet.put(worker("a"), 1.0), "worth keeping: it is ready now"
    assert not fleet.put(worker("a"), 2.0)


# --- placing -------------------------------------------------------------------------------------------------------


def test_the_router_is_obeyed_except_where_it_knows_less():
    fleet = Fleet()
    fleet.put(worker("a"), 0.0)
    asked = scan(encoded())
    assert choose(fleet, asked, "r", (), Placed(worker_id="z", url="http://z")).by == "router"
    ignorant = Unplaceable(reason="none", retry_after_s=1, cause="no-worker")
    assert choose(fleet, asked, "r", (), ignorant).worker_id == "a"
    assert choose(fleet, asked, "r", (), None).by == "gateway"
    with pytest.raises(Refusal, match="m is busy: all full"):
        choose(fleet, asked, "r", (), Unplaceable(reason="all full", retry_after_s=7))
    with pytest.raises(Refusal, match="tried a") as refused:
        choose(fleet, asked, "r", ("a",), None)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1.0)


def test_an_unknown_model_is_404_but_503_before_any_is_known():
    fleet = Fleet()
    with pytest.raises(Refusal) as refused:
        check_model(fleet, "x")
    assert refused.value.status == 503
    fleet.put(worker("a", model="one"), 0.0)
    with pytest.raises(Refusal, match="these do: one") as refused:
        check_model(fleet, "x")
    assert refused.value.status == 404
    check_model(fleet, "one")


def test_the_503_says_that_no_worker_has_registered_and_one_that_starts_ends_it():
    fleet = Fleet()
    with pytest.raises(Refusal, match="No worker has registered yet") as refused:
        check_model(fleet, "x")
    assert refused.value.retry_after_s == 1.0
    fleet.put(worker("a", model="one", state="starting"), 0.0)
    assert not fleet.ready()
    with pytest.raises(Refusal, match="these do: one") as refused:
        check_model(fleet, "x")
    assert refused.value.status == 404


@PATIENT
@given(st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=8, unique=True), st.text())
def test_rendezvous_moves_only_the_keys_of_the_worker_that_left(names, key):
    workers = [worker(name) for name in names]
    chosen = rendezvous(key, workers)
    assert rendezvous(key, reversed(workers)) == chosen
    for gone in workers:
        rest = [w for w in workers if w is not gone]
        if gone is not chosen:
            assert rendezvous(key, rest) == chosen


def test_rendezvous_spreads_and_has_no_answer_for_nobody():
    workers = [worker(name) for name in "abcd"]
    chosen = [rendezvous(f"key-{number}", workers).worker_id for number in range(400)]
    assert all(60 <= chosen.count(name) <= 140 for name in "abcd")
    assert rendezvous("key", []) is None


def test_only_the_first_to_trip_a_circuit_starts_the_probing():
    circuit = Circuit()
    assert circuit.trip()
    assert not circuit.trip()
    circuit.close()
    assert circuit.trip()


# --- texts ---------------------------------------------------------------------------------------------------------


@PATIENT
@given(st.text())
def test_an_id_that_cannot_stand_in_a_header_is_replaced(offered):
    used = request_id(offered, "made")
    assert used in ("made", offered)
    assert used.isascii()
    assert used.isprintable()
    assert 0 < len(used) <= 128


def test_an_error_event_is_one_line():
    body = cut_off("two\nlines").body()
    assert b"\n" not in body
    assert json.loads(body)["error"]["message"] == "two\nlines"


def test_filters_and_positions():
    for good in (
        "polymorph.evt.>",
        "polymorph.evt.search.>",
        "polymorph.evt.*.opened.v1.pool-1",
        "polymorph.evt",
    ):
        assert is_filter(good)
    for bad in (">", "polymorph.>", "polymorph.cmd.>", "polymorph.evt.>.x", "polymorph.evt. x", "$JS.API.>"):
        assert not is_filter(bad)
    assert is_position("0-0")
    assert is_position(f"1760000000000-{2**63 - 1}")
    for bad in ("42", "1-2\n", "17ab-42", "\u0663-\u0665", f"0-{2**63}", f"{2**63}-0", "0-" + "9" * 5000):
        assert not is_position(bad)


def test_events_as_text():
    fact = WorkerRefused(pool="p", worker_id="w", generation=1, revision="r", reason="line\nbreak")
    envelope = wrap(fact, source="/test", time=dt.datetime(2026, 1, 1, tzinfo=dt.UTC))
    text = record_event(StreamRecord("e-7", fact.subject(), envelope)).decode()
    identity, data, end, nothing = text.split("\n")
    assert identity == "id: e-7"
    assert json.loads(data.removeprefix("data: "))["data"]["reason"] == "line\nbreak"
    assert (end, nothing) == ("", "")
    assert gap_event(Gap("e-1", "e-5")) == b'event: gap\ndata: {"after": "e-1", "resumes_at": "e-5"}\n\n'


def test_a_worker_that_restarts_its_engine_gets_requests_where_nobody_is_ready() -> None:
    fleet = Fleet()
    fleet.put(worker("a", state="starting", holds=True), 0.0)
    fleet.put(worker("c", state="starting"), 0.0)
    assert [each.worker_id for each in fleet.live("m")] == ["a"]
    assert fleet.ready()
    assert [each.worker_id for each in fleet.models()] == ["a"]
    fleet.put(worker("b"), 0.0)
    assert [each.worker_id for each in fleet.live("m")] == ["b"]
    assert [each.worker_id for each in fleet.live("m", exclude=("b",))] == ["a"]
    assert fleet.refute("b", 1.0, refused=True)
    assert [each.worker_id for each in fleet.live("m")] == ["a"]  # rather than the dead
