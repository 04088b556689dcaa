"""Publishing, consuming, dead letters: one behaviour on every bus."""

import asyncio
import time

import pytest

from polymorph.bus.errors import Conflict, Fatal, NotFound, Poison, Retryable, Unavailable
from polymorph.bus.port import Consumption, Delivery
from polymorph.events.envelope import message_id
from polymorph.events.types import EvaluateCandidate, WorkerRefused
from polymorph.events.values import Gate, Revision

EVENTS = Consumption("refusals", "polymorph.evt.worker.refused.v1.*", ack_wait_s=1.0, backoff_s=(0.05,))
JOBS = Consumption("evaluators", "polymorph.cmd.evaluator.evaluate-candidate.v1.avx2", backoff_s=(0.05,))


def refused(reason: str) -> WorkerRefused:
    return WorkerRefused(pool="p", worker_id="w", generation=1, revision="r", reason=reason)


def job(number: int = 1) -> EvaluateCandidate:
    return EvaluateCandidate(
        pool="p",
        search_id="s",
        candidate_id=f"c{number}",
        evaluation_id=f"e{number}",
        hardware="avx2",
        definition="d",
        solution="0" * 64,
        workload="1" * 64,
        incumbent=Revision(revision="empty"),
        until=Gate.G3_MICRO,
        min_m=1,
        max_m=8,
    )


class Got:
    """Collects deliveries and waits for a number of them."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self._more = asyncio.Condition()

    async def __call__(self, delivery: Delivery) -> None:
        async with self._more:
            self.deliveries.append(delivery)
            self._more.notify_all()

    async def wait(self, count: int, within_s: float = 10.0) -> list[Delivery]:
        async with self._more, asyncio.timeout(within_s):
            await self._more.wait_for(lambda: len(self.deliveries) >= count)
        return self.deliveries


async def letters(bus, count):
    async with asyncio.timeout(10):
        while len(found := await bus.dead_letters()) < count:
            await asyncio.sleep(0.02)
    return found


async def test_a_message_arrives_in_its_envelope(world, run):
    bus = await world.bus("/polymorph/test/7")
    got = Got()
    sequence = await bus.publish(refused("old"))
    run(bus.consume(EVENTS, got))
    (delivery,) = await got.wait(1)
    assert delivery.message == refused("old")
    assert delivery.attempt == 1
    assert delivery.stream_sequence == sequence
    assert delivery.envelope.source == "/polymorph/test/7"
    assert delivery.envelope.id == message_id(refused("old"), "/polymorph/test/7")


async def test_a_message_told_twice_is_kept_once(world, run):
    bus = await world.bus()
    got = Got()
    first = await bus.publish(refused("once"))
    assert await bus.publish(refused("once")) == first
    assert await bus.publish(refused("other")) == first + 1
    run(bus.consume(EVENTS, got))
    await got.wait(2)
    await asyncio.sleep(0.2)
    assert [d.message.reason for d in got.deliveries] == ["once", "other"]


async def test_a_durable_goes_on_where_it_stopped(world, run):
    bus = await world.bus()
    got = Got()
    await bus.publish(refused("1"))
    task = run(bus.consume(EVENTS, got))
    await got.wait(1)
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait({task})
    await bus.publish(refused("2"))
    again = Got()
    run(bus.consume(EVENTS, again))
    await again.wait(1)
    assert [d.message.reason for d in again.deliveries] == ["2"]


async def test_a_long_handler_keeps_its_message(world, run):
    bus, other = await world.bus("/a"), await world.bus("/b")
    started: list[str] = []
    ended = asyncio.Event()
    consumption = Consumption("refusals", "polymorph.evt.worker.refused.v1.*", ack_wait_s=0.6)

    async def slow(delivery):
        started.append(delivery.message.reason)
        await asyncio.sleep(2.0)
        ended.set()

    await bus.publish(refused("long"))
    run(bus.consume(consumption, slow))
    run(other.consume(consumption, slow))
    await asyncio.wait_for(ended.wait(), 10)
    await asyncio.sleep(0.8)
    assert started == ["long"]


async def test_retryable_comes_again_after_the_backoff(world, run):
    bus = await world.bus()
    at: list[float] = []
    done = asyncio.Event()

    async def handler(delivery):
        at.append(time.monotonic())
        assert delivery.attempt == len(at)
        if len(at) < 3:
            raise Retryable("not yet")
        done.set()

    run(bus.consume(Consumption("d", EVENTS.subject, backoff_s=(0.3, 0.6)), handler))
    await bus.publish(refused("again"))
    await asyncio.wait_for(done.wait(), 15)
    assert at[1] - at[0] >= 0.29
    assert at[2] - at[1] >= 0.59
    assert await bus.dead_letters() == []


async def test_poison_goes_to_the_dead_letters_at_once(world, run):
    bus = await world.bus()
    calls = []

    async def handler(delivery):
        calls.append(delivery)
        raise Poison("grün & 100 % wrong\nsecond line")

    run(bus.consume(EVENTS, handler))
    await bus.publish(refused("bad"))
    (letter,) = await letters(bus, 1)
    assert letter.reason == "grün & 100 % wrong\nsecond line"
    assert letter.durable == "refusals"
    assert letter.subject == refused("bad").subject()
    assert letter.attempts == 1
    await asyncio.sleep(0.3)
    assert len(calls) == 1


async def test_the_last_attempt_goes_to_the_dead_letters(world, run):
    bus = await world.bus()
    calls = []

    async def handler(delivery):
        calls.append(delivery.attempt)
        raise KeyError("surprise")

    run(bus.consume(Consumption("d", EVENTS.subject, max_attempts=3, backoff_s=(0.02,)), handler))
    await bus.publish(refused("never"))
    (letter,) = await letters(bus, 1)
    assert calls == [1, 2, 3]
    assert letter.attempts == 3
    assert "KeyError" in letter.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\xff not json", "no CloudEvents"),
        (
            (
                b'{"specversion":"1.0","id":"1","source":"/x","type":"polymorph.evt.worker.sang.v1","subject":"p",'
                b'"time":"2026-11-01T00:00:00Z","datacontenttype":"application/json","data":{}}'
            ),
            "polymorph.evt.worker.sang.v1",
        ),
        (
            (
                b'{"specversion":"1.0","id":"1","source":"/x","type":"polymorph.evt.worker.refused.v1","subject":"p",'
                b'"time":"2026-11-01T00:00:00Z","datacontenttype":"application/json","data":{"pool":"p"}}'
            ),
            "worker_id",
        ),
    ],
)
async def test_what_cannot_be_decoded_goes_to_the_dead_letters(world, run, body, reason):
    bus = await world.bus()
    got = Got()
    await world.keep_raw("polymorph.evt.worker.refused.v1.p", body)
    run(bus.consume(EVENTS, got))
    (letter,) = await letters(bus, 1)
    assert reason in letter.reason
    assert letter.body == body
    await bus.publish(refused("good"))
    await got.wait(1)


async def test_fatal_ends_the_consumer_and_keeps_the_message(world, run):
    bus = await world.bus()

    async def handler(delivery):
        raise Fatal("no disk")

    await bus.publish(refused("later"))
    with pytest.raises(Fatal, match="no disk"):
        await asyncio.wait_for(bus.consume(EVENTS, handler), 10)
    got = Got()
    run(bus.consume(EVENTS, got))
    assert (await got.wait(1))[0].message.reason == "later"


async def test_a_dead_letter_can_be_retried_and_dropped(world, run):
    bus = await world.bus()
    poisonous = True
    got = Got()

    async def handler(delivery):
        if poisonous:
            raise Poison("for now")
        await got(delivery)

    run(bus.consume(EVENTS, handler))
    await bus.publish(refused("1"))
    await bus.publish(refused("2"))
    first, second = await letters(bus, 2)
    poisonous = False
    await bus.retry_dead_letter(first.letter_id)
    (delivery,) = await got.wait(1)
    assert delivery.message == refused("1")
    assert delivery.attempt == 1
    await bus.drop_dead_letter(second.letter_id)
    assert await bus.dead_letters() == []
    with pytest.raises(NotFound):
        await bus.retry_dead_letter(second.letter_id)


async def test_a_job_is_done_by_one_evaluator_and_then_gone(world, run):
    first, second = await world.bus("/a"), await world.bus("/b")
    got = Got()
    run(first.consume(JOBS, got))
    run(second.consume(JOBS, got))
    for number in range(10):
        await first.publish(job(number))
    await got.wait(10)
    await asyncio.sleep(0.3)
    assert sorted(d.message.candidate_id for d in got.deliveries) == sorted(f"c{n}" for n in range(10))


async def test_a_cancelled_consumer_hands_its_message_on(world, run):
    first, second = await world.bus("/a"), await world.bus("/b")
    begun = asyncio.Event()

    async def stuck(delivery):
        begun.set()
        await asyncio.sleep(60)

    await first.publish(job())
    task = run(first.consume(JOBS, stuck))
    await asyncio.wait_for(begun.wait(), 10)
    task.cancel()
    await asyncio.wait({task})
    got = Got()
    run(second.consume(JOBS, got))
    (delivery,) = await got.wait(1, within_s=10)
    assert delivery.attempt == 2


async def test_the_second_consumer_fences_the_first(world, run):
    """The effect of a stale holder is refused: each holder takes the lease, and writes under what it took."""
    first, second = await world.bus("/a"), await world.bus("/b")
    stale = await first.kv_create("leases", "job-1", b"first")
    fresh = await second.kv_update("leases", "job-1", b"second", stale)
    with pytest.raises(Conflict):
        await first.kv_update("leases", "job-1", b"effect of the first", stale)
    assert (await second.kv_get("leases", "job-1")).value == b"second"
    assert await second.kv_update("leases", "job-1", b"effect of the second", fresh) > fresh


async def test_several_are_handled_at_once_where_asked_for(world, run):
    bus = await world.bus()
    together = asyncio.Barrier(3)
    done = []

    async def handler(delivery):
        await together.wait()
        done.append(delivery)

    run(bus.consume(Consumption("d", EVENTS.subject, max_in_flight=3), handler))
    for number in range(3):
        await bus.publish(refused(str(number)))
    async with asyncio.timeout(10):
        while len(done) < 3:
            await asyncio.sleep(0.02)


async def test_publish_tells_when_the_server_is_away(world):
    bus = await world.bus()
    await world.leave()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        await bus.publish(refused("lost"))
    assert time.monotonic() - started < 4
    assert not await bus.ready()
    await world.come_back()
    async with asyncio.timeout(5):
        while not await bus.ready():
            await asyncio.sleep(0.02)
    assert await bus.publish(refused("kept")) > 0


async def test_consuming_survives_a_restart(world, run):
    bus = await world.bus()
    got = Got()
    run(bus.consume(EVENTS, got))
    await bus.publish(refused("before"))
    await got.wait(1)
    await asyncio.sleep(0.2)
    await world.leave()
    await world.come_back()
    async with asyncio.timeout(5):
        while not await bus.ready():
            await asyncio.sleep(0.02)
    await bus.publish(refused("after"))
    await got.wait(2, within_s=6)
    assert [d.message.reason for d in got.deliveries] == ["before", "after"]
