"""What each account may do, and that it may nothing else."""

import asyncio
import datetime as dt
import json
import stat

import pytest

from polymorph.bus import topology
from polymorph.bus.credentials import ROLES, Credentials
from polymorph.bus.errors import Conflict, Fatal, Unavailable
from polymorph.bus.nats import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.events.requests import ControlSlots
from polymorph.events.types import SearchClosed, TokensCounted, WorkerRefused

REFUSED = WorkerRefused(pool="p", worker_id="w1", generation=1, revision="r", reason="x")
CLOSED = SearchClosed(
    pool="p", search_id="s", outcome="failed", winner=None, candidates=0, cpu_s=0.0, reason="planted"
)
FORBIDDEN_SUBJECT = CLOSED.subject()


@pytest.fixture
async def control(bus_factory):
    return await bus_factory("compiler")


@pytest.fixture
async def worker(bus_factory):
    return await bus_factory("worker", timeout_s=1.0)


@pytest.fixture
async def watcher(bus_factory):
    return await bus_factory("watch", timeout_s=1.0)


async def kept_subjects(control) -> list[str]:
    last = (await control.connection.jetstream.stream_info(topology.EVENTS_STREAM)).state.last_seq
    records = control.events(after="0-0")
    subjects = [(await anext(records)).subject for _ in range(last)]
    await records.aclose()
    return subjects


@pytest.mark.real
async def test_a_worker_can_do_its_work(control, worker):
    assert await worker.ready()
    await control.kv_put("desired", "p", b"1")
    assert (await worker.kv_get("desired", "p")).value == b"1"
    await control.kv_put("quarantine", "0" * 64, b"bad")
    assert await worker.kv_keys("quarantine") == ["0" * 64]
    digest = await control.put_object(b"k" * 1_000_000)
    assert await worker.get_object(digest) == b"k" * 1_000_000
    assert await worker.kv_put("workers", "w1", b"record") > 0
    assert (await control.kv_get("workers", "w1")).value == b"record"
    turn = await worker.kv_create("restarts", "p", b"w1")
    with pytest.raises(Conflict):
        await worker.kv_create("restarts", "p", b"w2")
    await worker.kv_update("restarts", "p", b"w1", turn)
    assert (await worker.kv_get("restarts", "p")).value == b"w1"
    await worker.kv_delete("restarts", "p")
    assert await worker.kv_create("restarts", "p", b"w2") > turn
    assert await worker.publish(REFUSED) == 1
    assert await worker.publish(REFUSED) == 1
    assert await kept_subjects(control) == [REFUSED.subject()]


@pytest.mark.real
async def test_a_worker_sees_a_change_of_the_desired_state_at_once(control, worker):
    await control.kv_put("desired", "p", b"1")
    values = worker.kv_watch("desired", "p")
    assert (await anext(values)).value == b"1"
    await control.kv_put("desired", "p", b"2")
    assert (await asyncio.wait_for(anext(values), 1)).value == b"2"
    await values.aclose()


@pytest.mark.real
async def test_a_worker_answers_and_tells(control, worker):
    async def answer(body, reply):
        await reply(b"one")
        await reply(b"two")

    await worker.respond(ControlSlots, "w1", answer)
    question = ControlSlots(worker_id="w1", revision="empty", ttl_s=1)
    assert await control.request(question, timeout_s=2) == b"one"
    async with control.converse(question, first_s=2) as answers:
        assert [await anext(answers), await anext(answers)] == [b"one", b"two"]
    heard = asyncio.Event()

    async def hear(subject, message):
        heard.set()

    await control.listen("polymorph.tel.worker.>", hear)
    await worker.tell(
        TokensCounted(
            pool="p",
            worker_id="w1",
            request_id="r",
            prompt_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            ttft_s=None,
            tpot_s=None,
            at=dt.datetime(2026, 11, 1, tzinfo=dt.UTC),
        )
    )
    await asyncio.wait_for(heard.wait(), 2)


@pytest.mark.real
async def test_a_worker_may_not_decide(control, worker):
    await control.kv_put("desired", "p", b"1")
    for call in (
        worker.kv_put("desired", "p", b"2"),
        worker.kv_put("quarantine", "0" * 64, b""),
        worker.kv_put("leases", "a", b""),
        worker.kv_get("leases", "a"),
        worker.publish(CLOSED),
        worker.put_object(b"mine"),
        worker.dead_letters(),
    ):
        with pytest.raises(Unavailable):
            await call
    assert (await control.kv_get("desired", "p")).value == b"1"
    assert await kept_subjects(control) == []


@pytest.mark.real
@pytest.mark.parametrize("target", [FORBIDDEN_SUBJECT, "$KV.desired.p"])
async def test_a_worker_cannot_plant_a_message_through_a_reply(control, worker, target):
    """Each subject it may ask is asked with a reply subject that a stream keeps."""
    await control.kv_put("desired", "p", b"1")
    client = worker.connection.client
    for stream in ("KV_desired", "KV_quarantine", "KV_workers", "OBJ_artifacts"):
        query = json.dumps({"last_by_subj": "$KV.desired.p"}).encode()
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", query, reply=target)
    await client.publish(REFUSED.subject(), b"{}", reply=target)
    await client.publish("$KV.workers.w1", b"{}", reply=target)
    await client.publish("polymorph.tel.worker.x", b"{}", reply=target)
    await client.flush()
    # Its own event is kept after all of these, so they have been through by then.
    await worker.publish(REFUSED)
    await asyncio.sleep(0.2)
    state = (await control.connection.jetstream.stream_info(topology.EVENTS_STREAM)).state
    info = await control.connection.jetstream.stream_info(topology.EVENTS_STREAM, subjects_filter=">")
    assert set(info.state.subjects or {}) == {REFUSED.subject()}
    assert state.last_seq == 2
    assert (await control.kv_get("desired", "p")).value == b"1"


@pytest.mark.real
async def test_an_answer_cannot_plant_a_message(control, worker):
    """A worker that is asked can answer the asker and nobody else."""

    async def answer(body, reply):
        await worker.connection.client.publish(FORBIDDEN_SUBJECT, b"{}")
        await reply(b"fine")

    await worker.respond(ControlSlots, "w1", answer)
    question = ControlSlots(worker_id="w1", revision="empty", ttl_s=1)
    assert await control.request(question, timeout_s=2) == b"fine"
    await asyncio.sleep(0.2)
    assert await kept_subjects(control) == []


@pytest.mark.real
async def test_a_watcher_reads_events_and_nothing_else(control, watcher):
    assert await watcher.ready()
    await control.publish(CLOSED)
    records = watcher.events(after="0-0")
    assert (await anext(records)).subject == CLOSED.subject()
    await control.publish(REFUSED)
    assert (await asyncio.wait_for(anext(records), 1)).subject == REFUSED.subject()
    await records.aclose()
    await control.kv_put("desired", "p", b"1")
    for call in (
        watcher.publish(REFUSED),
        watcher.kv_put("desired", "p", b"2"),
        watcher.kv_get("desired", "p"),
        watcher.dead_letters(),
    ):
        with pytest.raises(Unavailable):
            await call
    client = watcher.connection.client
    await client.publish("$JS.API.STREAM.INFO.POLYMORPH_EVT", b"", reply=FORBIDDEN_SUBJECT)
    await client.publish("$JS.API.STREAM.PURGE.POLYMORPH_EVT", b"")
    await client.publish("$JS.API.STREAM.DELETE.POLYMORPH_EVT", b"")
    await client.flush()
    await asyncio.sleep(0.2)
    assert await kept_subjects(control) == [CLOSED.subject(), REFUSED.subject()]


@pytest.mark.real
async def test_wrong_credentials_are_fatal(nats_server):
    strange = Credentials.generate().nats_settings("compiler", nats_server.url)
    with pytest.raises(Fatal, match="compiler"):
        await asyncio.wait_for(NatsBus.connect(strange, "/x", SystemClock()), 10)


@pytest.mark.real
async def test_without_credentials_nobody_comes_in(nats_server):
    nobody = nats_server.settings("compiler").model_copy(update={"user": None, "password": None})
    with pytest.raises(Fatal):
        await asyncio.wait_for(NatsBus.connect(nobody, "/x", SystemClock()), 10)


def test_credentials_are_kept_for_their_owner_alone(tmp_path):
    path = tmp_path / "deep" / "nats.json"
    made = Credentials.load_or_generate(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Credentials.load_or_generate(path) == made
    assert len({password.get_secret_value() for password in made.passwords.values()}) == len(ROLES)
    assert "**" in repr(made)
    path.write_text('{"gateway": "x"}')
    with pytest.raises(ValueError, match="router"):
        Credentials.load(path)
