"""Properties of the state machine over any sequence of commands."""

import dataclasses
import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymorph.compiler.domain.promotion.advance import advance
from polymorph.compiler.domain.promotion.begin import begin
from polymorph.compiler.domain.promotion.guards import Guards, Hindrance
from polymorph.compiler.domain.promotion.judgement import Outcome, Reading, judge
from polymorph.compiler.domain.promotion.moves import Move, Proposal, Stay
from polymorph.compiler.domain.promotion.phases import Phase, may_follow
from polymorph.compiler.domain.promotion.policy import DIRECT, STAGED, Policy
from polymorph.compiler.domain.promotion.retreat import change_mode, purge, roll_back
from polymorph.compiler.domain.promotion.revisions import artifacts, compose, without
from polymorph.events.state import EMPTY, DesiredState, Freeze, Mode, Quarantine, Stage
from polymorph.events.types import PromotionAdvanced, PromotionCompleted, PromotionRolledBack
from polymorph.events.values import EngineSettings, Gate, KernelBinding, Numerics, Ratio, Revision

GOOD = Ratio(point=1.2, low=1.1, high=1.3)
ARTIFACTS = st.sampled_from(["a", "b", "c"])

bindings = st.builds(
    lambda artifact, definition, low, width: KernelBinding(
        definition=definition,
        min_m=low,
        max_m=low + width,
        manifest=f"manifest-{artifact}",
        artifact=artifact,
        numerics=Numerics.REORDERED,
    ),
    ARTIFACTS,
    st.sampled_from(["linear-qkv", "linear-o"]),
    st.integers(1, 16),
    st.integers(0, 16),
)
ratios = st.builds(
    lambda low, width: Ratio(point=low + width / 2, low=low, high=low + width),
    st.floats(0.5, 1.5),
    st.floats(0, 0.5),
)
readings = st.builds(
    Reading,
    speedup=st.none() | ratios,
    samples=st.integers(0, 200),
    stage_age_s=st.floats(0, 2000),
    errors=st.integers(0, 1),
)
guards = st.builds(
    Guards,
    freeze=st.none() | st.just("release night"),
    pause=st.none() | st.just("looking"),
    quarantined=st.frozensets(ARTIFACTS, max_size=1),
)
commands = st.one_of(
    st.tuples(st.just("begin"), bindings, ratios, st.sampled_from([Gate.G5_END_TO_END, Gate.G3_MICRO])),
    st.tuples(st.just("advance"), readings),
    st.tuples(st.just("roll-back")),
    st.tuples(st.just("purge")),
    st.tuples(st.just("mode"), st.sampled_from(list(Mode))),
)


def carry_out(state, command, held, policy, generation):
    match command:
        case ("begin", binding, speedup, gate):
            proposal = Proposal(
                promotion_id=f"p{generation}",
                pool="pool",
                bindings=(binding,),
                reason="faster",
                gate=gate,
                speedup=speedup,
            )
            return begin(state, proposal, policy, held, generation)
        case ("advance", reading):
            return advance(state, reading, policy, held, generation)
        case ("roll-back",):
            return roll_back(state, "worse", held, generation, back_to=EMPTY)
        case ("purge",):
            return purge(state, held, generation)
        case ("mode", mode):
            return change_mode(state, mode, held, generation)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(commands, guards, st.integers(1, 3)), max_size=25),
    st.sampled_from([DIRECT, STAGED]),
)
def test_any_sequence_keeps_the_properties(history, policy):
    state = DesiredState(pool="pool", generation=0, mode=Mode.CANARY)
    phases: dict[str, Phase] = {}
    for command, held, gap in history:
        generation = state.generation + gap
        result = carry_out(state, command, held, policy, generation)
        if isinstance(result, Stay):
            continue
        after = result.desired
        assert after.generation == generation > state.generation
        assert after.signature is None
        assert not (artifacts(after.stable) | artifacts(after.candidate)) & held.quarantined
        if command[0] != "mode":
            assert state.mode in {Mode.CANARY, Mode.RECOMMEND}
            assert held.freeze is None
            assert held.pause is None
        assert_reports_agree(state, after, result.events)
        for promotion_id, phase in result.phases.items():
            assert may_follow(phases.get(promotion_id, Phase.INTENT), phase)
            phases[promotion_id] = phase
        assert (after.candidate is None) is (after.stage is Stage.NONE)
        assert (after.stage is Stage.CANARY) is (after.share > 0)
        state = after


def assert_reports_agree(before, after, events):
    """Reported if and only if changed."""
    changed = dataclasses.astuple(Seen.of(before)) != dataclasses.astuple(Seen.of(after))
    assert bool(events) is changed
    completed = [event for event in events if isinstance(event, PromotionCompleted)]
    advanced = [event for event in events if isinstance(event, PromotionAdvanced)]
    back = [event for event in events if isinstance(event, PromotionRolledBack)]
    assert all(event.generation == after.generation for event in events)
    assert bool(completed) is (
        after.stable.revision != before.stable.revision and bool(advanced) and after.candidate is None
    )
    for event in completed:
        assert event.revision == after.stable
    for event in advanced:
        assert event.revision == (after.candidate or after.stable)
    for event in back:
        assert event.back_to == after.stable
        assert event.revision in (before.candidate, before.stable)


@dataclasses.dataclass
class Seen:
    stable: str
    candidate: str | None
    stage: Stage
    share: float

    @classmethod
    def of(cls, state):
        candidate = state.candidate.revision if state.candidate else None
        return cls(state.stable.revision, candidate, state.stage, state.share)


@given(st.sampled_from([Mode.OBSERVE, Mode.PINNED, Mode.CANARY]), commands, guards)
def test_observe_pinned_and_freeze_change_nothing(mode, command, held):
    base = compose(EMPTY, (KernelBinding.model_validate(BINDING),))
    state = DesiredState(pool="pool", generation=3, mode=mode, stable=base, promotion_id="p")
    if command[0] == "mode":
        return
    if mode is Mode.CANARY:
        held = dataclasses.replace(held, freeze="release night")
    result = carry_out(state, command, held, DIRECT, 4)
    assert isinstance(result, Stay)


BINDING = {
    "definition": "linear-qkv",
    "min_m": 1,
    "max_m": 8,
    "manifest": "m",
    "artifact": "a",
    "numerics": "reordered",
}


def proposal(**more):
    given_ = {
        "promotion_id": "p1",
        "pool": "pool",
        "bindings": (KernelBinding.model_validate(BINDING),),
        "reason": "faster",
        "gate": Gate.G5_END_TO_END,
        "speedup": GOOD,
    }
    return Proposal(**{**given_, **more})


def canary_pool(**more):
    return DesiredState(pool="pool", generation=1, mode=Mode.CANARY, **more)


def test_the_staged_path_visits_every_share_and_ends_confirmed():
    state, shares, generation = canary_pool(), [], 2
    move = begin(state, proposal(), STAGED, Guards(), generation)
    while isinstance(move, Move) and move.desired.candidate is not None:
        state = move.desired
        shares.append((state.stage, state.share))
        generation += 1
        reading = Reading(GOOD, samples=50, stage_age_s=1)
        move = advance(state, reading, STAGED, Guards(), generation)
    assert shares == [
        (Stage.SHADOW, 0.0),
        (Stage.CANARY, 0.01),
        (Stage.CANARY, 0.05),
        (Stage.CANARY, 0.25),
        (Stage.CANARY, 1.0),
    ]
    assert move.phases == {"p1": Phase.CONFIRMED}
    assert move.desired.stable.kernels[0].artifact == "a"


@pytest.mark.parametrize(("low", "moves"), [(1.02, True), (1.0199, False), (1.03, True)])
def test_the_threshold_itself_is_enough(low, moves):
    policy = Policy("strict", minimum_low=1.02)
    evidence = Ratio(point=1.2, low=low, high=1.3)
    result = begin(canary_pool(), proposal(speedup=evidence), policy, Guards(), 2)
    assert isinstance(result, Move) is moves
    reading = Reading(Ratio(point=1.2, low=low, high=1.3), samples=50, stage_age_s=1)
    assert (judge(reading, policy)[0] is Outcome.ADVANCE) is moves


def test_a_share_above_the_plan_goes_on_instead_of_being_stuck():
    """Equality with a planned share must not be what lets a canary finish."""
    candidate = compose(EMPTY, (KernelBinding.model_validate(BINDING),))
    state = canary_pool(candidate=candidate, stage=Stage.CANARY, share=0.3, promotion_id="p1")
    move = advance(
        state, Reading(GOOD, samples=50, stage_age_s=1), Policy("p", shares=(0.05, 0.25)), Guards(), 2
    )
    assert isinstance(move, Move)
    assert move.desired.stable == candidate


@pytest.mark.parametrize(
    ("reading", "outcome"),
    [
        (Reading(None, 0, 10), Outcome.HOLD),
        (Reading(None, 0, 900), Outcome.ROLL_BACK),
        (Reading(GOOD, 49, 10), Outcome.HOLD),
        (Reading(GOOD, 50, 10), Outcome.ADVANCE),
        (Reading(Ratio(point=1, low=0.9, high=1.1), 100, 10), Outcome.HOLD),
        (Reading(Ratio(point=1, low=0.9, high=1.1), 100, 900), Outcome.ROLL_BACK),
        (Reading(Ratio(point=0.8, low=0.7, high=0.9), 100, 10), Outcome.ROLL_BACK),
        (Reading(GOOD, 100, 10, errors=1), Outcome.ROLL_BACK),
    ],
)
def test_no_data_is_not_success(reading, outcome):
    assert judge(reading, STAGED)[0] is outcome


def test_recommend_holds_until_a_person_approves():
    state = DesiredState(pool="pool", generation=1, mode=Mode.RECOMMEND)
    held = begin(state, proposal(), DIRECT, Guards(), 2)
    assert isinstance(held, Stay)
    assert (held.hindrance, held.phase) == (Hindrance.APPROVAL, Phase.HELD)
    assert isinstance(begin(state, proposal(approved=True), DIRECT, Guards(), 2), Move)


def test_a_lossy_winner_waits_for_approval_unless_the_pool_allows_it():
    lossy = (KernelBinding.model_validate({**BINDING, "numerics": "lossy"}),)
    held = begin(canary_pool(), proposal(bindings=lossy), DIRECT, Guards(), 2)
    assert isinstance(held, Stay)
    assert held.hindrance is Hindrance.APPROVAL
    allowing = Policy("allowing", allow_lossy=True)
    assert isinstance(begin(canary_pool(), proposal(bindings=lossy), allowing, Guards(), 2), Move)


def test_a_complete_revision_is_only_taken_over_its_parent():
    first = compose(EMPTY, (KernelBinding.model_validate(BINDING),))
    other = compose(EMPTY, (KernelBinding.model_validate({**BINDING, "artifact": "b"}),))
    late = begin(canary_pool(stable=first), proposal(revision=other, bindings=()), DIRECT, Guards(), 2)
    assert isinstance(late, Stay)
    assert late.phase is Phase.SUPERSEDED


def test_a_new_winner_supersedes_a_running_canary_and_says_so():
    first = begin(canary_pool(), proposal(), STAGED, Guards(), 2).desired
    other = (KernelBinding.model_validate({**BINDING, "artifact": "b"}),)
    move = begin(first, proposal(promotion_id="p2", bindings=other), STAGED, Guards(), 3)
    assert move.phases == {"p1": Phase.SUPERSEDED, "p2": Phase.SHADOW}
    assert [type(event) for event in move.events] == [PromotionRolledBack, PromotionAdvanced]
    assert move.events[0].promotion_id == "p1"


def test_freeze_windows_begin_and_end():
    now = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    hour = dt.timedelta(hours=1)
    freezes = {
        "pool": Freeze(reason="over", since=now - hour, until=now),
        "all": Freeze(reason="now", since=now, until=now + hour),
    }
    bans = [
        Quarantine(artifact="a", reason="x", since=now - hour),
        Quarantine(artifact="b", reason="x", since=now - hour, until=now),
    ]
    held = Guards.of("pool", now, freezes=freezes, pauses={}, quarantines=bans)
    assert held == Guards(freeze="now", pause=None, quarantined=frozenset({"a"}))
    later = Guards.of("pool", now + hour, freezes=freezes, pauses={}, quarantines=[])
    assert later.freeze is None


def test_an_operator_may_roll_back_a_frozen_pool_and_the_loop_may_not():
    candidate = compose(EMPTY, (KernelBinding.model_validate(BINDING),))
    state = canary_pool(candidate=candidate, stage=Stage.CANARY, share=0.05, promotion_id="p1")
    frozen = Guards(freeze="release night")
    assert isinstance(roll_back(state, "worse", frozen, 2), Stay)
    assert isinstance(roll_back(state, "worse", frozen, 2, operator=True), Move)


def test_an_old_generation_is_refused():
    with pytest.raises(ValueError, match="generation 1 must be above 1"):
        begin(canary_pool(), proposal(), DIRECT, Guards(), 1)


@given(st.lists(bindings, max_size=5))
def test_a_composed_revision_binds_each_m_once_and_the_newest_wins(winners):
    stable, expected = EMPTY, {}
    for winner in winners:
        stable = compose(stable, (winner,))
        for m in range(winner.min_m, winner.max_m + 1):
            expected[winner.definition, m] = winner.artifact
    bound: dict[tuple[str, int], str] = {}
    for kernel in stable.kernels:
        for m in range(kernel.min_m, kernel.max_m + 1):
            assert (kernel.definition, m) not in bound
            bound[kernel.definition, m] = kernel.artifact
    assert bound == expected


def test_settings_and_slots_outlive_a_promotion_of_kernels():
    bound = (KernelBinding.model_validate(BINDING),)
    tuned = Revision(revision="s", engine=EngineSettings(block_size=32), slots=("linear",))
    promoted = compose(tuned, bound)
    assert (promoted.engine, promoted.slots) == (tuned.engine, tuned.slots)
    assert promoted.revision != compose(EMPTY, bound).revision
    bare = without(promoted, artifacts(promoted))
    assert (bare.kernels, bare.engine) == ((), tuned.engine)
    assert without(compose(EMPTY, bound), artifacts(promoted)) == EMPTY


def test_a_revision_is_named_after_its_content():
    one = compose(EMPTY, (KernelBinding.model_validate(BINDING),))
    again = compose(one, (KernelBinding.model_validate(BINDING),))
    other = compose(EMPTY, (KernelBinding.model_validate({**BINDING, "max_m": 9}),))
    assert one.revision == again.revision != other.revision
    with pytest.raises(ValueError, match="overlap"):
        compose(EMPTY, (KernelBinding.model_validate(BINDING), other.kernels[0]))


def test_what_is_being_tried_is_not_taken_back_for_itself():
    first = begin(canary_pool(), proposal(), STAGED, Guards(), 2).desired
    again = begin(first, proposal(promotion_id="p2"), STAGED, Guards(), 3)
    assert isinstance(again, Stay)
    assert "tries" in again.reason
