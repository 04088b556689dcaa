"""What a worker tells of the revisions that it was asked to run."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from polymorph.bus.errors import BusError, Poison
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.engine.loading.admission import told_name, told_reason
from polymorph.events.types import WorkerLoaded, WorkerRefused
from polymorph.worker.changing import Receipt
from polymorph.worker.loading import InForce

_log = logging.getLogger(__name__)
_AGAIN_S = 2.0
_REMEMBERED = 1000


class Reports:
    """Tells as long as it takes; each refusal once."""

    def __init__(self, pool: str, worker_id: str, clock: Clock) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._clock = clock
        self._told_refusals: deque[tuple[int, str, str]] = deque(maxlen=_REMEMBERED)

    async def loaded(self, bus: Bus, generation: int, loaded: InForce, load_s: float) -> None:
        _log.info(
            "generation %d: runs %s with %d kernels, %d calls served, engine stood still for %.3f s of %.1f s",
            generation,
            loaded.revision.revision,
            len(loaded.bindings),
            loaded.served_calls,
            loaded.paused_s,
            load_s,
        )
        await _until_told(
            lambda: bus.publish(
                WorkerLoaded(
                    pool=self._pool,
                    worker_id=self._worker_id,
                    generation=generation,
                    revision=loaded.revision.revision,
                    kernels=tuple(binding.artifact for binding in loaded.bindings),
                    served_calls=loaded.served_calls,
                    served=dict(loaded.served),
                    load_s=load_s,
                    paused_s=loaded.paused_s,
                    **_told(loaded.receipt),
                )
            ),
            self._clock,
        )

    async def refused(self, bus: Bus, generation: int, revision: str, reason: str) -> None:
        revision, reason = told_name(revision), told_reason(reason)
        if (generation, revision, reason) in self._told_refusals:
            return
        _log.error("refused %s of generation %d: %s", revision, generation, reason)
        await _until_told(
            lambda: bus.publish(
                WorkerRefused(
                    pool=self._pool,
                    worker_id=self._worker_id,
                    generation=generation,
                    revision=revision,
                    reason=reason,
                )
            ),
            self._clock,
        )
        self._told_refusals.append((generation, revision, reason))


def _told(receipt: Receipt | None) -> dict[str, Any]:
    if receipt is None:
        return {}
    return {"settings": receipt.settings, "way": receipt.way, "stood_s": receipt.stood_s}


async def _until_told(publish: Callable[[], Awaitable[int]], clock: Clock) -> None:
    """The fact stands whether or not the bus is there: tell it when it is back. Ids are deterministic: once.

    What the bus will never take is told in the log alone: nothing else of this worker waits for it.
    """
    while True:
        try:
            await publish()
        except Poison as error:
            _log.error("this cannot be told: %s", error)
            return
        except BusError as error:
            _log.info("not told yet: %s", error)
            await clock.sleep(_AGAIN_S)
        else:
            return
