"""Asks the router where a request shall run."""

import asyncio
import logging
from collections.abc import AsyncIterator

from pydantic import ValidationError

from polymorph.bus.errors import BusError
from polymorph.events.requests import PLACEMENT, Held, Placed, PlaceRequest, Unplaceable
from polymorph.gateway.adapters import metrics
from polymorph.gateway.adapters.link import Link
from polymorph.gateway.domain.circuit import Circuit

_log = logging.getLogger(__name__)
_MISSED_BEATS = 3.0
_PROBE = PlaceRequest(pool="router-probe", request_id="router-probe")
_PROBE_TIMEOUT_S = 1.0


class RouterClient:
    """Patient with a router that holds a request, quick to give up on one that is away."""

    def __init__(self, link: Link, *, first_answer_s: float, probe_s: float) -> None:
        self._link = link
        self._first_answer_s = first_answer_s
        self._probe_s = probe_s
        self._circuit = Circuit()
        self._probing: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        return self._link.bus is None or self._circuit.open

    async def place(self, request: PlaceRequest) -> Placed | Unplaceable | None:
        """The router's last word; None where it is away."""
        bus = self._link.bus
        if bus is None or self._circuit.open:
            return None
        try:
            async with bus.converse(request, first_s=self._first_answer_s) as answers:
                return await _last_word(answers)
        except (BusError, TimeoutError, StopAsyncIteration, ValidationError) as error:
            self._give_up(error)
            return None

    def _give_up(self, error: BaseException) -> None:
        if self._circuit.trip():
            _log.warning("the router is away, placing without it: %s", error or type(error).__name__)
            metrics.ROUTER_AWAY.set(1)
            self._probing = asyncio.create_task(self._probe_until_back())

    async def _probe_until_back(self) -> None:
        while self._circuit.open:
            await asyncio.sleep(self._probe_s)
            bus = self._link.bus
            if bus is None:
                continue
            try:
                await bus.request(_PROBE, timeout_s=_PROBE_TIMEOUT_S)
            except BusError:
                continue
            self._circuit.close()
            metrics.ROUTER_AWAY.set(0)
            _log.info("the router is back")

    async def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)


async def _last_word(answers: AsyncIterator[bytes]) -> Placed | Unplaceable:
    """Waits through holds for as long as heartbeats come and the deadline has not passed."""
    answer = PLACEMENT.validate_json(await anext(answers))
    while isinstance(answer, Held):
        patience = min(answer.heartbeat_s * _MISSED_BEATS, answer.deadline_s + answer.heartbeat_s)
        async with asyncio.timeout(patience):
            answer = PLACEMENT.validate_json(await anext(answers))
    return answer
