"""What `polymorph capture take` asks a worker for, and what came of it."""

import asyncio
import datetime as dt
import sys
from dataclasses import dataclass
from typing import Any

from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus
from polymorph.events.requests import CaptureInputs, CaptureTold
from polymorph.events.state import CapturedWorkload, WorkerRecord
from polymorph.kernels.definitions import SLOTS, slot_of
from polymorph.workloads.collect import NotCaptured, captured

_TOLD_EVERY_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """What came of asking one worker for one definition; `reason` where nothing was captured."""

    worker: str
    definition: str
    captured: CapturedWorkload | None = None
    reason: str = ""

    def lines(self) -> list[str]:
        """For people."""
        if self.captured is None:
            return [f"{self.worker}: {self.definition}: nothing captured: {self.reason}"]
        return [f"{self.worker}: {told(self.captured)}"]

    def document(self) -> dict[str, Any]:
        if self.captured is None:
            return {"worker_id": self.worker, "definition": self.definition, "reason": self.reason}
        return self.captured.model_dump(mode="json")


def told(captured: CapturedWorkload) -> str:
    """Lines for people about one workload."""
    experts = ""
    if captured.experts:
        experts = f"\n  experts, the busiest first: {', '.join(f'{share:.0%}' for share in captured.experts)}"
    return (
        f"{captured.definition}: {len(captured.m)} calls with M of {', '.join(map(str, sorted(set(captured.m))))}, "
        f"{captured.size / 1024:,.0f} KiB\n"
        f"  weight {captured.weight:.3f} (share of the operation's time), shape signature {captured.signature}{experts}\n"
        f"  workload {captured.workload}\n"
        f"  of pool {captured.pool}, in store captures until {captured.expires_at:%Y-%m-%d %H:%M} UTC"
    )


def definitions(what: str, record: WorkerRecord) -> tuple[str, ...]:
    """What of a worker's definitions is meant.

    Raises:
        NotCaptured: it has none of that; the text says what it has.
    """
    found = tuple(name for name in record.slots if what in {name, _slot(name)})
    if found:
        return found
    slot = what if what in SLOTS else slot_of(what)
    off = (
        f"slot {slot} is off: {record.missing[slot]}"
        if slot in record.missing
        else (f"its settings leave slot {slot} out (POLYMORPH_WORKER_SLOTS), or its model does not call that")
    )
    held = ", ".join(record.slots) or "none, as its engine was started without slots or is starting"
    raise NotCaptured(f"this worker has no slot for it: {off}; it has {held}")


def _slot(definition: str) -> str | None:
    try:
        return slot_of(definition)
    except ValueError:
        return None


async def ask(bus: Bus, record: WorkerRecord, wanted: CaptureInputs) -> list[Outcome]:
    """Asks one worker for all that is meant, one definition after the other: it captures one at a time."""
    worker = record.worker_id
    try:
        names = definitions(wanted.definition, record)
    except NotCaptured as error:
        return [Outcome(worker, wanted.definition, reason=str(error))]
    return [
        await _outcome(bus, record, wanted.model_copy(update={"worker_id": worker, "definition": name}))
        for name in names
    ]


async def _outcome(bus: Bus, record: WorkerRecord, request: CaptureInputs) -> Outcome:
    worker, name = request.worker_id, request.definition
    progress = _Progress(f"{worker}: {name}", request.seconds)
    listening = asyncio.create_task(progress.listen())
    try:
        entry, _ = await captured(bus, request, record.pool, dt.datetime.now(dt.UTC), heard=progress.heard)
    except NotCaptured as error:
        return Outcome(worker, name, reason=str(error))
    except BusError as error:
        again = f"no answer ({error}): the worker is {record.state}, ask again while it is ready"
        return Outcome(worker, name, reason=again)
    finally:
        listening.cancel()
    return Outcome(worker, name, entry)


class _Progress:
    """Says on standard error how far a capture is."""

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._told = False

    async def listen(self) -> None:
        self._say(f"listening for {self._seconds:g} s")
        passed = 0.0
        while passed + _TOLD_EVERY_S < self._seconds:
            await asyncio.sleep(_TOLD_EVERY_S)
            passed += _TOLD_EVERY_S
            self._say(f"{passed:g} of {self._seconds:g} s")

    def heard(self, told: CaptureTold, parts: int) -> None:
        if not self._told:
            self._told = True
            size = sum(call.size for call in told.calls) / 1024
            self._say(f"{len(told.calls)} calls came, {size:,.0f} KiB in {told.parts} parts")
        elif parts == told.parts or parts % 16 == 0:
            self._say(f"{parts} of {told.parts} parts are here")

    def _say(self, text: str) -> None:
        print(f"{self._what}: {text}", file=sys.stderr, flush=True)
