"""Requests meet seats: where they go, how they wait, and that none is cut when an engine is replaced."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus.errors import Retryable
from polymorph.config.clock import SystemClock
from polymorph.engine.launch import EngineLaunch
from polymorph.worker.domain.steps import Load
from polymorph.worker.seat import Seat
from polymorph.worker.seats import EngineNotStarted, Seats
from polymorph.worker.switchboard import Switchboard
from polymorph.worker.telling import Telling

LAUNCH = EngineLaunch(Path("m"))


class Answering:
    """An application that answers with its name once it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}
        await send(start)
        await self.may.wait()
        if self.name == "broken":
            raise RuntimeError("broken")
        await send({"type": "http.response.body", "body": self.name.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"."})


class Engine:
    alive = True


def seat(name: str = "a", revision: str = "empty") -> Seat:
    return Seat(Engine(), Answering(name), LAUNCH, None, revision=revision)  # type: ignore[arg-type]


async def ask(board: Switchboard, method: str = "POST", kind: str = "http") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> Any:
        raise AssertionError("nobody reads the body here")

    await board({"type": kind, "method": method, "path": "/"}, receive, send)
    return sent


def body(sent: list[dict[str, Any]]) -> str:
    return b"".join(each.get("body", b"") for each in sent).decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_every_response_names_the_revision_that_ran_when_it_began() -> None:
    board = Switchboard(1.0)
    first = seat("a", "r-1")
    board.seat(first)
    first.app.may.clear()  # type: ignore[attr-defined]
    asking = asyncio.create_task(ask(board))
    await until(lambda: first.in_flight == 1)
    first.revision = "r-2"
    first.app.may.set()  # type: ignore[attr-defined]
    sent = await asking
    assert dict(sent[0]["headers"]) == {b"x-own": b"1", b"x-polymorph-revision": b"r-1"}
    assert [each.get("body") for each in sent[1:]] == [b"a", b"."]
    assert dict((await ask(board))[0]["headers"])[b"x-polymorph-revision"] == b"r-2"


async def test_a_name_cannot_add_a_header() -> None:
    board = Switchboard(1.0)
    board.seat(seat("a", "r\r\nset-cookie: x=é"))
    assert dict((await ask(board))[0]["headers"])[b"x-polymorph-revision"] == b"r??set-cookie:?x=?"


async def test_newcomers_go_to_the_new_seat_and_old_requests_stay() -> None:
    board = Switchboard(1.0)
    old, new = seat("old"), seat("new")
    assert board.seat(old) is None
    old.app.may.clear()  # type: ignore[attr-defined]
    staying = asyncio.create_task(ask(board))
    await until(lambda: old.in_flight == 1)
    assert board.seat(new) is old
    assert body(await ask(board)) == "new."
    assert old.in_flight == 1
    old.app.may.set()  # type: ignore[attr-defined]
    assert body(await staying) == "old."
    assert (old.in_flight, new.in_flight) == (0, 0)


async def test_held_newcomers_wait_and_then_go_on() -> None:
    board = Switchboard(5.0)
    board.seat(seat("old"))
    board.hold()
    board.hold()
    asking = asyncio.create_task(ask(board))
    await until(lambda: board.waiting == 1)
    assert body(await ask(board, "GET")) == "old."
    board.release()
    board.seat(None)
    board.release()
    await asyncio.sleep(0.01)
    assert board.waiting == 1
    board.seat(seat("new"))
    assert body(await asking) == "new."
    assert board.waiting == 0


async def test_who_waits_too_long_is_sent_away_in_words() -> None:
    board = Switchboard(0.02)
    board.hold()
    sent = await ask(board)
    assert sent[0]["status"] == 503
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(body(sent))["error"]["code"] == 503
    assert (await ask(board, "GET"))[0]["status"] == 503
    assert await ask(board, kind="websocket") == [{"type": "websocket.close", "code": 1013}]
    assert board.waiting == 0


async def test_a_request_that_fails_is_no_longer_in_flight() -> None:
    board = Switchboard(1.0)
    broken = seat("broken")
    board.seat(broken)
    with pytest.raises(RuntimeError, match="broken"):
        await ask(board)
    assert broken.in_flight == 0
    await broken.idle()


async def test_the_servers_own_lifespan_is_answered() -> None:
    told: list[str] = []
    messages = iter(["lifespan.startup", "lifespan.shutdown"])

    async def receive() -> Any:
        return {"type": next(messages)}

    async def send(message: Any) -> None:
        told.append(message["type"])

    await Switchboard(1.0)({"type": "lifespan"}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


class Opened:
    """Opens seats, or fails where it is told to."""

    def __init__(self) -> None:
        self.board = Switchboard(5.0)
        self.closed: list[Seat] = []
        self.fails = ""
        self.may = asyncio.Event()
        self.may.set()
        self.seats = Seats(self.board, self.open, self.close, SystemClock())

    async def open(self, launch: EngineLaunch) -> Seat:
        await self.may.wait()
        if self.fails:
            raise EngineNotStarted(self.fails)
        return seat(f"{launch.max_num_seqs}")

    async def close(self, closed: Seat) -> None:
        self.closed.append(closed)


async def first(opened: Opened) -> Seat:
    made = await opened.seats.open(LAUNCH)
    opened.seats.seat(made)
    return made


async def test_an_engine_lives_until_its_last_request_has_ended() -> None:
    opened = Opened()
    old = await first(opened)
    old.app.may.clear()  # type: ignore[attr-defined]
    staying = asyncio.create_task(ask(opened.board))
    await until(lambda: old.in_flight == 1)
    new = await opened.seats.open(LAUNCH)
    assert opened.seats.seat(new) is old
    assert opened.seats.engine is new.engine
    opened.seats.retire(old)
    assert not await opened.seats.drained(old, 0.05)
    assert opened.seats.living == [old, new]
    old.app.may.set()  # type: ignore[attr-defined]
    assert body(await staying) == "32."
    await opened.seats.retired()
    assert (opened.closed, opened.seats.living) == ([old], [new])
    await opened.seats.stop(old)
    assert opened.closed == [old]


async def test_an_engine_lives_until_the_requests_have_ended_that_it_was_handed() -> None:
    opened = Opened()
    dead, heir = await first(opened), await opened.seats.open(LAUNCH)
    dead.app.may.clear()  # type: ignore[attr-defined]
    handed = asyncio.create_task(ask(opened.board))
    await until(lambda: dead.in_flight == 1)
    dead.engine.alive = False  # type: ignore[misc]
    opened.seats.seat(heir)
    opened.seats.retire(dead)
    assert opened.seats.in_flight(heir) == 1
    assert not await opened.seats.drained(heir, 0.05)
    opened.seats.vacate()
    opened.seats.retire(heir)
    await asyncio.sleep(0.05)
    assert opened.closed == []
    dead.app.may.set()  # type: ignore[attr-defined]
    await handed
    await opened.seats.retired()
    assert set(opened.closed) == {dead, heir}


async def test_newcomers_wait_while_an_engine_is_replaced() -> None:
    opened = Opened()
    old = await first(opened)
    opened.may.clear()
    replacing = asyncio.create_task(opened.seats.replace(old, LAUNCH))
    await until(lambda: bool(opened.closed))
    with pytest.raises(Retryable, match="restarted"):
        opened.seats.engine  # noqa: B018 - it raises
    asking = asyncio.create_task(ask(opened.board))
    await until(lambda: opened.board.waiting == 1)
    opened.may.set()
    new = await replacing
    assert body(await asking) == "32."
    assert opened.seats.current is new
    assert not opened.board.held


async def test_a_failed_start_leaves_the_old_engine_serving() -> None:
    opened = Opened()
    old = await first(opened)
    opened.fails = "no memory"
    with pytest.raises(EngineNotStarted, match="no memory"):
        await opened.seats.open(LAUNCH)
    assert opened.seats.current is old
    assert body(await ask(opened.board)) == "32."


async def test_an_engine_that_nobody_waits_for_any_more_is_ended() -> None:
    opened = Opened()
    old = await first(opened)
    opened.may.clear()
    opening = asyncio.create_task(opened.seats.open(LAUNCH))
    await asyncio.sleep(0.01)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    opened.may.set()
    await until(lambda: len(opened.closed) == 1)
    assert opened.seats.living == [old]
    await opened.seats.close()
    assert opened.seats.living == []


async def test_the_load_of_two_engines_is_one() -> None:
    telling = Telling("p", "w", SystemClock(), lambda: "r")
    one, two = telling.open(), telling.open()
    one.loaded(Load(3, 1, 0.5))
    two.loaded(Load(2, 0, 0.1))
    assert telling.load == Load(5, 1, 0.5)
    telling.close(one)
    assert telling.load == Load(2, 0, 0.1)


async def test_a_worker_without_a_seat_sends_elsewhere_whoever_only_looks() -> None:
    board = Switchboard(1.0)
    seats = Seats(board, _no_opener, _no_closer, SystemClock())
    seats.seat(seat("a"))
    assert not board.closed
    seats.vacate()
    assert board.closed
    (head, _) = await ask(board, "GET")
    assert head["status"] == 503
    assert dict(head["headers"])[b"x-polymorph-retry"] == b"elsewhere"


async def _no_opener(launch: EngineLaunch) -> Seat:
    raise EngineNotStarted("nobody opens here")


async def _no_closer(closed: Seat) -> None:
    """Nothing was opened."""
