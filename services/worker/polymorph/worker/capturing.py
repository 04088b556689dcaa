"""Real inputs of a slot, kept for some seconds and sent to who asked: only where the configuration allows it."""

import asyncio
import base64
import hashlib
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from polymorph.bus.errors import BusError
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Refused
from polymorph.events.requests import (
    CapturedCall,
    CaptureInputs,
    CapturePart,
    CaptureRefused,
    CaptureTold,
)
from polymorph.worker.seats import Engines

_log = logging.getLogger(__name__)
PART_BYTES = 384 * 1024
"""Of a file in one answer: base64 of it lies below the server's payload limit."""

Capture = Literal["off", "content"]
Answer = CaptureRefused | CaptureTold | CapturePart


class Capturing:
    """One capture at a time, and none while kernels change: a self-test captures too.

    `change` is held meanwhile; the folder with the inputs is gone before the first answer goes out.
    """

    def __init__(
        self,
        allowed: Capture,
        model: str,
        engines: Engines,
        change: asyncio.Lock,
        scratch: Path,
        clock: Clock,
    ) -> None:
        self._allowed = allowed
        self._model = model
        self._engines = engines
        self._change = change
        self._scratch = scratch
        self._clock = clock

    async def answers(self, request: CaptureInputs) -> AsyncIterator[Answer]:
        """What was captured and then its bytes, or the reason why nothing was."""
        if self._allowed != "content":
            yield CaptureRefused(
                reason="the capture of content is off in this worker's configuration: `capture: content` allows it"
            )
            return
        if self._change.locked():
            yield CaptureRefused(reason="the worker is changing its kernels; ask again")
            return
        try:
            files = await self._captured(request)
        except (Refused, BusError) as error:
            yield CaptureRefused(reason=str(error))
            return
        _log.info("captured %d calls of %s for who asked", len(files), request.definition)
        yield CaptureTold(
            model=self._model,
            definition=request.definition,
            calls=tuple(
                CapturedCall(m=m, size=len(data), sha256=hashlib.sha256(data).hexdigest())
                for m, data in files
            ),
            parts=sum(-(-len(data) // PART_BYTES) for _, data in files),
        )
        for index, (_, data) in enumerate(files):
            for begin in range(0, len(data), PART_BYTES):
                piece = base64.b64encode(data[begin : begin + PART_BYTES]).decode()
                yield CapturePart(call=index, content=piece)

    async def _captured(self, request: CaptureInputs) -> list[tuple[int, bytes]]:
        """M and the safetensors file of each call."""
        folder = self._scratch / hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:16]
        async with self._change:
            engine = self._engines.engine
            await engine.capture(
                request.definition,
                request.calls,
                request.every,
                request.min_m,
                request.max_m,
                max_mib=request.max_mib,
                ring=True,
            )
            await self._clock.sleep(request.seconds)
            try:
                calls = await engine.captured(folder)
                return await asyncio.to_thread(_read, calls)
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _read(calls: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
    return [(int(call["m"]), Path(call["path"]).read_bytes()) for call in calls]


async def reply_all(
    capturing: Capturing, request: CaptureInputs, reply: Callable[[bytes], Awaitable[None]]
) -> None:
    """Sends every answer as it comes."""
    async for answer in capturing.answers(request):
        await reply(answer.model_dump_json().encode())
