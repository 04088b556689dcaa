"""The loop of a pool: drift becomes a plan, the plan searches, the searches promotions."""

import datetime as dt

import pytest

from polymorph.compiler.domain.search_pool import LoopRules
from polymorph.compiler.domain.search_state import Answer
from polymorph.events.state import Mode
from polymorph.events.types import DriftDetected, SearchClosed, SearchOpened

DECODE = {"8": 1.0}


@pytest.fixture
def seen(lab):
    return lab.window(DECODE, {lab.GATE_UP: 0.4, lab.DOWN: 0.2})


def world(lab, evaluator=None, mode=Mode.CANARY, rounds=(("a", "b"),), rules=None):
    return lab.World(lab.loop(rounds, rules), evaluator or (lambda order: lab.answer(order, 1.2)), mode)


def opened(world):
    return [event.definition for event in world.told(SearchOpened)]


def test_a_drift_runs_every_search_that_pays_and_tunes_for_its_shape(lab, seen):
    w = world(lab)
    w.window(seen, lab.drift_of(seen))
    assert opened(w) == [lab.GATE_UP, lab.DOWN]
    assert [e.outcome for e in w.told(SearchClosed)] == ["promoted", "promoted"]
    assert len(w.promoted) == 2
    assert {b.definition for b in w.state.stable.kernels} == {lab.GATE_UP, lab.DOWN}
    assert w.state.plan is None
    assert w.state.tuned_for() == seen.shape


def test_the_reason_of_a_search_is_a_plain_sentence_with_its_figures(lab, seen):
    w = world(lab)
    w.window(seen, lab.drift_of(seen))
    reason = w.told(SearchOpened)[0].reason
    assert "40% of the step time" in reason
    assert reason.endswith(".")


def test_the_second_search_measures_against_what_the_first_promoted(lab, seen):
    w = world(lab)
    w.window(seen, lab.drift_of(seen))
    incumbents = {o.definition: o.incumbent.revision for o in w.orders}
    assert incumbents == {lab.GATE_UP: "empty", lab.DOWN: "r-1"}


def test_the_reversed_window_searches_the_other_way_round(lab):
    w = world(lab)
    back = lab.window(DECODE, {lab.GATE_UP: 0.2, lab.DOWN: 0.4})
    w.window(back, lab.drift_of(back))
    assert opened(w) == [lab.DOWN, lab.GATE_UP]


def test_larger_batches_search_other_m(lab):
    w = world(lab)
    batch = lab.window({"32": 1.0}, {lab.GATE_UP: 0.6})
    w.window(batch, lab.drift_of(batch))
    assert [(e.min_m, e.max_m) for e in w.told(SearchOpened)] == [(17, 32)]


def test_a_search_that_nobody_answers_makes_room_and_teaches_nothing(lab, seen):
    w = world(lab)
    silent = w.loop.window(w.state, seen, lab.drift_of(seen), w.known, w.now)
    w.state = silent[0]
    for _ in range(200):
        w.now += dt.timedelta(seconds=60)
        w.state, effects = w.loop.tick(w.state, w.known, w.now)
        w.events += [e.event for e in effects if hasattr(e, "event")]
        w.known = w.known.learn(lesson for e in effects if hasattr(e, "lessons") for lesson in e.lessons)
    assert [e.outcome for e in w.told(SearchClosed)] == ["budget-spent", "budget-spent"]
    assert (w.state.search, w.state.plan, w.known.lessons) == (None, None, ())


@pytest.mark.parametrize("where", ["steps", "operation"])
def test_a_drift_with_a_bucket_that_is_none_opens_nothing_until_the_next_drift(lab, seen, where):
    w = world(lab, mode=Mode.OBSERVE)
    strange = lab.window({"16384": 1.0} if where == "steps" else DECODE, {lab.GATE_UP: 0.4})
    if where == "operation":
        told = tuple(o.model_copy(update={"by_m": {"16384": 0.5}}) for o in strange.operations)
        strange = strange.model_copy(update={"operations": told})
    w.window(strange, lab.drift_of(strange))
    w.mode(Mode.CANARY)
    w.tick(1)
    w.window(strange)
    assert opened(w) == []
    w.window(seen, lab.drift_of(seen))
    assert opened(w) == [lab.GATE_UP, lab.DOWN]


def test_windows_without_drift_open_nothing(lab, seen):
    w = world(lab)
    w.window(seen)
    assert w.events == []


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.PINNED])
def test_modes_that_search_nothing_tell_the_drift_and_answer_it_once_they_may(lab, seen, mode):
    w = world(lab, mode=mode)
    w.window(seen, lab.drift_of(seen))
    assert (len(w.told(DriftDetected)), opened(w)) == (1, [])
    w.mode(Mode.CANARY)
    assert opened(w) == [lab.GATE_UP, lab.DOWN]


def test_recommend_searches_and_its_winners_wait_for_the_mode(lab, seen):
    w = world(lab, mode=Mode.RECOMMEND)
    w.promoter_says = Answer.HELD
    w.window(seen, lab.drift_of(seen))
    assert opened(w) == [lab.GATE_UP, lab.DOWN]
    assert (w.promoted, len(w.state.waiting), w.told(SearchClosed)) == ([], 2, [])
    w.promoter_says = Answer.LIVE
    w.mode(Mode.CANARY)
    assert len(w.promoted) == 2
    assert [e.outcome for e in w.told(SearchClosed)] == ["promoted", "promoted"]
    assert w.state.waiting == ()


def test_a_winner_approved_by_hand_closes_its_search(lab, seen):
    w = world(lab, mode=Mode.RECOMMEND)
    w.promoter_says = Answer.HELD
    w.window(seen, lab.drift_of(seen))
    held = w.state.waiting[0]
    w.ended(held.promotion_id(), Answer.LIVE)
    assert [e.search_id for e in w.told(SearchClosed)] == [held.search_id]
    assert len(w.state.waiting) == 1


def test_a_held_winner_in_canary_is_asked_for_again_only_after_a_while(lab, seen):
    w = world(lab, rules=LoopRules(hardware=lab.HARDWARE, cooldown_s=60))
    w.promoter_says = Answer.HELD
    w.window(seen, lab.drift_of(seen))
    assert len(w.state.waiting) == 2
    w.promoter_says = Answer.LIVE
    w.tick(30)
    assert w.promoted == []
    w.tick(31)
    assert len(w.promoted) == 2


def test_a_mode_that_searches_nothing_cancels_the_search(lab, seen):
    w = world(lab)
    w.loop.window(w.state, seen, lab.drift_of(seen), w.known, w.now)
    step = w.loop.window(w.state, seen, lab.drift_of(seen), w.known, w.now)
    w.state = step[0]
    w.mode(Mode.OBSERVE)
    assert [e.outcome for e in w.told(SearchClosed)] == ["cancelled"]
    assert w.state.search is None


def test_a_drift_during_a_search_is_planned_for_after_it(lab, seen):
    w = world(lab)
    later = lab.window({"32": 1.0}, {lab.HEAD: 0.7}, number=9)

    def shift():
        w.on_order = lambda: None
        w.window(later, lab.drift_of(later, seen.shape))

    w.on_order = shift
    w.window(seen, lab.drift_of(seen))
    # The search that ran was finished, the rest of its plan dropped, and the new traffic searched for.
    assert opened(w) == [lab.GATE_UP, lab.HEAD]
    assert w.state.tuned_for() == later.shape


def test_traffic_that_nothing_can_be_confirmed_for_searches_nothing(lab):
    w = world(lab)
    prefill = lab.window({"2048": 1.0}, {lab.GATE_UP: 0.6})
    w.window(prefill, lab.drift_of(prefill))
    assert opened(w) == []
    assert w.state.tuned_for() == prefill.shape


def test_a_plan_without_a_paying_target_counts_as_tuned(lab):
    w = world(lab)
    idle = lab.window(DECODE, {lab.GATE_UP: 0.001})
    w.window(idle, lab.drift_of(idle))
    assert opened(w) == []
    assert w.state.tuned_for() == idle.shape


def test_a_drift_before_engines_tell_their_operations_waits_for_them(lab, seen):
    w = world(lab)
    blind = seen.model_copy(update={"operations": ()})
    w.window(blind, lab.drift_of(blind))
    assert opened(w) == []
    w.window(seen)
    assert opened(w) == [lab.GATE_UP, lab.DOWN]
    assert len(w.told(DriftDetected)) == 1


def test_between_two_plans_the_loop_rests(lab, seen):
    w = world(lab, rules=LoopRules(hardware=lab.HARDWARE, cooldown_s=60))
    w.window(seen, lab.drift_of(seen))
    later = lab.window({"32": 1.0}, {lab.HEAD: 0.7}, number=9)
    w.tick(10)
    w.window(later, lab.drift_of(later, seen.shape))
    assert lab.HEAD not in opened(w)
    w.tick(51)
    assert lab.HEAD in opened(w)


def test_the_next_search_starts_from_known_good_parameters(lab, seen):
    w = world(lab)
    w.window(seen, lab.drift_of(seen))
    assert w.known.seeds(lab.HEAD, 1, 8, limit=2)
    again = lab.window(DECODE, {lab.HEAD: 0.9}, number=9)
    step, _ = w.loop.window(
        w.state.model_copy(update={"rests_until": None}), again, lab.drift_of(again), w.known, w.now
    )
    assert step.search.seeds


def test_a_winner_that_is_taken_back_is_neither_a_seed_nor_tried_again(lab, seen):
    w = world(lab)
    w.window(seen, lab.drift_of(seen))
    won = w.told(SearchClosed)[0].winner
    promotion = next(p for p, lesson in w.state.winners.items() if lesson.definition == lab.GATE_UP)
    params = w.state.winners[promotion].params
    assert won
    assert params in w.known.seeds(lab.GATE_UP, 5, 8, limit=9)
    w.ended(promotion, Answer.REFUSED, w.orders[0].incumbent)
    assert params in w.known.avoid(lab.GATE_UP, 5, 8)
    assert w.state.stable.revision == "empty"


def test_an_older_desired_state_changes_nothing(lab, seen):
    w = world(lab)
    w.window(seen, lab.drift_of(seen))
    old = lab.DesiredState(pool="chat-1", generation=w.state.generation - 1, mode=Mode.OBSERVE)
    assert w.loop.desired(w.state, old, w.known, w.now) == (w.state, [])
