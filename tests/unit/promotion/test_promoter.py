"""The promoter's calls, one by one."""

import pytest

from polymorph.bus.errors import Conflict
from polymorph.compiler.adapters.floor import BusFloor
from polymorph.compiler.adapters.promotion_change import UnknownPool
from polymorph.compiler.adapters.reconciler import Reconciler
from polymorph.compiler.domain.promotion.guards import Hindrance
from polymorph.compiler.domain.promotion.judgement import Reading
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.events.state import Mode, Stage
from polymorph.events.types import PromotionAdvanced, PromotionCompleted, PromotionRolledBack
from polymorph.events.values import Gate, Ratio
from polymorph.ledger.tables import StepStatus
from polymorph.simulator.loop import run_simulated

POOL = "pool-1"
CANARY = Policy("short", shares=(0.5,))
GOOD = Reading(Ratio(point=1.2, low=1.1, high=1.3), samples=100, stage_age_s=60)
BAD = Reading(Ratio(point=0.8, low=0.7, high=0.9), samples=100, stage_age_s=60)


@pytest.fixture
def simulated(rig):
    """Runs a story in a fresh pool and checks the invariants after it."""

    def run(story, mode=Mode.CANARY, **options):
        async def main():
            async with rig(**options) as world:
                await world.promoter.ensure_pool(POOL, mode)
                await story(world)
                assert await world.quiesce() == []

        run_simulated(main())

    return run


@pytest.fixture
def promote(binding, faster):
    async def call(world, artifact, **more):
        options = {
            "bindings": (binding(artifact),),
            "reason": "faster",
            "speedup": faster,
            "promotion_id": artifact,
        }
        return await world.promoter.promote(POOL, **{**options, **more})

    return call


def artifacts(desired):
    return [kernel.artifact for kernel in desired.stable.kernels]


def test_a_new_pool_starts_in_its_mode_at_generation_0(simulated):
    async def story(world):
        desired = await world.desired(POOL)
        assert (desired.generation, desired.mode, artifacts(desired)) == (0, Mode.RECOMMEND, [])
        assert (await world.promoter.ensure_pool(POOL, Mode.CANARY)).mode is Mode.RECOMMEND
        assert desired.signature.key_id == "test"

    simulated(story, mode=Mode.RECOMMEND)


def test_a_later_start_with_a_mode_puts_the_pool_in_it_once_and_one_without_keeps_it(simulated, promote):
    async def story(world):
        def started(mode):
            world.start()
            return Reconciler(world.change, world.promoter, world.controls, world.clock, mode=mode)

        await started(None).reconcile()
        assert (await world.desired(POOL)).mode is Mode.OBSERVE
        with_mode = started(Mode.CANARY)
        await with_mode.reconcile()
        desired = await world.desired(POOL)
        assert (desired.generation, desired.mode) == (1, Mode.CANARY)
        assert desired.signature.key_id == "test"
        assert (await promote(world, "a")).promoted
        # An operator's later word holds: the start's mode is not put over it with every pass.
        await world.controls.set_mode(POOL, Mode.PINNED)
        await with_mode.reconcile()
        assert (await world.desired(POOL)).mode is Mode.PINNED

    simulated(story, mode=Mode.OBSERVE)


@pytest.mark.parametrize("bucket", ["freeze", "pause"])
def test_a_freeze_that_cannot_be_read_holds_and_ends_nothing(simulated, promote, caplog, bucket):
    async def story(world):
        await world.bus.kv_put(bucket, "all", b"until monday")
        for _ in range(2):
            await world.reconciler.reconcile()
        assert [record.getMessage().count("until monday") for record in caplog.records] == [1]
        assert "Freeze with reason, since would have been right" in caplog.text
        result = await promote(world, "a")
        assert (result.outcome, result.promoted) == ("held", False)
        await world.bus.kv_delete(bucket, "all")
        await world.reconciler.reconcile()
        assert artifacts(await world.desired(POOL)) == ["a"]

    simulated(story)


def test_a_quarantine_that_cannot_be_read_bans_the_artifact_it_is_named_after(simulated, promote):
    async def story(world):
        await promote(world, "a")
        await world.bus.kv_put("quarantine", "a", b"it crashed")
        await world.reconciler.reconcile()
        assert artifacts(await world.desired(POOL)) == []

    simulated(story)


def test_a_pool_that_cannot_be_read_is_told_and_left_out_of_a_pass(rig, binding, faster, caplog):
    async def main():
        async with rig() as world:
            await world.promoter.ensure_pool("z", Mode.CANARY)
            await world.memory.kv_put("desired", "a", b"{}")
            await world.controls.freeze("release night")
            await world.promoter.promote("z", bindings=(binding("a"),), reason="faster", speedup=faster)
            await world.controls.thaw()
            for _ in range(2):
                await world.reconciler.reconcile()
            assert artifacts(await world.desired("z")) == ["a"]
            assert [r.getMessage() for r in caplog.records if "is not reconciled" in r.getMessage()] == [
                "pool a is not reconciled until this is put right"
            ]
            assert "DesiredState with pool, generation would have been right" in caplog.text

    run_simulated(main())


def test_a_worker_that_refuses_everything_costs_one_promotion_and_not_the_pool(
    simulated, promote, binding, caplog
):
    async def story(world):
        floor = BusFloor(world.bus, world.promoter, world.controls, default_mode=Mode.CANARY)
        for n in range(3):
            await promote(world, f"a{n}", bindings=(binding(f"a{n}", f"linear-{n}"),), promotion_id=f"p{n}")
        # The change of mode brings nothing: what it shows is still the last promotion's.
        await world.controls.set_mode(POOL, Mode.RECOMMEND)
        await world.controls.set_mode(POOL, Mode.CANARY)
        for _ in range(4):
            shown = await world.desired(POOL)
            await floor.take_back(POOL, shown.generation, "it lacks the key")
        assert artifacts(await world.desired(POOL)) == ["a0", "a1"]
        assert "brought nothing new and stays" in caplog.text

    simulated(story)


def test_a_direct_promotion_is_shown_recorded_and_told(simulated, promote):
    async def story(world):
        result = await promote(world, "a", drift_id="d1")
        assert result.promoted
        assert result.phase is Phase.CONFIRMED
        assert artifacts(result.desired) == artifacts(await world.desired(POOL)) == ["a"]
        assert (result.desired.generation, result.desired.stage) == (1, Stage.NONE)
        await world.relay.drain()
        advanced, completed = world.journal.told
        assert isinstance(advanced, PromotionAdvanced)
        assert isinstance(completed, PromotionCompleted)
        assert (completed.drift_id, completed.generation, completed.speedup.low) == ("d1", 1, 1.1)

    simulated(story)


def test_the_same_promotion_twice_is_one(simulated, promote):
    async def story(world):
        first, second = await promote(world, "a"), await promote(world, "a")
        assert first.promoted
        assert second.promoted
        assert second.desired.generation == first.desired.generation

    simulated(story)


def test_what_runs_already_is_not_promoted_again(simulated, promote):
    async def story(world):
        await promote(world, "a")
        again = await promote(world, "a", promotion_id="other")
        assert (again.outcome, again.hindrance) == ("aborted", Hindrance.NOTHING)
        assert again.desired.generation == 1

    simulated(story)


def test_of_two_that_planned_on_one_generation_one_wins(rig, promote):
    """Both read, both write their intent, and then both compare and set."""

    async def main():
        async with rig() as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            honest, waiting = world.keys.commit, []

            async def rival_first(desired, kv_revision):
                world.keys.commit = honest
                waiting.append(await promote(world, "rival"))
                await honest(desired, kv_revision)

            world.keys.commit = rival_first
            lost = await promote(world, "late")
            assert waiting[0].promoted
            assert (lost.outcome, lost.phase) == ("superseded", Phase.SUPERSEDED)
            assert artifacts(lost.desired) == ["rival"]
            assert await world.quiesce() == []
            statuses = {step.generation: step.status for step in world.steps()}
            assert statuses == {1: StepStatus.SUPERSEDED, 2: StepStatus.CONFIRMED}

    run_simulated(main())


def test_a_touch_alone_does_not_lose_a_promotion(rig, promote):
    async def main():
        async with rig() as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            honest = world.keys.commit

            async def touched_first(desired, kv_revision):
                world.keys.commit = honest
                assert await world.keys.touch(await world.keys.shown(POOL))
                await honest(desired, kv_revision)

            world.keys.commit = touched_first
            assert (await promote(world, "a")).promoted
            assert await world.quiesce() == []

    run_simulated(main())


def test_endless_conflicts_leave_an_intent_that_the_reconciler_finishes(rig, promote):
    async def main():
        async with rig() as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            honest = world.keys.commit

            async def refuse(desired, kv_revision):
                raise Conflict("somebody was faster")

            world.keys.commit = refuse
            result = await promote(world, "a")
            assert (result.outcome, result.phase, result.promoted) == ("pending", Phase.INTENT, False)
            world.keys.commit = honest
            assert await world.quiesce() == []
            assert (await promote(world, "a")).promoted

    run_simulated(main())


def test_kernels_of_other_operations_stay(simulated, promote, binding):
    async def story(world):
        await promote(world, "a")
        result = await promote(world, "b", bindings=(binding("b", definition="linear-o"),))
        assert sorted(artifacts(result.desired)) == ["a", "b"]

    simulated(story)


def test_weak_evidence_is_refused(simulated, promote):
    async def story(world):
        for number, weak in enumerate(
            ({"gate": Gate.G3_MICRO}, {"speedup": None}, {"speedup": Ratio(point=1.1, low=0.99, high=1.2)})
        ):
            result = await promote(world, "a", promotion_id=str(number), **weak)
            assert (result.outcome, result.hindrance) == ("aborted", Hindrance.EVIDENCE)
        assert (await world.desired(POOL)).generation == 0

    simulated(story)


def test_recommend_waits_for_a_person(simulated, promote):
    async def story(world):
        held = await promote(world, "a")
        assert (held.outcome, held.hindrance) == ("held", Hindrance.APPROVAL)
        await world.reconciler.reconcile()
        assert artifacts(await world.desired(POOL)) == []
        assert (await world.promoter.approve("a")).promoted
        with pytest.raises(ValueError, match="only a held one"):
            await world.promoter.approve("a")
        with pytest.raises(LookupError, match="not in the record"):
            await world.promoter.approve("b")

    simulated(story, mode=Mode.RECOMMEND)


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.PINNED])
def test_nothing_goes_live_where_nothing_may(simulated, promote, mode):
    async def story(world):
        assert (await promote(world, "a")).outcome == "aborted"
        assert (await world.desired(POOL)).generation == 0
        await world.controls.set_mode(POOL, Mode.CANARY)
        assert (await promote(world, "b")).promoted

    simulated(story, mode=mode)


@pytest.mark.parametrize("hold", ["freeze", "pause"])
def test_what_a_freeze_held_goes_on_after_it_unless_it_is_too_old(simulated, promote, hold):
    async def story(world):
        begin, end = {
            "freeze": (world.controls.freeze, world.controls.thaw),
            "pause": (world.controls.pause, world.controls.resume),
        }[hold]
        await begin("release night")
        assert (await promote(world, "a")).outcome == "held"
        assert (await promote(world, "a")).outcome == "held"
        await end()
        assert (await promote(world, "a")).promoted
        await begin("release night", pool=POOL)
        assert (await promote(world, "b")).outcome == "held"
        await world.clock.sleep(3601)
        await end(POOL)
        await world.reconciler.reconcile()
        assert artifacts(await world.desired(POOL)) == ["a"]

    simulated(story)


def test_a_canary_goes_on_and_completes(simulated, promote):
    async def story(world):
        begun = await promote(world, "a", drift_id="d1")
        assert (begun.outcome, begun.phase, begun.promoted) == ("changed", Phase.CANARY, False)
        assert (begun.desired.share, artifacts(begun.desired)) == (0.5, [])
        unsure = await world.promoter.advance(POOL, Reading(None, samples=0, stage_age_s=1))
        assert unsure.outcome == "held"
        done = await world.promoter.advance(POOL, GOOD)
        assert done.promoted
        assert artifacts(done.desired) == ["a"]
        await world.relay.drain()
        assert world.journal.told[-1].drift_id == "d1"

    simulated(story, policy=CANARY)


def test_a_canary_that_is_worse_is_taken_back(simulated, promote):
    async def story(world):
        await promote(world, "a")
        back = await world.promoter.advance(POOL, BAD)
        assert (back.outcome, back.phase) == ("changed", Phase.ROLLED_BACK)
        assert back.desired.candidate is None
        await world.relay.drain()
        [event] = [event for event in world.journal.told if isinstance(event, PromotionRolledBack)]
        assert "slower than the control" in event.reason
        assert (await promote(world, "a")).outcome == "rolled-back"

    simulated(story, policy=CANARY)


def test_a_stable_revision_goes_back_to_its_parent_and_then_to_nothing(simulated, promote):
    async def story(world):
        await promote(world, "a")
        await promote(world, "b")
        back = await world.promoter.roll_back(POOL, "a worker refused it")
        assert artifacts(back.desired) == ["a"]
        back = await world.promoter.roll_back(POOL, "a worker refused it")
        assert artifacts(back.desired) == []
        assert (await world.promoter.roll_back(POOL, "again")).hindrance is Hindrance.NOTHING

    simulated(story)


def test_leaving_canary_mode_takes_the_candidate_away(simulated, promote):
    async def story(world):
        await promote(world, "a")
        result = await world.controls.set_mode(POOL, Mode.PINNED)
        assert (result.desired.mode, result.desired.candidate) == (Mode.PINNED, None)
        assert (await world.ledger.promotion("a")).phase == Phase.ROLLED_BACK
        assert (await world.controls.set_mode(POOL, Mode.PINNED)).hindrance is Hindrance.NOTHING

    simulated(story, policy=CANARY)


def test_quarantine_purges_now_and_after_a_freeze(simulated, promote):
    async def story(world):
        await promote(world, "a")
        await world.controls.freeze("release night")
        [held] = await world.controls.quarantine("a", "it crashed a worker")
        assert (held.outcome, artifacts(held.desired)) == ("held", ["a"])
        await world.controls.thaw()
        await world.reconciler.reconcile()
        assert artifacts(await world.desired(POOL)) == []
        assert (await promote(world, "a", promotion_id="a2")).hindrance is Hindrance.QUARANTINE

    simulated(story)


@pytest.fixture
def floor_of():
    return lambda world: BusFloor(world.bus, world.promoter, world.controls, default_mode=Mode.CANARY)


def test_a_fault_brings_back_what_served_before(simulated, promote, floor_of):
    async def story(world):
        await promote(world, "a")
        await promote(world, "b")  # for the same operation: it took the place of the first
        await floor_of(world).quarantine("b", "it hung")
        desired = await world.desired(POOL)
        assert (artifacts(desired), desired.generation) == (["a"], 3)
        await world.relay.drain()
        assert world.journal.told[-1].reason == "it hung"
        assert (await promote(world, "b", promotion_id="b2")).hindrance is Hindrance.QUARANTINE

    simulated(story)


def test_a_fault_of_what_served_before_as_well_takes_that_alone(simulated, promote, binding, floor_of):
    async def story(world):
        await promote(world, "a")
        await promote(world, "b", bindings=(binding("b", definition="linear-o"),))
        await floor_of(world).quarantine("a", "it hung at last")
        assert artifacts(await world.desired(POOL)) == ["b"]

    simulated(story)


def test_a_fault_of_a_candidate_takes_the_candidate(simulated, promote, binding, floor_of):
    async def story(world):
        await promote(world, "a")
        shown = await world.desired(POOL)
        assert shown.candidate is not None
        await floor_of(world).quarantine("a", "it crashed")
        desired = await world.desired(POOL)
        assert (desired.candidate, artifacts(desired)) == (None, [])

    simulated(story, policy=CANARY)


def test_a_fault_that_is_told_twice_changes_the_pool_once_and_a_pool_without_it_never(
    simulated, promote, floor_of
):
    async def story(world):
        await promote(world, "a")
        for _ in range(2):
            await floor_of(world).quarantine("a", "it crashed")
        assert (await world.desired(POOL)).generation == 2
        await floor_of(world).quarantine("c", "it crashed elsewhere")
        assert (await world.desired(POOL)).generation == 2

    simulated(story)


def test_a_lost_pool_is_restored_without_what_came_into_quarantine(simulated, promote, binding):
    async def story(world):
        await promote(world, "a")
        await promote(world, "b", bindings=(binding("b", definition="linear-o"),))
        await world.memory.kv_delete("desired", POOL)
        await world.controls.quarantine("a", "it crashed a worker")
        await world.reconciler.reconcile()
        desired = await world.desired(POOL)
        assert (artifacts(desired), desired.generation) == (["b"], 3)

    simulated(story)


def test_an_unknown_pool_is_refused(rig, promote):
    async def main():
        async with rig() as world:
            with pytest.raises(UnknownPool, match="ensure_pool"):
                await promote(world, "a")

    run_simulated(main())


def test_a_record_made_anew_under_a_living_pool_goes_on_above_it(rig, promote, binding, faster):
    async def main():
        async with rig() as old, rig() as new:
            await old.promoter.ensure_pool(POOL, Mode.CANARY)
            await promote(old, "a")
            new.keys._bus = new.bus = old.bus
            result = await new.promoter.promote(
                POOL, bindings=(binding("b"),), reason="faster", speedup=faster, promotion_id="b"
            )
            assert result.promoted
            assert result.desired.generation == 2

    run_simulated(main())


def test_a_held_promotion_that_two_take_up_at_once_begins_once(rig, promote):
    """The second planned while the first went all the way: its intent must not put the promotion back."""

    async def main():
        async with rig() as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            await world.controls.freeze("release night")
            await promote(world, "a")
            await world.controls.thaw()
            honest = world.keys.guards

            async def rival_first(pool):
                world.keys.guards = honest
                assert (await promote(world, "a")).promoted
                return await honest(pool)

            world.keys.guards = rival_first
            second = await promote(world, "a")
            assert second.promoted
            assert second.desired.generation == 1
            assert await world.quiesce() == []
            assert len(world.steps()) == 1

    run_simulated(main())


def test_a_later_intent_loses_to_an_earlier_one_that_is_committed_first(rig, promote):
    """Generation 2 was planned on 0 and 1 is shown meanwhile: growing alone is not enough to win."""

    async def main():
        async with rig() as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            honest, results = world.keys.commit, []

            async def first(desired, kv_revision):
                async def second(late_desired, late_revision):
                    world.keys.commit = honest
                    await honest(desired, kv_revision)
                    await honest(late_desired, late_revision)

                world.keys.commit = second
                results.append(await promote(world, "late"))
                raise Conflict("written meanwhile, by myself")

            world.keys.commit = first
            results.append(await promote(world, "early"))
            late, early = results
            assert early.promoted
            assert (late.outcome, late.phase) == ("superseded", Phase.SUPERSEDED)
            assert artifacts(await world.desired(POOL)) == ["early"]
            assert await world.quiesce() == []
            statuses = {step.generation: step.status for step in world.steps()}
            assert statuses == {1: StepStatus.CONFIRMED, 2: StepStatus.SUPERSEDED}

    run_simulated(main())
