"""A change of kernels in vLLM on a GPU: its graphs are captured anew behind a drain, all of them or none.

vLLM captures in the thread that steps the model, so nothing runs meanwhile: the scheduler is paused with its requests
and caches, under a lease. The old graphs stay until the new ones are there, where memory allows it.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polymorph.engine.gpu.captured import CaptureFailed
from polymorph.engine.gpu.slots import SlotTable, Table

_log = logging.getLogger(__name__)

Documents = Sequence[Mapping[str, Any]]


class RecaptureRefused(RuntimeError):
    """This engine's graphs cannot be captured anew; nothing was touched."""


class RunnerGraphs(Protocol):
    """All that holds captured graphs in one worker process."""

    def refusal(self) -> str | None:
        """Why this worker's graphs cannot be replaced; None where they can."""

    def fits(self) -> bool:
        """Whether a second set has room beside the first."""

    def take(self) -> Any:
        """Takes the graphs out, and leaves empty places with a new pool."""

    def put(self, held: Any) -> None:
        """The reverse of `take`."""

    def capture(self) -> None:
        """Captures what is missing."""

    def abort(self) -> None:
        """Ends what a failed capture left open."""

    def settle(self) -> None:
        """Waits for the device. Raises RuntimeError where it answers no more."""

    def release(self) -> None:
        """Gives memory of what nobody holds any more back to the driver."""


@dataclass(frozen=True)
class Recaptured:
    """What a change did. `way` is beside or drained; `inverse` is the table that served before."""

    way: str
    seconds: float
    inverse: Table


def recapture(graphs: RunnerGraphs, slots: SlotTable, table: Table) -> Recaptured:
    """Captures all graphs under `table`, between two steps of a paused engine; its kernels are compiled already.

    Raises:
        RecaptureRefused: this worker cannot.
        CaptureFailed: the old table serves on, with its graphs.
        RuntimeError: the device is lost, or the old graphs could not be captured again: restart the engine.
    """
    reason = graphs.refusal()
    if reason is not None:
        raise RecaptureRefused(reason)
    began = time.monotonic()
    graphs.settle()
    way = "beside" if graphs.fits() else "drained"
    held = graphs.take()
    if way == "drained":
        held = None
        graphs.release()
    try:
        with slots.using(table):
            graphs.capture()
        graphs.settle()
    except Exception as error:  # whatever a kernel's launch raises, the old table is to serve on
        graphs.abort()
        _put_back(graphs, held)
        raise CaptureFailed(f"{type(error).__name__}: {error}") from error
    before = slots.engage(table)
    held = None
    graphs.release()
    return Recaptured(way, time.monotonic() - began, before)


def _put_back(graphs: RunnerGraphs, held: Any) -> None:
    graphs.settle()
    graphs.take()  # the half of a set that was captured
    if held is not None:
        graphs.put(held)
    graphs.release()
    if held is None:
        graphs.capture()


class PausableEngine(Protocol):
    """An engine of one rank or several. `pause` keeps requests and caches, and returns when the device stands."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def call(self, method: str, **keywords: Any) -> list[dict[str, Any]]:
        """Calls the worker extension on every rank."""


async def behind_drain(
    engine: PausableEngine, documents: Documents, before: Documents, *, lease_s: float = 60.0
) -> list[dict[str, Any]]:
    """Engages `documents` on all ranks or on none; `before` is what they run now. Loading, self-test and compilation
    come before the pause. The pause ends when it is done, whatever the outcome, and at the latest after `lease_s`.

    Raises:
        RecaptureRefused: a rank is not ready, or failed; all of them run `before`.
        TimeoutError: the lease ended first. What runs is unknown: read it back.
    """
    _raise_for(await engine.call("gpu_prepare", documents=list(documents)))
    try:
        await engine.pause()
        async with asyncio.timeout(lease_s):
            answers = await engine.call("gpu_engage", documents=list(documents))
            if not all(answer["ok"] for answer in answers):
                await engine.call("gpu_engage", documents=list(before))
                _raise_for(answers)
            return answers
    finally:
        await asyncio.shield(engine.resume())


def _raise_for(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        if not answer["ok"]:
            _log.error("rank %d refuses the kernels: %s", rank, answer["reason"])
            raise RecaptureRefused(f"rank {rank}: {answer['reason']}")
