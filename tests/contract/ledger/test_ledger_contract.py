"""The ledger's behaviour, once for both databases."""

import asyncio
import datetime as dt

import pytest
from sqlalchemy.exc import IntegrityError
from sqlmodel import select

from polymorph.bus.errors import Unavailable
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.config.clock import SystemClock
from polymorph.events.state import DesiredState, Mode
from polymorph.events.types import (
    CandidateEvaluated,
    CandidateProposed,
    EvaluateCandidate,
    PromotionCompleted,
    SearchClosed,
    SearchOpened,
)
from polymorph.events.values import Gate, Ratio, Revision, Verdict
from polymorph.ledger import messages
from polymorph.ledger.promotions import OUTRUN, Proposed, StepPlan
from polymorph.ledger.relay import OutboxRelay
from polymorph.ledger.searches import UnknownRecord
from polymorph.ledger.tables import InboxRow, OutboxRow, StepStatus, TenantRow

SOURCE = "/polymorph/compiler/test"
POOL = "pool-1"
EMPTY = Revision(revision="empty")

OPENED = SearchOpened(
    pool=POOL,
    search_id="s1",
    drift_id="d1",
    definition="linear-qkv",
    min_m=1,
    max_m=8,
    share=0.4,
    budget_candidates=16,
    hardware="avx2-2",
    reason="it pays",
)
PROPOSED = CandidateProposed(
    pool=POOL,
    search_id="s1",
    candidate_id="c1",
    definition="linear-qkv",
    solution="0" * 64,
    parent=None,
    proposer="pattern",
    pattern="packing",
    params={"unroll": "4"},
)
ORDERED = EvaluateCandidate(
    pool=POOL,
    search_id="s1",
    candidate_id="c1",
    evaluation_id="e1",
    hardware="avx2-2",
    definition="linear-qkv",
    solution="0" * 64,
    workload="1" * 64,
    incumbent=EMPTY,
    until=Gate.G3_MICRO,
    min_m=1,
    max_m=8,
)
EVALUATED = CandidateEvaluated(
    pool=POOL,
    search_id="s1",
    candidate_id="c1",
    evaluation_id="e1",
    gate=Gate.G3_MICRO,
    verdict=Verdict.PASSED,
    reason="1.3x",
    speedup=Ratio(point=1.3, low=1.2, high=1.4),
    cpu_s=2.5,
)
CLOSED = SearchClosed(
    pool=POOL,
    search_id="s1",
    outcome="promoted",
    winner="c1",
    candidates=1,
    cpu_s=2.5,
    reason="it won",
)


async def outbox(ledger):
    rows = await ledger.database.read(lambda session: messages.pending(session, 100))
    return [messages.decode(row.type, row.data) for row in rows]


def plan(base, revision="r-1", promotion_id="p1"):
    def at(generation):
        stable = Revision(revision=revision, parent="empty")
        event = PromotionCompleted(
            pool=POOL,
            promotion_id=promotion_id,
            generation=generation,
            revision=stable,
            speedup=None,
            reason="faster",
        )
        target = DesiredState(pool=POOL, generation=generation, mode=Mode.CANARY, stable=stable)
        return StepPlan("begin", base, target, promotion_id, "faster", (event,), {promotion_id: "confirmed"})

    return at


def proposed(promotion_id="p1"):
    return Proposed(promotion_id, POOL, "r-1", "intent", "faster", None, {})


async def test_a_search_is_recorded_and_told_once(ledger):
    for _ in range(2):
        await ledger.open_search(OPENED)
        await ledger.record_candidate(PROPOSED)
        await ledger.order_evaluation(ORDERED)
    assert await outbox(ledger) == [OPENED, PROPOSED, ORDERED]
    assert [row.search_id for row in await ledger.open_searches(POOL)] == ["s1"]
    assert await ledger.record_evaluation(EVALUATED, message_id="m1")
    assert not await ledger.record_evaluation(EVALUATED, message_id="m1")
    assert not await ledger.record_evaluation(EVALUATED, message_id="m2")
    [evaluation] = await ledger.evaluations("s1")
    assert (evaluation.verdict, evaluation.speedup) == ("passed", {"point": 1.3, "low": 1.2, "high": 1.4})
    assert [row.params for row in await ledger.candidates("s1")] == [{"unroll": "4"}]
    assert await ledger.close_search(CLOSED)
    assert not await ledger.close_search(CLOSED)
    assert await ledger.open_searches() == []
    assert (await ledger.search("s1")).outcome == "promoted"
    assert (await outbox(ledger))[-1] == CLOSED


async def test_what_refers_to_nothing_is_refused_and_leaves_no_message(ledger):
    for refused in (ledger.record_candidate(PROPOSED), ledger.close_search(CLOSED)):
        with pytest.raises(UnknownRecord, match="'s1' is not in the record"):
            await refused
    with pytest.raises(UnknownRecord, match="'c1' is not in the record"):
        await ledger.record_evaluation(EVALUATED, message_id="m1")
    assert await outbox(ledger) == []
    await ledger.open_search(OPENED)
    await ledger.record_candidate(PROPOSED)
    assert await ledger.record_evaluation(EVALUATED, message_id="m1")


async def test_a_state_and_its_message_are_kept_together_or_not_at_all(ledger, database):
    def half_done(session):
        messages.enqueue(session, OPENED, source=SOURCE, now=dt.datetime.now(dt.UTC))
        raise RuntimeError("the process died here")

    with pytest.raises(RuntimeError):
        await database.write(half_done)
    assert await outbox(ledger) == []


async def test_generations_of_a_pool_are_never_given_out_twice(ledger):
    steps = await asyncio.gather(*(ledger.open_step(POOL, 0, plan(0)) for _ in range(10)))
    assert sorted(step.generation for step in steps) == list(range(1, 11))
    other = await ledger.open_step("pool-2", 41, plan(41))
    assert other.generation == 42


async def test_settling_confirms_the_shown_step_once_and_closes_the_others(ledger):
    first = await ledger.open_step(POOL, 0, plan(0), proposed=proposed("p1"))
    lost = await ledger.open_step(POOL, 0, plan(0, "r-2", "p2"), proposed=proposed("p2"))
    late = await ledger.open_step(POOL, 0, plan(0, "r-3", "p3"), proposed=proposed("p3"))
    assert [step.generation for step in await ledger.settle(POOL, lost.generation)] == [2]
    assert await ledger.settle(POOL, lost.generation) == []
    assert (await ledger.step(POOL, first.generation)).status == StepStatus.SUPERSEDED
    assert [step.generation for step in await ledger.intents(POOL)] == [late.generation]
    phases = {row.promotion_id: row.phase for row in await ledger.promotions(POOL)}
    assert phases == {"p1": "superseded", "p2": "confirmed", "p3": "intent"}
    [told] = await outbox(ledger)
    assert (told.promotion_id, told.generation) == ("p2", 2)
    assert (await ledger.revision(POOL, "r-2")).parent == "empty"
    assert (await ledger.last_confirmed(POOL)).generation == 2


async def test_settling_at_once_tells_once(ledger):
    step = await ledger.open_step(POOL, 0, plan(0), proposed=proposed())
    settled = await asyncio.gather(*(ledger.settle(POOL, step.generation) for _ in range(8)))
    assert sum(len(confirmed) for confirmed in settled) == 1
    assert len(await outbox(ledger)) == 1


async def test_ancestors_of_what_is_shown_are_confirmed_with_it(ledger):
    """A crash between two commits and their confirmations: both happened."""
    first = await ledger.open_step(POOL, 0, plan(0), proposed=proposed("p1"))
    second = await ledger.open_step(POOL, first.generation, plan(1, "r-2", "p2"), proposed=proposed("p2"))
    confirmed = await ledger.settle(POOL, second.generation)
    assert [step.generation for step in confirmed] == [1, 2]
    assert [event.promotion_id for event in await outbox(ledger)] == ["p1", "p2"]


async def test_a_step_given_up_that_was_shown_all_the_same_is_confirmed(ledger):
    step = await ledger.open_step(POOL, 0, plan(0), proposed=proposed())
    assert await ledger.abort_step(POOL, step.generation, OUTRUN)
    assert not await ledger.abort_step(POOL, step.generation, OUTRUN)
    assert (await ledger.promotion("p1")).phase == "superseded"
    await ledger.settle(POOL, step.generation)
    assert (await ledger.promotion("p1")).phase == "confirmed"


async def test_an_effect_happens_once_for_each_consumer(ledger, database):
    done = []
    ran = await asyncio.gather(*(ledger.once("a", "m1", lambda session: done.append("a")) for _ in range(5)))
    assert ran.count(True) == 1
    assert await ledger.once("b", "m1", lambda session: done.append("b"))
    assert sorted(done) == ["a", "b"]


async def test_a_failed_effect_may_be_tried_again(ledger, database):
    def fails(session):
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError):
        await ledger.once("a", "m1", fails)
    assert await database.read(lambda session: list(session.exec(select(InboxRow)))) == []
    assert await ledger.once("a", "m1", lambda session: None)


class DyingBus(InMemoryBus):
    """Takes a message, and then the process dies before it hears so."""

    deaths = 1

    async def publish(self, message):
        sequence = await super().publish(message)
        if self.deaths:
            self.deaths -= 1
            raise Unavailable("died after the stream took it")
        return sequence


async def test_the_relay_survives_a_crash_between_publish_and_mark(ledger, database):
    await ledger.open_search(OPENED)
    await ledger.record_candidate(PROPOSED)
    bus = DyingBus(SOURCE, SystemClock(), MemoryWorld())
    relay = OutboxRelay(bus, database, SystemClock())
    with pytest.raises(Unavailable):
        await relay.drain()
    assert await outbox(ledger) == [OPENED, PROPOSED]
    assert await relay.drain() == 2
    assert await relay.drain() == 0
    kept = []
    async for record in bus.events(after="0-0"):
        kept.append(record.envelope.type)
        if len(kept) == bus.world.streams["POLYMORPH_EVT"].extent.last:
            break
    assert kept == [OPENED.type_name(), PROPOSED.type_name()]


async def test_the_relay_waits_for_a_bus_that_is_away(ledger, database):
    await ledger.open_search(OPENED)
    world = MemoryWorld()
    world.available = False
    bus = InMemoryBus(SOURCE, SystemClock(), world)
    relay = OutboxRelay(bus, database, SystemClock(), idle_s=0.01, retry_s=0.01)
    running = asyncio.create_task(relay.run())
    await asyncio.sleep(0.1)
    assert await outbox(ledger) == [OPENED]
    world.available = True
    async with asyncio.timeout(10):
        while await outbox(ledger):
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("poison", ["a type of another release", "data that does not fit"])
async def test_the_relay_leaves_out_what_it_cannot_publish_and_goes_on(ledger, database, caplog, poison):
    foreign = poison.startswith("a type")
    row = {
        "message_id": "z",
        "type": "polymorph.evt.future.thing.v2" if foreign else OPENED.type_name(),
        "data": {},
        "created_at": dt.datetime.now(dt.UTC),
    }
    await database.write(lambda session: session.add(OutboxRow(**row)))
    await ledger.open_search(OPENED)
    relay = OutboxRelay(InMemoryBus(SOURCE, SystemClock(), MemoryWorld()), database, SystemClock())
    assert await relay.drain() == 1
    assert await relay.drain() == 0
    assert [record.getMessage().count("outbox row z is left out") for record in caplog.records] == [1]
    rows = await database.read(lambda session: messages.pending(session, 100))
    assert [row.message_id for row in rows] == ["z"]


async def test_a_tenants_key_is_unique_and_a_naive_moment_is_refused(database):
    now = dt.datetime.now(dt.UTC)

    def add(session, name, at=now):
        session.add(TenantRow(tenant_id=name, name=name, key_digest="same", created_at=at))

    await database.write(lambda session: add(session, "a"))
    with pytest.raises(IntegrityError):
        await database.write(lambda session: add(session, "b"))
    with pytest.raises(Exception, match="no time zone"):
        await database.write(lambda session: add(session, "c", now.replace(tzinfo=None)))
    kept = await database.read(lambda session: session.get(TenantRow, "a"))
    assert kept.created_at == now


async def test_two_processes_write_one_database_at_once(database_url, database):
    """SQLite takes one writer at a time: the second waits instead of failing."""
    from polymorph.ledger.database import SqlDatabase
    from polymorph.ledger.ledger import Ledger

    second = SqlDatabase(database_url)
    ledgers = [Ledger(each, SystemClock(), source=SOURCE) for each in (database, second)]
    steps = await asyncio.gather(*(ledgers[number % 2].open_step(POOL, 0, plan(0)) for number in range(20)))
    assert sorted(step.generation for step in steps) == list(range(1, 21))
    await second.close()
