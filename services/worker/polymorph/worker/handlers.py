"""What others ask of a worker: the host for a burst, slots switched for a measurement, and what a change would be."""

import logging
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from polymorph.bus.errors import BusError
from polymorph.engine.loading.admission import Refused
from polymorph.events.requests import (
    CaptureInputs,
    CaptureRefused,
    ControlAnswer,
    ControlSlots,
    LeaseAnswer,
    LeaseHost,
    PlanAnswer,
    PlanChange,
)
from polymorph.events.values import Revision
from polymorph.worker.capturing import Capturing, reply_all
from polymorph.worker.convergence import Convergence
from polymorph.worker.leasing import HostLeasing

_log = logging.getLogger(__name__)
Reply = Callable[[bytes], Awaitable[None]]


class Asked:
    """Decodes, does and answers; what cannot be decoded is answered too, so that nobody waits for a timeout."""

    def __init__(self, leasing: HostLeasing, convergence: Convergence, capturing: Capturing) -> None:
        self._leasing = leasing
        self._convergence = convergence
        self._capturing = capturing

    async def lease(self, body: bytes, reply: Reply) -> None:
        try:
            request = LeaseHost.model_validate_json(body)
        except ValidationError as error:
            _log.warning("a lease request that is none: %s", error)
            answer = LeaseAnswer(granted=False, reason="not a LeaseHost; bursts are 0.3 s at most")
        else:
            answer = await self._leasing.ask(request)
        await reply(answer.model_dump_json().encode())

    async def control(self, body: bytes, reply: Reply) -> None:
        try:
            request = ControlSlots.model_validate_json(body)
            served = await self._convergence.switch(empty=request.revision == "empty", ttl_s=request.ttl_s)
        except ValidationError as error:
            _log.warning("a control request that is none: %s", error)
            answer = ControlAnswer(ok=False, reason="not a ControlSlots")
        except (Refused, BusError) as refusal:
            answer = ControlAnswer(ok=False, reason=str(refusal))
        else:
            answer = ControlAnswer(ok=True, served_calls=served)
        await reply(answer.model_dump_json().encode())

    async def plan(self, body: bytes, reply: Reply) -> None:
        try:
            answer = await self._planned(PlanChange.model_validate_json(body).revision)
        except ValidationError as error:
            _log.warning("a plan request that is none: %s", error)
            answer = PlanAnswer(ok=False, reason=f"not a PlanChange: {error.errors()[0]['msg']}")
        except (Refused, BusError) as refusal:
            answer = PlanAnswer(ok=False, reason=str(refusal))
        await reply(answer.model_dump_json().encode())

    async def _planned(self, revision: Revision) -> PlanAnswer:
        plan = await self._convergence.plan(revision)
        return PlanAnswer(
            ok=True,
            way=plan.way,
            why=plan.why,
            changes=tuple(change.told() for change in plan.changes),
            kernels=revision.kernels != self._convergence.revision.kernels,
            pause=plan.pause,
            recapture=plan.recapture,
            cache_reset=plan.cache_reset,
            inverse=plan.inverse,
            inverse_slots=plan.inverse_slots,
            generation=max(0, plan.generation),
        )

    async def capture(self, body: bytes, reply: Reply) -> None:
        try:
            request = CaptureInputs.model_validate_json(body)
        except ValidationError as error:
            _log.warning("a capture request that is none: %s", error)
            refusal = CaptureRefused(reason="not a CaptureInputs: at most 64 calls, 60 s and 64 MiB")
            await reply(refusal.model_dump_json().encode())
        else:
            await reply_all(self._capturing, request, reply)
