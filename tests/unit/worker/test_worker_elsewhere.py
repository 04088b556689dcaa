"""Requests that another worker can take: sent back while there is no engine, and never after a byte."""

import asyncio
from typing import Any

import pytest

from polymorph.worker.elsewhere import Elsewhere

ASKING = [(b"x-polymorph-retry", b"elsewhere")]


class Board:
    """A switchboard whose application does what a test tells it."""

    closed = False

    def __init__(self) -> None:
        self.go = asyncio.Queue[dict[str, Any]]()
        self.ended = asyncio.Event()
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        try:
            while True:
                message = await self.go.get()
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    return
        finally:
            self.ended.set()


class Client:
    def __init__(self, board: Board, headers: list[tuple[bytes, bytes]]) -> None:
        self.got: list[dict[str, Any]] = []
        self.elsewhere = Elsewhere(board)  # type: ignore[arg-type]
        scope = {"type": "http", "headers": headers}
        self.task = asyncio.create_task(self.elsewhere(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def _send(self, message: Any) -> None:
        self.got.append(message)

    @property
    def sent_back(self) -> bool:
        head = self.got[0] if self.got else {}
        return head.get("status") == 503 and ASKING[0] in head["headers"]


def head() -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": []}


def body(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("before", [[], [head()], [head(), body(b"")]])
async def test_without_a_byte_it_goes_back_and_its_work_ends(before: list[dict[str, Any]]) -> None:
    board = Board()
    client = Client(board, ASKING)
    for message in before:
        board.go.put_nowait(message)
    await settled()
    assert client.got == []
    client.elsewhere.send_back()
    await client.task
    assert client.sent_back
    assert board.ended.is_set()
    assert client.elsewhere._unanswered == set()


async def test_after_a_byte_it_stays() -> None:
    board = Board()
    client = Client(board, ASKING)
    for message in (head(), body(b"data")):
        board.go.put_nowait(message)
    await settled()
    client.elsewhere.send_back()
    board.go.put_nowait(body(b"", more=False))
    await client.task
    assert client.got == [head(), body(b"data"), body(b"", more=False)]


async def test_who_names_no_others_is_never_sent_back() -> None:
    board = Board()
    client = Client(board, [(b"x-polymorph-retry", b"maybe")])
    board.go.put_nowait(head())
    await settled()
    client.elsewhere.send_back()
    board.go.put_nowait(body(b"", more=False))
    await client.task
    assert client.got == [head(), body(b"", more=False)]


async def test_while_newcomers_would_wait_they_go_back_at_once() -> None:
    board = Board()
    board.closed = True
    client = Client(board, ASKING)
    await client.task
    assert client.sent_back
    assert board.calls == 0


async def test_an_answer_without_a_body_is_an_answer() -> None:
    board = Board()
    client = Client(board, ASKING)
    board.go.put_nowait(head())
    board.go.put_nowait(body(b"", more=False))
    await client.task
    assert client.got == [head(), body(b"", more=False)]


async def test_a_server_that_ends_takes_the_work_with_it() -> None:
    board = Board()
    client = Client(board, ASKING)
    await settled()
    client.task.cancel()
    await asyncio.gather(client.task, return_exceptions=True)
    await asyncio.wait_for(board.ended.wait(), 5)
