"""The harness itself: simulated time, crashes, faults, and one run for one seed."""

import asyncio
import time

import pytest

from polymorph.bus import topology
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.bus.port import Consumption
from polymorph.events.state import DesiredState
from polymorph.events.types import RequestStarted, SearchClosed
from polymorph.simulator.bus import FaultyBus
from polymorph.simulator.clock import EPOCH, SimulatedClock
from polymorph.simulator.faults import CALM, CrashAt, Crashed, FaultPlan
from polymorph.simulator.loop import Stalled, run_simulated
from polymorph.simulator.world import World, run_simulation

CLOSED = SearchClosed(
    pool="p", search_id="s", outcome="promoted", winner=None, candidates=0, cpu_s=0, reason="x"
)


def test_hours_pass_at_once_and_sleepers_wake_in_order():
    clock = SimulatedClock()
    woken = []

    async def sleeper(seconds):
        await clock.sleep(seconds)
        woken.append((seconds, clock.monotonic(), clock.now()))

    async def main():
        await asyncio.gather(*(sleeper(hours * 3600.0) for hours in (3, 1, 2)))

    before = time.monotonic()
    run_simulated(main())
    assert time.monotonic() - before < 5
    assert [seconds for seconds, _, _ in woken] == [3600, 7200, 10800]
    assert all(abs(at - seconds) < 1e-3 for seconds, at, _ in woken)
    assert all(abs((now - EPOCH).total_seconds() - seconds) < 1e-3 for seconds, _, now in woken)


def test_timeouts_are_simulated_too():
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1000)

    run_simulated(main())


def test_a_wait_for_nothing_is_told_instead_of_hanging():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Stalled, match="nothing is left to happen"):
        run_simulated(main())


def test_an_actor_that_crashes_starts_again_with_nothing_in_memory():
    lives = []

    async def scenario(world: World):
        async def actor():
            memory = []
            for _ in range(20):
                memory.append(1)
                await world.faults.pause("step")
            lives.append(len(memory))

        await world.settle(world.start("actor", actor))
        return world.crashes

    crashes = run_simulation(3, scenario, plan=FaultPlan(crash_rate=0.1))
    assert crashes > 0
    assert lives == [20]


def test_crash_at_dies_once_at_its_point():
    async def main():
        misfortune = CrashAt(1)
        await misfortune.pause("first")
        with pytest.raises(Crashed, match="second"):
            await misfortune.pause("second")
        await misfortune.pause("third")
        assert misfortune.points == ["first", "second", "third"]

    run_simulated(main())


def faulty(world: World) -> FaultyBus:
    return FaultyBus(InMemoryBus("/test", world.clock, MemoryWorld()), world.faults, world.journal)


def test_telemetry_is_dropped_and_the_rest_arrives():
    async def scenario(world: World):
        bus, heard = faulty(world), []

        async def hear(subject, message):
            heard.append(message.request_id)

        stop = await bus.listen(RequestStarted.wildcard(), hear)
        for number in range(100):
            await bus.tell(
                RequestStarted(
                    pool="p",
                    request_id=str(number),
                    worker_id="w",
                    program_id=None,
                    placed_by="router",
                    at=world.clock.now(),
                )
            )
        await world.clock.sleep(1)
        await stop()
        return heard

    plan = FaultPlan(delay_s=0, crash_rate=0, drop_rate=0.3)
    heard = run_simulation(1, scenario, plan=plan)
    assert 50 < len(heard) < 90
    assert heard == run_simulation(1, scenario, plan=plan)


def test_deliveries_are_repeated_and_a_crashed_consumer_gets_its_message_again():
    async def scenario(world: World):
        bus, done, calls = faulty(world), set(), []

        async def handle(delivery):
            calls.append(delivery.envelope.id)
            await world.faults.pause("handling")
            done.add(delivery.message.search_id)

        async def consumer():
            await bus.consume(Consumption("d", SearchClosed.wildcard(), ack_wait_s=1), handle)

        async def publisher():
            for number in range(10):
                await bus.publish(CLOSED.model_copy(update={"search_id": str(number)}))
            while len(done) < 10:
                await world.clock.sleep(0.5)

        world.start("consumer", consumer)
        await world.settle(world.start("publisher", publisher))
        return len(done), len(calls), world.crashes

    done, calls, crashes = run_simulation(5, scenario, plan=FaultPlan(crash_rate=0.05, duplicate_rate=0.3))
    assert done == 10
    assert calls > 10
    assert crashes > 0


def test_the_journal_holds_what_was_shown_and_told_once():
    async def scenario(world: World):
        bus = faulty(world)
        state = DesiredState(pool="p", generation=0).model_dump_json().encode()
        revision = await bus.kv_create(topology.DESIRED, "p", state)
        await bus.kv_update(topology.DESIRED, "p", state, revision)
        await bus.kv_put("freeze", "p", b"{}")
        await bus.publish(CLOSED)
        await bus.publish(CLOSED)
        assert len(world.journal.shown) == 2
        assert len(world.journal.states("p")) == 1
        assert world.journal.told == [CLOSED]

    run_simulation(1, scenario, plan=CALM)
