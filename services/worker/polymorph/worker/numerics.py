"""What a change of numerics asks of the requests that run, and of the cache that they wrote."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakKeyDictionary, WeakSet

from polymorph.events.state import Reordered
from polymorph.events.values import Revision
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.changing import Changes
from polymorph.worker.domain.numerics import identity, waits_for
from polymorph.worker.waiting import Waiting

_log = logging.getLogger(__name__)

TakeBack = Callable[[], Awaitable[None]]


class Salts:
    """No request reads prefix cache that was written under other numerics. Stock engines are never salted."""

    def __init__(self) -> None:
        self._salts: WeakKeyDictionary[Engine, str | None] = WeakKeyDictionary()
        self._unsure: WeakSet[Engine] = WeakSet()

    async def salt(self, engine: Engine, revision: Revision) -> None:
        salt = identity(revision)
        if engine in self._unsure or salt != self._salts.get(engine):
            self._unsure.add(engine)  # a call that fails or is cut off may have been carried out
            await engine.scheduler.salt(salt)
            self._salts[engine] = salt
            self._unsure.discard(engine)


@contextlib.asynccontextmanager
async def settled_for(
    changes: Changes,
    now: Revision,
    goal: Revision,
    reordered: Reordered,
    waiting: Waiting,
    take_back: TakeBack,
) -> AsyncIterator[None]:
    """Where the change of numerics asks for it, inside no request runs; a change that fails is taken back inside."""
    reason = waits_for(now, goal, reordered)
    if reason is None:
        yield
        return
    _log.info("%s waits until no request runs: %s", goal.revision, reason)
    async with changes.settled(waiting):
        try:
            yield
        except BaseException:
            # Cut off too: newcomers come when this block ends. What cannot be taken back now, convergence takes back.
            try:
                await asyncio.shield(asyncio.ensure_future(take_back()))
            except Exception as error:  # noqa: BLE001 - what ended the change is told, a cancellation above all
                _log.error("%s is not taken back yet: %s: %s", goal.revision, type(error).__name__, error)
            raise
