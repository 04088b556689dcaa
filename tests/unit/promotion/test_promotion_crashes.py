"""A crash at every point of a promotion: no lost, no phantom, no second winner."""

import pytest

from polymorph.compiler.domain.promotion.judgement import Reading
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.events.state import Mode
from polymorph.events.types import PromotionCompleted
from polymorph.events.values import Ratio
from polymorph.simulator.faults import CrashAt, Crashed
from polymorph.simulator.loop import run_simulated

POOL = "pool-1"
SHORT = Policy("short", shares=(0.5,))
GOOD = Reading(Ratio(point=1.2, low=1.1, high=1.3), samples=100, stage_age_s=60)


def crash_points(scenario) -> range:
    """Runs `scenario` once without a crash and counts its points."""
    calm = CrashAt()
    run_simulated(scenario(calm))
    assert len(calm.points) > 8
    return range(len(calm.points))


def test_direct_promotion_survives_a_crash_at_every_point(rig, binding, faster):
    async def scenario(misfortune: CrashAt) -> None:
        async with rig(misfortune) as world:

            async def program() -> None:
                await world.promoter.ensure_pool(POOL, Mode.CANARY)
                result = await world.promoter.promote(
                    POOL, bindings=(binding("a"),), reason="faster", speedup=faster, promotion_id="s1"
                )
                assert result.promoted, result
                await world.relay.drain()

            try:
                await program()
            except Crashed:
                world.start()
                assert await world.quiesce() == []
                await program()
            misfortune.calm()
            assert await world.quiesce() == []
            state = await world.desired(POOL)
            assert [kernel.artifact for kernel in state.stable.kernels] == ["a"]
            assert (await world.ledger.promotion("s1")).phase == Phase.CONFIRMED
            told = [event for event in world.journal.told if isinstance(event, PromotionCompleted)]
            assert [event.promotion_id for event in told] == ["s1"]

    for number in crash_points(scenario):
        run_simulated(scenario(CrashAt(number)))


def test_the_reconciler_alone_finishes_what_a_crash_left(rig, binding, faster):
    """Nobody calls promote again: the record decides whether the promotion happened."""

    async def scenario(misfortune: CrashAt) -> None:
        async with rig(misfortune) as world:
            await world.memory.kv_keys("desired")
            try:
                await world.promoter.ensure_pool(POOL, Mode.CANARY)
                await world.promoter.promote(
                    POOL, bindings=(binding("a"),), reason="faster", speedup=faster, promotion_id="s1"
                )
            except Crashed:
                world.start()
            misfortune.calm()
            assert await world.quiesce() == []
            row = await world.ledger.promotion("s1")
            states = world.journal.states(POOL)
            shown = bool(states) and bool(states[-1].stable.kernels)
            assert shown is (row is not None)
            assert row is None or row.phase == Phase.CONFIRMED

    for number in crash_points(scenario):
        run_simulated(scenario(CrashAt(number)))


def test_canary_survives_a_crash_at_every_point(rig, binding, faster):
    async def scenario(misfortune: CrashAt) -> None:
        async with rig(misfortune, policy=SHORT) as world:

            async def program() -> None:
                await world.promoter.ensure_pool(POOL, Mode.CANARY)
                await world.promoter.promote(
                    POOL, bindings=(binding("a"),), reason="faster", speedup=faster, promotion_id="s1"
                )
                for _ in range(3):
                    if (await world.keys.shown(POOL)).desired.candidate is None:
                        break
                    await world.promoter.advance(POOL, GOOD)
                await world.relay.drain()

            try:
                await program()
            except Crashed:
                world.start()
                assert await world.quiesce() == []
                await program()
            misfortune.calm()
            assert await world.quiesce() == []
            assert (await world.ledger.promotion("s1")).phase == Phase.CONFIRMED
            shares = [state.share for state in world.journal.states(POOL)]
            assert shares == [0.0, 0.5, 0.0]

    for number in crash_points(scenario):
        run_simulated(scenario(CrashAt(number)))


@pytest.mark.parametrize("forbid", ["freeze", "quarantine"])
def test_an_intent_left_by_a_crash_is_given_up_where_something_forbids_it_now(rig, binding, faster, forbid):
    """The compare-and-set never ran, and must not run any more, not even late."""

    async def scenario(misfortune: CrashAt) -> None:
        async with rig(misfortune) as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            shown = await world.keys.shown(POOL)
            with pytest.raises(Crashed):
                await world.promoter.promote(
                    POOL, bindings=(binding("a"),), reason="faster", speedup=faster, promotion_id="s1"
                )
            [late] = await world.ledger.intents(POOL)
            world.start()
            if forbid == "freeze":
                await world.controls.freeze("release night")
            else:
                await world.controls.quarantine("a", "it crashed a worker")
            assert await world.quiesce() == []
            assert (await world.ledger.promotion("s1")).phase == (
                Phase.HELD if forbid == "freeze" else Phase.ABORTED
            )
            target = shown.desired.model_validate(late.target)
            with pytest.raises(Exception, match="revision"):
                await world.keys.commit(target, shown.kv_revision)
            assert (await world.desired(POOL)).stable.kernels == ()
            if forbid == "freeze":
                await world.controls.thaw()
                assert await world.quiesce() == []
                assert (await world.ledger.promotion("s1")).phase == Phase.CONFIRMED

    calm = CrashAt()

    async def count() -> int:
        async with rig(calm) as world:
            await world.promoter.ensure_pool(POOL, Mode.CANARY)
            await world.keys.shown(POOL)
            start = len(calm.points)
            await world.promoter.promote(POOL, bindings=(binding("a"),), reason="faster", speedup=faster)
            return calm.points.index("update desired before", start)

    run_simulated(scenario(CrashAt(run_simulated(count()))))
