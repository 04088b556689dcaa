"""Requests that another worker can take, sent back to the gateway while there is no engine here."""

import asyncio

from polymorph.events.headers import ELSEWHERE, RETRY
from polymorph.worker.adapters import metrics
from polymorph.worker.seat import Receive, Scope, Send
from polymorph.worker.switchboard import Switchboard, send_away


class Elsewhere:
    """The application before the switchboard. Requests that do not say that others can take them pass untouched.

    Of the others the head of an answer goes out with the first byte of its body: until then they can be sent back.
    """

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._unanswered: set[_Answer] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (RETRY, ELSEWHERE) not in scope["headers"]:
            await self._switchboard(scope, receive, send)
            return
        answer = _Answer(send)
        self._unanswered.add(answer)
        try:
            if self._switchboard.closed or not await self._answered(scope, receive, answer):
                metrics.SENT_BACK.inc()
                await send_away(scope, send, 1.0)
        finally:
            self._unanswered.discard(answer)

    def send_back(self) -> None:
        """The engine is gone: everything that has no byte of an answer goes back."""
        for answer in self._unanswered:
            answer.send_back()

    async def _answered(self, scope: Scope, receive: Receive, answer: "_Answer") -> bool:
        serving = asyncio.ensure_future(self._switchboard(scope, receive, answer.send))
        try:
            await asyncio.wait({serving, answer.back}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            serving.cancel()
            raise
        if answer.begun or not answer.back.done():
            await serving
            return True
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return False


class _Answer:
    """What one request was sent so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Scope | None = None
        self.begun = False
        self.back: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send_back(self) -> None:
        if not self.begun and not self.back.done():
            self.back.set_result(None)

    async def send(self, message: Scope) -> None:
        if self.begun:
            await self._send(message)
        elif self.back.done():
            return
        elif message["type"] == "http.response.start":
            self._head = message
        elif message.get("body") or not message.get("more_body", False):
            self.begun = True
            if self._head is not None:
                await self._send(self._head)
            await self._send(message)
