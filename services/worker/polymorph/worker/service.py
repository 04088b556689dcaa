"""What the slots run, or should: the revision in service, and those before it to go back to."""

import dataclasses
import logging
from collections.abc import Callable

from polymorph.engine.launch import EngineLaunch
from polymorph.engine.loading.admission import Refused
from polymorph.events.state import EMPTY
from polymorph.events.values import Revision
from polymorph.worker.adapters.engine import Engine
from polymorph.worker.changing import Changes, Receipt
from polymorph.worker.faults import Faults
from polymorph.worker.loading import InForce
from polymorph.worker.numerics import Salts
from polymorph.worker.seats import Engines
from polymorph.worker.served import AtWork, Served, kernels

_log = logging.getLogger(__name__)
NOTHING = InForce(EMPTY, (), {}, 0.0)


class InService:
    """Changed by one task at a time: the caller sees to that. `on_news` is called when there is another to run."""

    def __init__(
        self, engines: Engines, changes: Changes, faults: Faults, on_news: Callable[[], None]
    ) -> None:
        self._engines = engines
        self._changes = changes
        self._faults = faults
        self._on_news = on_news
        self._served = Served(faults)
        self.salts = Salts()
        self.loaded = NOTHING
        self.owed: InForce | None = None
        """What should run in place of `loaded`, and needs another engine than the one that serves."""
        self.unsure = False
        """Whether the slots may run something else than `loaded`, and not by a switch."""

    @property
    def revision(self) -> Revision:
        return self.loaded.revision

    @property
    def banned(self) -> bool:
        """Whether something in what runs, or in what is owed, may not run here any more."""
        return any(self._faults.banned(kernels(each.revision)) for each in (self.loaded, self._meant))

    @property
    def _meant(self) -> InForce:
        """What should run, whatever the engine that serves can."""
        return self.owed or (NOTHING if self.loaded.unsettled else self.loaded)

    def tries(self, goal: Revision) -> None:
        """`goal` may be at work from now on.

        Raises:
            Refused: engines died under it.
        """
        self._faults.check(goal)
        self._served.trying = goal

    def runs(self, loaded: InForce) -> None:
        self._served.add(self._meant)
        self.loaded, self.owed = loaded, None
        self._engines.runs(loaded.revision.revision)
        self.unsure = False

    def empties(self, receipt: Receipt | None) -> None:
        """An engine with other settings serves, and runs no kernels yet: what it took the place of is owed until then."""
        self.owed = self._meant
        self.loaded = dataclasses.replace(NOTHING, receipt=receipt, unsettled=True)
        self._engines.runs(EMPTY.revision)
        self.unsure = True

    def forgives(self) -> None:
        """What is owed does not come back."""
        self.owed = None

    async def put_back(self) -> None:
        """Engages what is loaded, whatever the slots run now; where it cannot serve in this engine, nothing."""
        loaded, engine = self.loaded, self._engines.engine
        found, owed = await self._again(engine, loaded)
        await self.salts.salt(engine, found.revision)
        self._engines.runs(found.revision.revision)
        if self.loaded is not loaded:  # who retreats does not wait for this
            self.unsure = True
            return
        self.loaded, self.owed, self.unsure = found, owed, False
        if (
            found.unsettled and not loaded.unsettled
        ):  # once: whoever tries in vain must not hear of it each time
            self._on_news()

    async def _again(self, engine: Engine, loaded: InForce) -> tuple[InForce, InForce | None]:
        """What the engine runs of `loaded`, and what is owed."""
        owed = self.owed
        try:
            receipt = None if loaded.unsettled else await self._changes.back_to(loaded.revision)
            if receipt is not None:
                await engine.engage(loaded.bindings)
                return dataclasses.replace(loaded, receipt=receipt), None
            if not loaded.unsettled:
                _log.warning(
                    "%s needs another engine: the slots are empty until then", loaded.revision.revision
                )
                owed = loaded
        except Refused as refusal:
            # The engine's own code always runs; convergence then loads what is desired anew.
            _log.error("%s cannot serve again, the slots are empty: %s", loaded.revision.revision, refusal)
        await engine.engage(())
        return dataclasses.replace(NOTHING, receipt=await self._changes.now(), unsettled=True), owed

    async def engage_on(self, engine: Engine) -> str:
        """Makes a new engine run what is loaded; returns the revision.

        Raises:
            Refused: the engine has other settings, or cannot run its kernels: it runs none.
        """
        loaded = self.loaded
        receipt = await self._changes.read_back(engine, loaded.revision)
        await engine.engage(loaded.bindings)
        await self.salts.salt(engine, loaded.revision)
        self.unsure = self.loaded is not loaded
        if not self.unsure:
            self.loaded = dataclasses.replace(loaded, receipt=receipt, unsettled=False)
        return loaded.revision.revision

    def at_work(self, generation: int, artifact: str | None) -> AtWork:
        """What an engine that is dead now was doing, where `artifact` was being called."""
        ran = self._served.at_work(self.revision, artifact, unsure=self.unsure)
        return AtWork.of(generation, ran, artifact)

    def retreat(self) -> EngineLaunch:
        """Back to the last revision that served and has nothing that is banned: it is to be put back, or engaged on a
        new engine. Returns how its engine is launched.
        """
        good = self._served.last_good(self._meant) or NOTHING
        if good.revision != self.revision:
            _log.warning("back from %s to %s", self.revision.revision, good.revision.revision)
        # Until it is put back, the settings are those of the engine that serves.
        self.loaded = dataclasses.replace(good, receipt=self.loaded.receipt)
        self.owed = None
        self.unsure = True
        self._on_news()
        return self._changes.launch_of(self.revision)
