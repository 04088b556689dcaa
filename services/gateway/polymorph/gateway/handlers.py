"""One request from its first byte to its last."""

import asyncio
import logging
import uuid

from polymorph.config.clock import Clock
from polymorph.events.requests import PlaceRequest
from polymorph.events.subjects import pool_id
from polymorph.events.types import RequestFinished, RequestStarted
from polymorph.gateway.adapters import metrics
from polymorph.gateway.adapters.connection import ConnectFailed, Connection, Head, ResetEarly, SentBack
from polymorph.gateway.adapters.forwarding import request_head, sends_elsewhere
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
from polymorph.gateway.domain.refusal import Refusal
from polymorph.gateway.domain.request_id import request_id as valid_id
from polymorph.gateway.domain.scan import Scan, scan
from polymorph.gateway.journey import NO_POOL, TOLD, Journey
from polymorph.gateway.relaying import Relay

_log = logging.getLogger(__name__)


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
        self._relay = Relay(registry, clock)

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
        """Sends the request until a worker gives a byte of an answer; nothing is sent again after that.

        Where all that are left restart their engines, the request waits in one of them.
        """
        holder: Choice | None = None
        while len(journey.tried) < self._attempts:
            try:
                choice = await self._place(journey, scanned)
            except Refusal:
                if holder is None:
                    raise
                break
            outcome = await self._try(
                journey, choice, body, departure, others=self._others(journey, choice, scanned)
            )
            if outcome is None:
                return
            holder = choice if isinstance(outcome, SentBack) else holder
        if holder is not None and await self._hold(journey, scanned, holder, body, departure):
            return
        raise nobody(scanned.model, journey.tried)

    async def _try(
        self, journey: Journey, choice: Choice, body: bytes, departure: Departure, *, others: bool
    ) -> Exception | None:
        """None where the worker answered; else why not."""
        try:
            await self._exchange(journey, choice, body, departure, others=others)
        except (ConnectFailed, ResetEarly, SentBack, ValueError) as error:
            _log.warning("request %s: worker %s: %s", journey.request_id, choice.worker_id, error)
            metrics.RETRIES.inc()
            journey.tried.append(choice.worker_id)
            self._registry.doubt(choice.worker_id)
            return error
        return None

    def _others(self, journey: Journey, choice: Choice, scanned: Scan) -> bool:
        """Whether the request could be tried once more, by somebody else."""
        tried = [*journey.tried, choice.worker_id]
        return len(tried) < self._attempts and bool(self._fleet.live(scanned.model, exclude=tried))

    async def _hold(
        self, journey: Journey, scanned: Scan, holder: Choice, body: bytes, departure: Departure
    ) -> bool:
        metrics.HELD.inc()
        self._chosen(journey, scanned, holder)
        return await self._try(journey, holder, body, departure, others=False) is None

    async def _place(self, journey: Journey, scanned: Scan) -> Choice:
        asked = self._clock.monotonic()
        answer = None
        if self._fleet.routed(scanned.model) and not self._router.away:
            answer = await self._router.place(_place_request(journey, scanned))
        choice = choose(self._fleet, scanned, journey.placement_id, journey.tried, answer)
        metrics.PLACEMENT_S.observe(self._clock.monotonic() - asked)
        metrics.PLACED.labels(choice.by).inc()
        self._chosen(journey, scanned, choice)
        return choice

    def _chosen(self, journey: Journey, scanned: Scan, choice: Choice) -> None:
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

    async def _exchange(
        self, journey: Journey, choice: Choice, body: bytes, departure: Departure, *, others: bool
    ) -> None:
        where = origin(choice.url)
        request = request_head(journey.scope, where, journey.request_id, len(body), others=others)
        connection, head = await self._answered(where, request, body)
        try:
            if others and sends_elsewhere(head):
                raise SentBack("it restarts its engine")
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

    def _finish(self, journey: Journey) -> None:
        total_s = self._clock.monotonic() - journey.began
        metrics.REQUESTS.labels(journey.pool, str(journey.status), journey.outcome).inc()
        metrics.TOTAL_S.observe(total_s)
        if journey.first_byte_s is not None:
            metrics.FIRST_BYTE_S.observe(journey.first_byte_s)
        if journey.pool == NO_POOL:
            return  # refused before it was known whose request it is: no pool's traffic
        self._telegraph.tell(
            RequestFinished(
                pool=journey.pool,
                request_id=journey.request_id,
                worker_id=journey.worker_id,
                status=journey.status,
                outcome=TOLD[journey.outcome],
                first_byte_s=journey.first_byte_s,
                total_s=total_s,
                at=self._clock.now(),
                placement_id=journey.placement_id,
            )
        )


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
