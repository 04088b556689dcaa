"""Every response names the revision that the engine ran when it began, in `x-polymorph-revision`.

Pure ASGI: the head of the response gets one more header, the body passes as it comes.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

REVISION_HEADER = b"x-polymorph-revision"
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Running:
    """The revision that this process's engine runs, as far as this process knows."""

    def __init__(self) -> None:
        self.revision = "empty"


RUNNING = Running()


class RevisionHeader:
    """Middleware: `--middleware polymorph.engine.provenance.RevisionHeader` names what `RUNNING` says.

    Whoever knows better passes `revision`, which is asked once for each request, when that comes in.
    """

    def __init__(self, app: Application, revision: Callable[[], str] | None = None) -> None:
        self._app = app
        self._revision = revision or (lambda: RUNNING.revision)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = naming(send, self._revision())
        await self._app(scope, receive, send)


def naming(send: Send, revision: str) -> Send:
    """Sends on, with the header in the response's head; a header of that name that is there already is replaced."""
    header = (REVISION_HEADER, _UNPRINTABLE.sub("?", revision).encode())

    async def named(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            others = [
                pair for pair in message.get("headers", ()) if bytes(pair[0]).lower() != REVISION_HEADER
            ]
            message = {**message, "headers": [*others, header]}
        await send(message)

    return named
