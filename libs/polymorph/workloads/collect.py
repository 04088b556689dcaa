"""Asks a worker for inputs of a slot, and keeps them as a Workload that expires."""

import asyncio
import base64
import datetime as dt
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.port import Bus
from polymorph.events.requests import CAPTURE, CaptureInputs, CapturePart, CaptureRefused, CaptureTold
from polymorph.events.state import CapturedWorkload
from polymorph.kernels.buckets import bucket
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.schema import CapturedFile, Workload, WorkloadExtension
from polymorph.workloads import shelf
from polymorph.workloads.tensors import NoTensors, places

_FIRST_S = 15.0
_NEXT_S = 15.0

Heard = Callable[[CaptureTold, int], None]
"""What was told, and how many of its parts are here."""


class NotCaptured(RuntimeError):
    """The worker gave no inputs; the text says why."""


@dataclass
class _Files:
    """The bytes of each call, as their parts come in."""

    told: CaptureTold
    parts: int = 0
    data: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = [bytearray() for _ in self.told.calls]

    def take(self, part: CapturePart) -> None:
        if part.call >= len(self.data):
            raise NotCaptured(f"a part of call {part.call} of {len(self.data)}")
        try:
            self.data[part.call] += base64.b64decode(part.content, validate=True)
        except ValueError as error:
            raise NotCaptured(f"a part of call {part.call} is no base64") from error
        self.parts += 1

    def checked(self) -> list[tuple[int, bytes]]:
        """M and content of each call.

        Raises:
            NotCaptured: something is missing, or other than was told.
        """
        for call, data in zip(self.told.calls, self.data, strict=True):
            if hashlib.sha256(data).hexdigest() != call.sha256:
                raise NotCaptured(
                    f"{len(data)} bytes of a call of {call.size} bytes came, or they are others"
                )
        return [(call.m, bytes(data)) for call, data in zip(self.told.calls, self.data, strict=True)]


async def captured(
    bus: Bus, request: CaptureInputs, pool: str, now: dt.datetime, *, heard: Heard | None = None
) -> tuple[CapturedWorkload, Workload]:
    """Captures, and uploads each call's inputs with the Workload that names them, where who measures finds them.

    Raises:
        NotCaptured: the worker refused, nothing was called meanwhile, or not all came.
        Unavailable: no worker answers.
    """
    async with bus.converse(request, first_s=request.seconds + _FIRST_S) as answers:
        files = await _received(answers, heard or _unheard)
    told, calls = files.told, files.checked()
    if not calls:
        raise NotCaptured(
            f"no call of {request.definition} with M from {request.min_m} to {request.max_m} in {request.seconds} s"
        )
    stored = [(m, data, await bus.put_object(data, store=topology.CAPTURES)) for m, data in calls]
    workload = _workload(request, told, stored, now)
    entry = CapturedWorkload(
        pool=pool,
        definition=request.definition,
        workload=await bus.put_object(workload.canonical(), store=topology.CAPTURES),
        worker_id=request.worker_id,
        model=told.model,
        m=tuple(m for m, _, _ in stored),
        signature=workload.x_polymorph.signature,
        size=sum(len(data) for _, data, _ in stored),
        weight=told.weight,
        experts=told.experts,
        captured_at=now,
        expires_at=now + dt.timedelta(seconds=topology.CAPTURES_AGE_S),
    )
    await shelf.put(bus, entry)
    return entry, workload


def _unheard(told: CaptureTold, parts: int) -> None:
    del told, parts


async def _received(answers: AsyncIterator[bytes], heard: Heard) -> _Files:
    files: _Files | None = None
    async for raw in _in_time(answers):
        try:
            answer = CAPTURE.validate_json(raw)
        except ValidationError as error:
            raise NotCaptured(f"the worker's answer is none: {error.errors()[0]['msg']}") from error
        if isinstance(answer, CaptureRefused):
            raise NotCaptured(answer.reason)
        if isinstance(answer, CaptureTold):
            files = _Files(answer)
        elif files is None:
            raise NotCaptured("a part came before what it is of")
        else:
            files.take(answer)
        if files is not None:
            heard(files.told, files.parts)
            if files.parts == files.told.parts:
                return files
    raise NotCaptured("the worker ended before all parts came")


async def _in_time(answers: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Ends where the next answer is overdue."""
    while True:
        try:
            async with asyncio.timeout(_NEXT_S):
                answer = await anext(answers)
        except (TimeoutError, StopAsyncIteration):
            return
        yield answer


def _workload(
    request: CaptureInputs, told: CaptureTold, stored: list[tuple[int, bytes, str]], now: dt.datetime
) -> Workload:
    """The call of the largest M is the Workload's own; all of them stand in `captures`."""
    definition = definition_named(request.definition)
    largest, data, digest = max(stored, key=lambda each: each[0])
    inputs: dict[str, dict[str, Any]] = {
        name: {"type": "safetensors", "path": digest, "tensor_key": name}
        for name in sorted(_tensors(data))
        if name in definition.inputs
    }
    weights = {name: {"type": "random"} for name in definition.x_polymorph.packed_inputs}
    expires = now + dt.timedelta(seconds=topology.CAPTURES_AGE_S)
    extension = WorkloadExtension(
        weight=told.weight,
        signature=",".join(str(m) for m in sorted({bucket(m) for m, _, _ in stored})),
        captured_at=now.isoformat(),
        expires_at=expires.isoformat(),
        source_position=request.worker_id,
        privacy="captured",
        expert_histogram=told.experts,
        captures=tuple(CapturedFile(m=m, path=each) for m, _, each in stored),
    )
    return Workload(uuid=digest[:32], axes={"M": largest}, inputs=inputs | weights, x_polymorph=extension)


def _tensors(content: bytes) -> list[str]:
    """Names of the tensors of a file.

    Raises:
        NotCaptured: it is no safetensors file.
    """
    try:
        return list(places(content))
    except NoTensors as error:
        raise NotCaptured(f"what the worker sent cannot be read: {error}") from error
