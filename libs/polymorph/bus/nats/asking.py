"""Requests and their answers over core NATS, where one question may have many answers."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from polymorph.bus.errors import Unavailable
from polymorph.bus.nats.connection import Cancellation, Connection, told_as_bus_errors
from polymorph.bus.nats.tracing import continued, traced
from polymorph.bus.port import Responder
from polymorph.events.requests import Request
from polymorph.events.subjects import subject

log = logging.getLogger(__name__)

NO_RESPONDERS = "503"


class Asking:
    """Asks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def request(self, request: Request, timeout_s: float) -> bytes:
        where = self._reachable(request)
        with told_as_bus_errors(f"ask {where}"):
            body = request.model_dump_json().encode()
            headers = traced({}) or None
            cancellation = Cancellation()
            answer = await self._connection.client.request(where, body, timeout=timeout_s, headers=headers)
            cancellation.heed()
            return answer.data

    @contextlib.asynccontextmanager
    async def converse(self, request: Request, first_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        where = self._reachable(request)
        inbox = self._connection.client.new_inbox()
        with told_as_bus_errors(f"ask {where}"):
            answers = await self._connection.client.subscribe(inbox)
        try:
            with told_as_bus_errors(f"ask {where}"):
                body = request.model_dump_json().encode()
                await self._connection.client.publish(where, body, reply=inbox, headers=traced({}) or None)
                cancellation = Cancellation()
                first = await answers.next_msg(timeout=first_s)
                cancellation.heed()
            if (first.headers or {}).get("Status") == NO_RESPONDERS:
                raise Unavailable(f"ask {where}: nobody answers")
            yield _bodies(first, answers)
        finally:
            if not self._connection.client.is_closed:
                await answers.unsubscribe()

    def _reachable(self, request: Request) -> str:
        """The subject to ask; a question that waits for a reconnect would be answered too late to matter."""
        self._connection.check()
        where = request.subject()
        if not self._connection.connected:
            raise Unavailable(f"ask {where}: the server is away")
        return where


async def _bodies(first: Msg, answers: Subscription) -> AsyncIterator[bytes]:
    yield first.data
    async for answer in answers.messages:
        yield answer.data


class Answering:
    """Answers one kind of request; each in a task of its own, so that a long answer holds up nobody."""

    def __init__(self, connection: Connection, responder: Responder) -> None:
        self._connection = connection
        self._responder = responder
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self, request_type: type[Request], subject_id: str, group: str | None
    ) -> Callable[[], Awaitable[None]]:
        where = subject("req", request_type.DOMAIN, request_type.NAME, request_type.VERSION, subject_id)
        with told_as_bus_errors(f"answer {where}"):
            asked = await self._connection.client.subscribe(where, queue=group or "", cb=self._on_question)
            await self._connection.settle()

        async def stop() -> None:
            if not self._connection.client.is_closed:
                await asked.unsubscribe()
            for task in list(self._tasks):
                task.cancel()

        return stop

    async def _on_question(self, msg: Msg) -> None:
        task = asyncio.create_task(self._answer(msg))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, msg: Msg) -> None:
        async def reply(body: bytes) -> None:
            if msg.reply:
                with told_as_bus_errors(f"answer {msg.subject}"):
                    await self._connection.client.publish(msg.reply, body)

        try:
            with continued(msg.headers):
                await self._responder(msg.data, reply)
        except Exception:  # the responder loop: one bad question must not end the answering
            log.exception("%s: no answer", msg.subject)
