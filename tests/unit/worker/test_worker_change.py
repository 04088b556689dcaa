"""Which way a change goes, what it says beforehand, and that its inverse takes it back."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Refused
from polymorph.events.values import EngineSettings, Revision, Way
from polymorph.worker.domain.change import GIB, SUPPORTED, Plan, Room, Running, goal_settings, plan
from polymorph.worker.launching import launch_with, settings_of

BASE = EngineLaunch(Path("m"), max_num_seqs=8, envelope_num_seqs=64, envelope_batched_tokens=1024)
SETTINGS = settings_of(BASE)
ENVELOPE = {"max_num_seqs": 64, "max_num_batched_tokens": 1024}
LIVE = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "scheduling_policy",
    }
)
RUNNING = Running(SETTINGS, ("linear",), LIVE, ENVELOPE)
WIDE, TIGHT = Room(2 * GIB, 9 * GIB), Room(2 * GIB, GIB)


def planned(
    room: Room = WIDE, running: Running = RUNNING, slots: tuple[str, ...] = ("linear",), **named: Any
) -> Plan:
    goal = goal_settings(SETTINGS, Revision(revision="r", engine=EngineSettings(**named)))
    return plan(running, goal, slots, room=room, generation=7)


@pytest.mark.parametrize(
    ("named", "way"),
    [
        ({}, Way.NOTHING),
        ({"max_num_seqs": 8}, Way.NOTHING),
        ({"max_num_seqs": 4}, Way.LIVE),
        ({"max_num_seqs": 64}, Way.LIVE),
        ({"max_num_seqs": 65}, Way.ENGINE),
        ({"max_num_batched_tokens": 1024, "scheduling_policy": "priority"}, Way.LIVE),
        ({"max_num_batched_tokens": 1025}, Way.ENGINE),
        ({"long_prefill_token_threshold": 99999}, Way.LIVE),
        ({"long_prefill_token_threshold_adaptive": True}, Way.LIVE),
        ({"max_num_seqs": 4, "block_size": 32}, Way.ENGINE),
        ({"enable_prefix_caching": False}, Way.ENGINE),
        ({"enforce_eager": True}, Way.ENGINE),
        ({"kv_gib": 2}, Way.ENGINE),
        ({"threads": 1}, Way.ENGINE),
        ({"tensor_parallel_size": 2}, Way.ENGINE),
        ({"speculative_method": "ngram", "num_speculative_tokens": 3}, Way.ENGINE),
    ],
)
def test_the_way_is_the_cheapest_that_does_all(named: dict[str, Any], way: Way) -> None:
    assert planned(**named).way is way
    tight = planned(TIGHT, **named)
    assert tight.way is (Way.ROLLING if way is Way.ENGINE else way)
    assert tight.pause is (way is Way.ENGINE)


def test_a_plan_says_what_and_why() -> None:
    told = planned(max_num_seqs=100, block_size=32)
    assert told.why == (
        "max_num_seqs 8 -> 100 is above the envelope of 64; block_size null -> 32: a new engine; a second engine "
        "needs 2.0 GiB, 9.0 GiB are available: it is warmed beside this one"
    )
    assert [change.told().live for change in told.changes] == [False, False]
    assert told.cache_reset
    assert told.recapture
    assert told.generation == 7
    rolling = planned(TIGHT, slots=())
    assert "slots linear -> none" in rolling.why
    assert rolling.why.endswith("1.0 GiB are available: this one is drained and restarted")
    assert rolling.inverse_slots == ("linear",)
    unknown = planned(Room(0, 0, known=False), block_size=32)
    assert unknown.way is Way.ROLLING
    assert "cannot be told" in unknown.why


def test_eager_engines_without_cache_lose_nothing() -> None:
    running = Running({**SETTINGS, "enable_prefix_caching": False}, ("linear",), LIVE, ENVELOPE)
    told = planned(running=running, enforce_eager=True, enable_prefix_caching=False)
    assert (told.way, told.recapture, told.cache_reset) == (Way.ENGINE, False, False)


def test_weights_of_a_draft_model_are_live_where_there_is_one() -> None:
    drafting = {
        "speculative_method": "draft_model",
        "num_speculative_tokens": 2,
        "speculative_model": "a",
    }
    running = Running({**SETTINGS, **drafting}, ("linear",), LIVE | {"speculative_model"}, ENVELOPE)
    told = planned(running=running, **{**drafting, "speculative_model": "b"})
    assert (told.way, told.live, told.inverse.speculative_model) == (
        Way.LIVE,
        {"speculative_model": "b"},
        "a",
    )
    assert planned(running=running, **{**drafting, "num_speculative_tokens": 3}).way is Way.ENGINE
    assert planned(running=running).way is Way.ENGINE
    assert planned(**drafting).way is Way.ENGINE


def test_a_setting_that_this_vllm_does_not_let_be_set_needs_an_engine() -> None:
    running = Running(SETTINGS, ("linear",), LIVE - {"max_num_seqs"}, ENVELOPE)
    assert planned(running=running, max_num_seqs=4).way is Way.ENGINE
    assert planned(running=running, scheduling_policy="priority").way is Way.LIVE
    assert planned(running=Running(SETTINGS, ("linear",)), scheduling_policy="priority").way is Way.ENGINE


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (
            {"max_seqs": 3, "blocks": 1},
            "blocks, max_seqs: no setting of a worker; supported are max_num_seqs,",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs=0: use 1 or more"),
        ({"max_num_seqs": 600}, "a token for each of the 600"),
        ({"scheduling_policy": "lifo"}, "use fcfs, priority"),
        ({"speculative_method": "ngram"}, "name num_speculative_tokens"),
        ({"speculative_method": "draft_model", "num_speculative_tokens": 2}, "name speculative_model"),
        ({"kv_gib": 0}, "kv_gib=0: use 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(named: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        planned(**named)


def test_no_engine_settings_are_the_workers_own() -> None:
    assert goal_settings(SETTINGS, Revision(revision="empty")) == SETTINGS
    assert set(SETTINGS) == set(SUPPORTED)


LIVE_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 80),
        "max_num_batched_tokens": st.integers(80, 2000),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.integers(0, 9),
        "block_size": st.sampled_from([16, 32]),
        "enable_prefix_caching": st.booleans(),
    },
)


@settings(max_examples=60)
@given(LIVE_VALUES, LIVE_VALUES, st.booleans())
def test_the_inverse_takes_a_change_back(first: dict[str, Any], second: dict[str, Any], roomy: bool) -> None:
    room = WIDE if roomy else TIGHT
    before = goal_settings(SETTINGS, Revision(revision="a", engine=EngineSettings(**first)))
    running = Running(before, ("linear",), LIVE, ENVELOPE)
    there = planned(room, running, **second)
    after = Running(there.settings, there.slots, LIVE, ENVELOPE)
    named = {**there.settings, **{change.name: change.now for change in there.changes}}
    back = plan(after, named, ("linear",), room=room, generation=8)
    assert dict(back.settings) == before
    told = there.inverse.model_dump(exclude_none=True)
    assert {name: before[name] for name in told} == told
    assert (back.way is Way.NOTHING) == (there.way is Way.NOTHING)


def test_launches_follow_settings_and_keep_their_envelope() -> None:
    launch = launch_with(BASE, planned(max_num_seqs=4, block_size=32).settings, ())
    arguments = launch.plain_arguments()
    assert (arguments["max_num_seqs"], arguments["max_num_active_seqs"]) == (64, 4)
    assert (arguments["max_num_batched_tokens"], arguments["max_num_scheduled_tokens"]) == (1024, 512)
    assert arguments["block_size"] == 32
    wider = launch_with(BASE, planned(max_num_seqs=100).settings, ("linear",)).plain_arguments()
    assert wider["max_num_seqs"] == 100
    assert "max_num_active_seqs" not in wider
    assert settings_of(launch) == {**SETTINGS, "max_num_seqs": 4, "block_size": 32}
