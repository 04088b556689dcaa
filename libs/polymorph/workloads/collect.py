"""Asks a worker for inputs of a slot, and keeps them as a Workload that expires."""

import base64
import datetime as dt
import hashlib
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from polymorph.bus import topology
from polymorph.bus.port import Bus
from polymorph.events.requests import CAPTURE, CaptureInputs, CapturePart, CaptureRefused, CaptureTold
from polymorph.kernels.buckets import bucket
from polymorph.kernels.definitions import definition_named
from polymorph.kernels.schema import Workload, WorkloadExtension

_MOST_HEADER = 1 << 20
_FIRST_S = 15.0


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
        self.data[part.call] += base64.b64decode(part.content)
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


async def captured(bus: Bus, request: CaptureInputs, now: dt.datetime) -> tuple[str, Workload]:
    """Captures, uploads each call's inputs and the Workload that names them; the Workload's digest in the store.

    Raises:
        NotCaptured: the worker refused, nothing was called meanwhile, or not all came.
        Unavailable: no worker answers.
    """
    async with bus.converse(request, first_s=request.seconds + _FIRST_S) as answers:
        files = (await _received(answers)).checked()
    if not files:
        raise NotCaptured(
            f"no call of {request.definition} with M from {request.min_m} to {request.max_m} in {request.seconds} s"
        )
    stored = [(m, data, await bus.put_object(data, store=topology.CAPTURES)) for m, data in files]
    workload = _workload(request, stored, now)
    return await bus.put_object(workload.canonical(), store=topology.CAPTURES), workload


async def _received(answers: AsyncIterator[bytes]) -> _Files:
    files: _Files | None = None
    async for raw in answers:
        answer = CAPTURE.validate_json(raw)
        if isinstance(answer, CaptureRefused):
            raise NotCaptured(answer.reason)
        if isinstance(answer, CaptureTold):
            files = _Files(answer)
        elif files is None:
            raise NotCaptured("a part came before what it is of")
        else:
            files.take(answer)
        if files is not None and files.parts == files.told.parts:
            return files
    raise NotCaptured("the worker ended before all parts came")


def _workload(request: CaptureInputs, stored: list[tuple[int, bytes, str]], now: dt.datetime) -> Workload:
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
    extension = WorkloadExtension.model_validate(
        {
            "weight": 1.0,
            "signature": ",".join(str(m) for m in sorted({bucket(m) for m, _, _ in stored})),
            "captured_at": now.isoformat(),
            "expires_at": expires.isoformat(),
            "source_position": request.worker_id,
            "privacy": "captured",
            "captures": [{"m": m, "path": each} for m, _, each in stored],
        }
    )
    return Workload(uuid=digest[:32], axes={"M": largest}, inputs=inputs | weights, x_polymorph=extension)


def _tensors(content: bytes) -> list[str]:
    """Names of the tensors of a safetensors file, read without torch.

    Raises:
        NotCaptured: it is none.
    """
    try:
        (length,) = struct.unpack_from("<Q", content, 0)
        header = json.loads(content[8 : 8 + min(length, _MOST_HEADER)])
    except (struct.error, ValueError) as error:
        raise NotCaptured("what the worker sent is no safetensors file") from error
    return [name for name in header if name != "__metadata__"]
