"""One request from its first byte to its last."""

import asyncio
import logging
import uuid
from dataclasses import dataclass, field
from typing import Literal

from polymorph.config.clock import Clock
from polymorph.events.requests import PlaceRequest
from polymorph.events.subjects import pool_id
from polymorph.events.types import RequestFinished, RequestStarted
from polymorph.gateway.adapters import metrics
from polymorph.gateway.adapters.connection import BrokenOff, ConnectFailed, Connection, Head, ResetEarly
from polymorph.gateway.adapters.forwarding import is_event_stream, request_head, response_headers
from polymorph.gateway.adapters.inbound import (
    ClientGone,
    Departure,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    refuse,
)
from polymorph.gateway.adapters.registry import Registry
from polymorph.gateway.adapters.router import RouterClient
from polymorph.gateway.adapters.telegraph import Telegraph
from polymorph.gateway.adapters.upstream import Origin, Upstreams, origin
from polymorph.gateway.domain.fleet import Fleet
from polymorph.gateway.domain.placing import Choice, check_model, choose, nobody
from polymorph.gateway.domain.refusal import Refusal, cut_off
from polymorph.gateway.domain.request_id import request_id as valid_id
from polymorph.gateway.domain.scan import Scan, scan

_log = logging.getLogger(__name__)
_NO_POOL = "none"
Told = Literal["ok", "error", "disconnect", "truncated"]
Outcome = Told | Literal["refused", "client_error"]
_TOLD: dict[Outcome, Told] = {
    "ok": "ok",
    "client_error": "ok",
    "refused": "error",
    "error": "error",
    "disconnect": "disconnect",
    "truncated": "truncated",
}
"""The words of the telemetry for ours: it asks whether the fleet did its part, /metrics also who was at fault."""


@dataclass(slots=True)
class Journey:
    """What is known of one request so far."""

    scope: Scope
    send: Send
    request_id: str
    placement_id: str
    began: float
    pool: str = _NO_POOL
    worker_id: str | None = None
    status: int = 0
    outcome: Outcome = "error"
    first_byte_s: float | None = None
    tried: list[str] = field(default_factory=list)


class Forward:
    """The ASGI application of the two completion routes."""

    def __init__(
        self,
        fleet: Fleet,
        registry: Registry,
        router: RouterClient,
        *,
        upstreams: Upstreams,
        telegraph: Telegraph,
        clock: Clock,
        max_body_bytes: int,
        attempts: int,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._router = router
        self._upstreams = upstreams
        self._telegraph = telegraph
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._attempts = attempts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        offered = header(scope["headers"], b"x-request-id")
        # The client may give many requests one id, say of its trace; what counts them has an id of its own.
        made = uuid.uuid4().hex
        journey = Journey(scope, send, valid_id(offered, made), made, self._clock.monotonic())
        metrics.IN_FLIGHT.inc()
        try:
            await self._travel(journey, receive)
        except Refusal as refusal:
            journey.status, journey.outcome = refusal.status, "refused"
            await refuse(send, refusal, journey.request_id)
        except ClientGone:
            journey.outcome = "disconnect"
        finally:
            metrics.IN_FLIGHT.dec()
            self._finish(journey)

    async def _travel(self, journey: Journey, receive: Receive) -> None:
        headers = journey.scope["headers"]
        body = await read_body(headers, receive, self._max_body_bytes)
        scanned = scan(body, header(headers, b"x-session-id"))
        check_model(self._fleet, scanned.model)
        journey.pool = pool_id(scanned.model)
        departure = Departure(receive)
        try:
            await self._try_workers(journey, scanned, body, departure)
        except asyncio.CancelledError:
            if not departure.left:
                raise
            departure.forgive()
            journey.outcome = "disconnect"
        finally:
            departure.over()

    async def _try_workers(self, journey: Journey, scanned: Scan, body: bytes, departure: Departure) -> None:
        """Sends the request until a worker begins to answer; nothing is sent again after that."""
        while len(journey.tried) < self._attempts:
            choice = await self._place(journey, scanned)
            try:
                await self._exchange(journey, choice, body, departure)
            except (ConnectFailed, ResetEarly, ValueError) as error:
                _log.warning("request %s: worker %s: %s", journey.request_id, choice.worker_id, error)
                metrics.RETRIES.inc()
                journey.tried.append(choice.worker_id)
                self._registry.doubt(choice.worker_id)
            else:
                return
        raise nobody(scanned.model, journey.tried)

    async def _place(self, journey: Journey, scanned: Scan) -> Choice:
        asked = self._clock.monotonic()
        answer = None
        if self._fleet.routed(scanned.model) and not self._router.away:
            answer = await self._router.place(_place_request(journey, scanned))
        choice = choose(self._fleet, scanned, journey.placement_id, journey.tried, answer)
        metrics.PLACEMENT_S.observe(self._clock.monotonic() - asked)
        metrics.PLACED.labels(choice.by).inc()
        journey.worker_id = choice.worker_id
        self._telegraph.tell(
            RequestStarted(
                pool=journey.pool,
                request_id=journey.request_id,
                worker_id=choice.worker_id,
                program_id=scanned.program_id,
                placed_by=choice.by,
                at=self._clock.now(),
                placement_id=journey.placement_id,
            )
        )
        return choice

    async def _exchange(self, journey: Journey, choice: Choice, body: bytes, departure: Departure) -> None:
        where = origin(choice.url)
        request = request_head(journey.scope, where, journey.request_id, len(body))
        connection, head = await self._answered(where, request, body)
        try:
            await self._relay(journey, connection, head, departure)
        finally:
            self._upstreams.give_back(where, connection)

    async def _answered(self, where: Origin, request: bytes, body: bytes) -> tuple[Connection, Head]:
        """A connection on which the worker began to answer. One that the worker closed while it was idle is replaced."""
        connection = await self._upstreams.take(where)
        while True:
            warm = connection.exchanges > 0
            try:
                connection.send(request, body)
                return connection, await connection.head()
            except ResetEarly:
                if not warm or connection.failed:
                    raise
            except asyncio.CancelledError:
                connection.abort()
                raise
            connection = await self._upstreams.connect(where)

    async def _relay(
        self, journey: Journey, connection: Connection, head: Head, departure: Departure
    ) -> None:
        journey.status = head.status
        journey.first_byte_s = self._clock.monotonic() - journey.began
        headers = response_headers(head, journey.request_id)
        await journey.send({"type": "http.response.start", "status": head.status, "headers": headers})
        whole_event = True
        try:
            while (chunk := await connection.chunk()) is not None:
                if connection.done:
                    await self._end(journey, head, departure, chunk)
                    return
                await journey.send({"type": "http.response.body", "body": chunk, "more_body": True})
                whole_event = chunk.endswith((b"\n\n", b"\r\n\r\n"))
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

    def _finish(self, journey: Journey) -> None:
        total_s = self._clock.monotonic() - journey.began
        metrics.REQUESTS.labels(journey.pool, str(journey.status), journey.outcome).inc()
        metrics.TOTAL_S.observe(total_s)
        if journey.first_byte_s is not None:
            metrics.FIRST_BYTE_S.observe(journey.first_byte_s)
        if journey.pool == _NO_POOL:
            return  # refused before it was known whose request it is: no pool's traffic
        self._telegraph.tell(
            RequestFinished(
                pool=journey.pool,
                request_id=journey.request_id,
                worker_id=journey.worker_id,
                status=journey.status,
                outcome=_TOLD[journey.outcome],
                first_byte_s=journey.first_byte_s,
                total_s=total_s,
                at=self._clock.now(),
                placement_id=journey.placement_id,
            )
        )


def _outcome(status: int) -> Outcome:
    """How an answer of a worker counts that came whole."""
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "error"


def _place_request(journey: Journey, scanned: Scan) -> PlaceRequest:
    return PlaceRequest(
        pool=journey.pool,
        request_id=journey.request_id,
        program_id=scanned.program_id,
        prompt_chars=scanned.prompt_chars,
        prompt_tokens_estimate=scanned.prompt_tokens_estimate,
        max_tokens=scanned.max_tokens,
        stream=scanned.stream,
        exclude=tuple(journey.tried),
        placement_id=journey.placement_id,
    )
