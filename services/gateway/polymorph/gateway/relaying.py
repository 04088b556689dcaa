"""A worker's answer on its way to the client: as it comes, its head with the first byte of its body."""

import logging

from polymorph.config.clock import Clock
from polymorph.gateway.adapters.connection import BrokenOff, Connection, Head, ResetEarly
from polymorph.gateway.adapters.forwarding import is_event_stream, response_headers
from polymorph.gateway.adapters.inbound import Departure
from polymorph.gateway.adapters.registry import Registry
from polymorph.gateway.domain.refusal import cut_off
from polymorph.gateway.journey import Journey, Outcome

_log = logging.getLogger(__name__)


class Relay:
    """Passes one answer on. What the client has seen a byte of is never asked for again."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    async def __call__(
        self, journey: Journey, connection: Connection, head: Head, departure: Departure
    ) -> None:
        """Raises `ResetEarly` where the worker went away before the body began: then the client has seen nothing."""
        try:
            chunk = await connection.chunk()
        except BrokenOff as error:
            raise ResetEarly(f"no byte came behind its head: {error}") from error
        journey.status = head.status
        journey.first_byte_s = self._clock.monotonic() - journey.began
        headers = response_headers(head, journey.request_id)
        await journey.send({"type": "http.response.start", "status": head.status, "headers": headers})
        whole_event = True
        try:
            while chunk is not None:
                if connection.done:
                    await self._end(journey, head, departure, chunk)
                    return
                await journey.send({"type": "http.response.body", "body": chunk, "more_body": True})
                whole_event = chunk.endswith((b"\n\n", b"\r\n\r\n"))
                chunk = await connection.chunk()
        except BrokenOff as error:
            await self._cut_off(journey, head, error, whole_event=whole_event)
            return
        await self._end(journey, head, departure, b"")

    async def _end(self, journey: Journey, head: Head, departure: Departure, last: bytes) -> None:
        departure.over()
        journey.outcome = _outcome(head.status)
        await journey.send({"type": "http.response.body", "body": last})

    async def _cut_off(self, journey: Journey, head: Head, error: BrokenOff, *, whole_event: bool) -> None:
        """The stream cannot end well, so it must not look as if: an error event where it can be told, no clean end."""
        _log.error("request %s: cut off by worker %s: %s", journey.request_id, journey.worker_id, error)
        journey.outcome = "truncated"
        self._registry.doubt(journey.worker_id or "")
        if is_event_stream(head):
            event = cut_off("The worker went away in the middle of the answer.").body()
            begin = b"" if whole_event else b"\n\n"
            message = begin + b"data: " + event + b"\n\n"
            await journey.send({"type": "http.response.body", "body": message, "more_body": True})


def _outcome(status: int) -> Outcome:
    """How an answer of a worker counts that came whole."""
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "error"
