"""What the slots run, or should: the revision in service, and those before it to go back to."""

import logging
from collections.abc import Callable

from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import EMPTY
from polymorph.events.values import Revision
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.changing import Changes
from polymorph.worker.faults import Faults
from polymorph.worker.loading import InForce
from polymorph.worker.numerics import Salts
from polymorph.worker.seats import Engines
from polymorph.worker.served import AtWork, Served, kernels

_log = logging.getLogger(__name__)
NOTHING = InForce(EMPTY, (), {}, 0.0)


class InService:
    """Changed by one task at a time: the caller sees to that. `on_retreat` is called when there is another to run."""

    def __init__(
        self, engines: Engines, changes: Changes, faults: Faults, on_retreat: Callable[[], None]
    ) -> None:
        self._engines = engines
        self._changes = changes
        self._faults = faults
        self._on_retreat = on_retreat
        self._served = Served(faults)
        self.salts = Salts()
        self.loaded = NOTHING
        self.unsure = False
        """Whether the slots may run something else than `loaded`, and not by a switch."""

    @property
    def revision(self) -> Revision:
        return self.loaded.revision

    @property
    def banned(self) -> bool:
        """Whether something in it may not run here any more."""
        return self._faults.banned(kernels(self.revision))

    def tries(self, goal: Revision) -> None:
        """`goal` may be at work from now on.

        Raises:
            Refused: engines died under it.
        """
        self._faults.check(goal)
        self._served.trying = goal

    def runs(self, loaded: InForce) -> None:
        self._served.add(self.loaded)
        self.loaded = loaded
        self._engines.runs(loaded.revision.revision)
        self.unsure = False

    async def put_back(self) -> None:
        """Engages what is loaded, whatever the slots run now; where it cannot serve again, nothing."""
        loaded, engine = self.loaded, self._engines.engine
        try:
            await self._changes.back_to(loaded.revision)
            await engine.engage(loaded.bindings)
        except Refused as refusal:
            # The engine's own code always runs; convergence then loads what is desired anew.
            _log.error("%s cannot serve again, the slots are empty: %s", loaded.revision.revision, refusal)
            await engine.engage(())
            self.loaded = loaded = NOTHING
            self._on_retreat()
        await self.salts.salt(engine, loaded.revision)
        self._engines.runs(loaded.revision.revision)
        self.unsure = self.loaded is not loaded  # who retreats does not wait for this

    async def engage_on(self, engine: Engine) -> str:
        """Makes a new engine run what is loaded; returns the revision."""
        loaded = self.loaded
        await engine.engage(loaded.bindings)
        await self.salts.salt(engine, loaded.revision)
        self.unsure = self.loaded is not loaded
        return loaded.revision.revision

    def at_work(self, generation: int, artifact: str | None) -> AtWork:
        """What an engine that is dead now was doing, where `artifact` was being called."""
        ran = self._served.at_work(self.revision, artifact, unsure=self.unsure)
        return AtWork.of(generation, ran, artifact)

    def retreat(self) -> EngineLaunch | None:
        """Back to the last revision that served and has nothing that is banned: it is to be put back, or engaged on a
        new engine. Returns how its engine was launched.
        """
        good = self._served.last_good(self.loaded) or NOTHING
        if good is not self.loaded:
            _log.warning("back from %s to %s", self.revision.revision, good.revision.revision)
        self.loaded = good
        self.unsure = True
        self._on_retreat()
        return self._engines.launch_of(self.revision.revision)
