"""The rhythm of windows."""

import datetime as dt

from polymorph.events.state import WorkerRecord
from polymorph.events.types import RequestFinished, RequestStarted
from polymorph.router.domain.fleet import Fleet
from polymorph.router.domain.windows import Windows, next_end

T0 = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def started(pool: str, name: str, seconds: float) -> RequestStarted:
    return RequestStarted(
        pool=pool, request_id=name, worker_id="w", program_id=None, placed_by="router", at=at(seconds)
    )


def finished(pool: str, name: str, seconds: float) -> RequestFinished:
    return RequestFinished(
        pool=pool,
        request_id=name,
        worker_id="w",
        status=200,
        outcome="ok",
        first_byte_s=None,
        total_s=1,
        at=at(seconds),
    )


def test_all_routers_close_at_the_same_instants():
    assert next_end(at(0.1), 5) == at(5)
    assert next_end(at(5), 5) == at(10)


def test_one_window_a_pool_and_none_while_idle():
    fleet = Fleet(ttl_s=1000)
    fleet.put(
        WorkerRecord(
            worker_id="w",
            pool="p",
            model="org/model",
            url="http://w",
            state="ready",
            generation=1,
            revision="empty",
            hardware="h",
            started_at=T0,
        ),
        0.0,
    )
    windows = Windows(fleet, T0)
    for message in (started("p", "1", 1), started("q", "2", 2), finished("q", "2", 3)):
        windows.take(message)
    first = {observed.pool: observed for observed in windows.close(at(5))}
    assert (first["p"].model, first["p"].workers) == ("org/model", 1)
    assert (first["q"].model, first["q"].workers) == ("q", 0)
    assert first["p"].window_s == 5
    # Still in flight in p; nothing in q.
    assert [observed.pool for observed in windows.close(at(10))] == ["p"]
    windows.take(finished("p", "1", 11))
    fleet.remove("w")
    (last,) = windows.close(at(15))
    assert last.model == "org/model"
    assert windows.close(at(20)) == []
