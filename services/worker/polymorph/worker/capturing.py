"""Real inputs of a slot, kept for some seconds and sent to who asked: only where the configuration allows it."""

import asyncio
import base64
import hashlib
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from polymorph.bus.errors import BusError
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import Refused
from polymorph.engine.loading.counters import Counters
from polymorph.engine.loading.disarming import disarmed
from polymorph.events.requests import (
    CapturedCall,
    CaptureInputs,
    CapturePart,
    CaptureRefused,
    CaptureTold,
)
from polymorph.kernels.buckets import bucket
from polymorph.worker.domain.steps import histogram
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
                reason="the capture of content is off in this worker's configuration: `capture: content` in its section "
                "`worker`, or POLYMORPH_WORKER_CAPTURE=content, allows it from its next start on"
            )
            return
        if self._change.locked():
            yield CaptureRefused(reason="the worker is changing its kernels; ask again")
            return
        try:
            files, counted = await self._captured(request)
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
            weight=weight(counted.nanoseconds.get(request.definition, {}), (m for m, _ in files)),
            experts=histogram(counted.experts.get(request.definition, ())),
        )
        for index, (_, data) in enumerate(files):
            for begin in range(0, len(data), PART_BYTES):
                piece = base64.b64encode(data[begin : begin + PART_BYTES]).decode()
                yield CapturePart(call=index, content=piece)

    async def _captured(self, request: CaptureInputs) -> tuple[list[tuple[int, bytes]], Counters]:
        """M and the safetensors file of each call, and what was counted meanwhile."""
        folder = self._scratch / hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:16]
        async with self._change:
            engine = self._engines.engine
            before = await engine.counters()
            try:
                # Before the folder goes: a call that was cut off may write to it still.
                async with disarmed(engine):
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
                    calls = await engine.captured(folder)
                counted = (await engine.counters()).since(before)
                return await asyncio.to_thread(_read, calls), counted
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def weight(spent: Mapping[str, int], captured: Iterable[int]) -> float:
    """Of the time that an operation took by bucket of M, the share of those buckets that were captured; 1 where no time
    was told.
    """
    total = sum(spent.values())
    buckets = {str(bucket(m)) for m in captured}
    return sum(ns for upper, ns in spent.items() if upper in buckets) / total if total > 0 else 1.0


def _read(calls: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
    return [(int(call["m"]), Path(call["path"]).read_bytes()) for call in calls]


async def reply_all(
    capturing: Capturing, request: CaptureInputs, reply: Callable[[bytes], Awaitable[None]]
) -> None:
    """Sends every answer as it comes."""
    async for answer in capturing.answers(request):
        await reply(answer.model_dump_json().encode())
