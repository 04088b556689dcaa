"""Brings the engine of a plain server to what its folder desires, again and again."""

import logging
import os
from collections import deque
from typing import Literal

from polymorph.bus.errors import Retryable
from polymorph.config.clock import Clock
from polymorph.engine.bindings import SlotBinding
from polymorph.engine.loading.admission import Fence, Refused, check_named, told_name, told_reason
from polymorph.engine.loading.engine import SlottedEngine
from polymorph.engine.loading.loader import Loader
from polymorph.engine.loading.target import target
from polymorph.engine.plain.folder import KernelFolder, Stamp
from polymorph.engine.plain.patience import again_s
from polymorph.engine.plain.status import PlainStatus, Refusal, counted, engaged
from polymorph.engine.provenance import RUNNING
from polymorph.events.state import EMPTY, DesiredState
from polymorph.events.values import Numerics, Revision

_log = logging.getLogger(__name__)
POLL_S = 1.0
_KEPT_REFUSALS = 20

State = Literal["converged", "loading", "waiting", "refused", "stock"]


class Watch:
    """One change at a time, by one process: whoever holds the folder's lock."""

    def __init__(
        self, pool: str, server: str, folder: KernelFolder, fence: Fence, loader: Loader, clock: Clock
    ) -> None:
        self._pool = pool
        self._server = server
        self._folder = folder
        self._fence = fence
        self._loader = loader
        self._engine: SlottedEngine = loader.engine
        self._clock = clock
        self._seen: Stamp | None = None
        self._desired: DesiredState | None = None
        self._refused: dict[tuple[int, str], str] = {}
        self._quarantined: set[str] = set()  # of the revision that was tried last
        self._refusals: deque[Refusal] = deque(maxlen=_KEPT_REFUSALS)
        self._misheard = ""
        self._bindings: tuple[SlotBinding, ...] = ()
        self._unsure = True  # whether the slots may run something else than `revision`
        self.revision = EMPTY

    async def run(self) -> None:
        """Runs until cancelled, or until the engine is dead: an error that nobody foresaw ends one look alone."""
        failures = 0
        while self._engine.alive:
            try:
                await self.step()
                failures = 0
            except Exception as error:  # noqa: BLE001 - the next look may be right; what runs goes on meanwhile
                failures += 1
                _log.exception(
                    "this look at %s failed, the next is in %.0f s", self._folder.path, again_s(failures)
                )
                await self._told(error)
            await self._clock.sleep(again_s(failures) if failures else POLL_S)

    async def step(self) -> None:
        """Looks once, does what is to be done, and says how it stands; never raises for what was refused."""
        state: State = "converged"
        reason = ""
        try:
            self._hear()
            reason = await self._converge()
            state = "refused" if reason else state
        except Retryable as error:
            state, reason = "waiting", str(error)
        try:
            await self._say(state, reason)
        except (Retryable, OSError) as error:
            _log.error("status.json is not written: %s", error)

    async def _told(self, error: Exception) -> None:
        """In status.json too, unless that is what failed."""
        try:
            await self._say("waiting", f"unforeseen, and tried again: {type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - it was logged as the first error was
            _log.exception("status.json does not tell of it")

    def _hear(self) -> None:
        stamp = self._folder.stamp()
        if stamp is None or stamp == self._seen:
            return
        generation, revision = -1, "?"
        try:
            desired = self._folder.desired()
            if desired is None:
                return
            generation, revision = desired.generation, desired.stable.revision
            self._fence.admit(desired)
            _check_same(desired, self._desired)
            self._desired, self._misheard = desired, ""
        except Refused as refusal:
            self._misheard = self._refuse(generation, revision, str(refusal))
        self._seen = stamp

    async def _converge(self) -> str:
        """Why what stands in the folder is not run; empty where it is.

        Raises:
            Retryable: the engine does not answer, or a file is not there yet.
        """
        if self._unsure:
            await self._restore()
        desired = self._desired
        goal = target(desired, self._server)
        if desired is None or goal.revision == self.revision.revision:
            return self._misheard
        key = (desired.generation, goal.revision)
        if self._folder.quarantined(self._quarantined) != self._quarantined:
            self._refused.pop(key, None)
        if key not in self._refused:
            try:
                await self._load(goal)
            except Refused as refusal:
                if self._unsure:
                    await self._restore()
                self._refused[key] = self._refuse(*key, str(refusal))
            else:
                _log.warning("generation %d: this server runs %s", *key)
        return self._refused.get(key) or self._misheard

    async def _load(self, goal: Revision) -> None:
        self._quarantined = set()
        check_named(goal)
        _check_kind(goal)
        await self._say("loading", f"{goal.revision} is checked and tested")
        self._quarantined = self._folder.quarantined({kernel.artifact for kernel in goal.kernels})
        bindings = await self._loader.prepare(goal, self._quarantined)
        self._unsure = True
        await self._loader.engage(goal, bindings)
        self._runs(goal, bindings)

    async def _restore(self) -> None:
        """Engages what is believed to run, whatever the slots run now; where that is refused, nothing."""
        try:
            await self._engine.engage(self._bindings)
        except Refused as refusal:
            if not self._bindings:
                raise Retryable(f"the slots cannot be emptied: {refusal}") from refusal
            _log.error("%s cannot serve again, the slots are empty: %s", self.revision.revision, refusal)
            await self._engine.engage(())
            self._runs(EMPTY, ())
        self._unsure = False

    def _runs(self, revision: Revision, bindings: tuple[SlotBinding, ...]) -> None:
        self.revision, self._bindings, self._unsure = revision, bindings, False
        RUNNING.revision = revision.revision

    def _refuse(self, generation: int, revision: str, reason: str) -> str:
        revision, reason = told_name(revision), told_reason(reason)
        _log.error("refused %s of generation %d: %s", revision, generation, reason)
        refusal = Refusal(at=self._clock.now(), generation=generation, revision=revision, reason=reason)
        self._refusals.append(refusal)
        return reason

    async def _say(self, state: State, reason: str) -> None:
        described, counters = await self._engine.describe(), await self._engine.read()
        stock = [each["reason"] for each in described if not each.get("ok", True)]
        self._folder.say(
            PlainStatus(
                pool=self._pool,
                at=self._clock.now(),
                process=os.getpid(),
                state="stock" if stock else state,
                reason=reason or (stock[0] if stock else ""),
                generation=self._desired.generation if self._desired is not None else -1,
                revision=self.revision.revision,
                epoch=max((each.get("epoch", 0) for each in counters), default=0),
                ranks=len(described),
                kernels=engaged(described[0]["engaged"], counters),
                slots=counted(counters),
                missing=described[0]["missing"],
                refusals=tuple(self._refusals),
            )
        )


def _check_same(desired: DesiredState, held: DesiredState | None) -> None:
    """A generation has one meaning.

    Raises:
        Refused: this one had another when it was admitted.
    """
    if held is not None and desired.generation == held.generation and desired != held:
        raise Refused(f"generation {held.generation} says something else than when it was admitted")


def _check_kind(revision: Revision) -> None:
    """A plain server changes kernels, between two steps, and nothing else.

    Raises:
        Refused: the revision asks for more.
    """
    if revision.engine is not None or revision.slots is not None:
        raise Refused(f"{revision.revision} has settings of the engine: a plain server changes kernels alone")
    lossy = [kernel for kernel in revision.kernels if kernel.numerics is Numerics.LOSSY]
    if lossy:
        raise Refused(
            f"{lossy[0].definition}: a lossy kernel must meet no request that began before it, which takes a worker"
        )
