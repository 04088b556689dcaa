"""The host's cores, asked of the workers that live on it, burst by burst."""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from polymorph.bus import topology
from polymorph.bus.errors import BusError
from polymorph.bus.port import Bus
from polymorph.evaluator.adapters import metrics
from polymorph.evaluator.gates.host import HostBusy
from polymorph.events.requests import LeaseAnswer, LeaseHost
from polymorph.events.state import WorkerRecord

_log = logging.getLogger(__name__)
_BURST_S = LeaseHost.MAX_BURST_S
_GUARD_S = 0.02  # a batch ends this much before its burst does
_BACK_OFF_S = 0.25
_ANSWER_S = 8.0  # a worker answers between two steps, and a long prefill is one step
_NOBODY_S = 1.0
_LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
T = TypeVar("T")


class HostLease:
    """Called from the thread that evaluates; asks on the service's loop."""

    def __init__(self, bus: Bus, loop: asyncio.AbstractEventLoop, workers: str, wait_s: float) -> None:
        self._bus, self._loop, self._wanted, self._wait_s = bus, loop, workers, wait_s
        self._lease_id = uuid.uuid4().hex[:16]
        self._until = 0.0
        self._held: list[str] = []
        self.stolen_s = 0.0
        self.bursts = 0

    def ensure(self, seconds: float) -> None:
        """Goes on in the burst that runs where `seconds` are left in it, else asks for the next."""
        needed = min(seconds, _BURST_S - _GUARD_S - 0.05)
        if self._until - time.monotonic() >= needed:
            return
        self.release()
        give_up = time.monotonic() + self._wait_s
        while not self._on_loop(self._acquire()):
            if time.monotonic() > give_up:
                raise HostBusy(f"the workers on this host gave no burst within {self._wait_s:.0f} s")
            time.sleep(_BACK_OFF_S)
        self.bursts += 1

    def release(self) -> None:
        self._until = 0.0
        if self._held:
            self._on_loop(self._release())

    async def _acquire(self) -> bool:
        workers = await workers_here(self._bus, self._wanted)
        began = time.monotonic()
        answers = await asyncio.gather(*(self._ask(worker, release=False) for worker in workers))
        refused = [answer.reason for answer in answers if answer is not None and not answer.granted]
        self._held = [
            worker
            for worker, answer in zip(workers, answers, strict=True)
            if answer is not None and answer.granted
        ]
        if refused:
            _log.info("no burst yet: %s", refused[0])
            await self._release()
            return False
        # A worker counts from when it was asked; one that waited before it granted only makes the burst safer.
        asked = time.monotonic() if not workers else began
        granted_late = time.monotonic() - began > _BURST_S / 2
        self._until = (time.monotonic() - 0.1 if granted_late else asked) + _BURST_S - _GUARD_S
        return True

    async def _release(self) -> None:
        answers = await asyncio.gather(*(self._ask(worker, release=True) for worker in self._held))
        self._held = []
        paused_s = sum(answer.paused_s for answer in answers if answer is not None)
        self.stolen_s += paused_s
        metrics.STOLEN_S.inc(max(0.0, paused_s))

    async def _ask(self, worker: str, *, release: bool) -> LeaseAnswer | None:
        """None where the worker is away and uses no core. One that lives but is silent is busy: no burst."""
        request = LeaseHost(worker_id=worker, lease_id=self._lease_id, burst_s=_BURST_S, release=release)
        asked = time.monotonic()
        try:
            return LeaseAnswer.model_validate_json(await self._bus.request(request, timeout_s=_ANSWER_S))
        except (BusError, ValueError) as error:
            _log.info("worker %s did not answer a lease: %s", worker, error)
        if release or time.monotonic() - asked < _NOBODY_S:
            return None
        return LeaseAnswer(
            granted=False, reason=f"{worker} did not come between two steps in {_ANSWER_S:.0f} s"
        )

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_S * 4)


async def workers_here(bus: Bus, wanted: str) -> list[str]:
    """The live workers whose engines share this host's cores."""
    live: dict[str, WorkerRecord] = {}
    for key in await bus.kv_keys(topology.WORKERS):
        try:
            entry = await bus.kv_get(topology.WORKERS, key)
            live[key] = WorkerRecord.model_validate_json(entry.value or b"")
        except (BusError, ValueError):
            continue
    if wanted == "auto":
        local = _LOCAL | {socket.gethostname()}
        return sorted(key for key, record in live.items() if urlsplit(record.url).hostname in local)
    return sorted(worker for worker in wanted.split(",") if worker in live)
