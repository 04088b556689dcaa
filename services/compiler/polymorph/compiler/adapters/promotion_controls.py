"""What an operator does to promotion: modes, freezes, pauses, quarantine."""

import datetime as dt

from polymorph.bus import topology
from polymorph.compiler.adapters.promotion_change import Change, PromotionResult
from polymorph.compiler.domain.promotion.guards import EVERY_POOL, Guards
from polymorph.compiler.domain.promotion.moves import Transition
from polymorph.compiler.domain.promotion.retreat import change_mode, purge
from polymorph.config.clock import Clock
from polymorph.events.state import DesiredState, Freeze, Mode, Quarantine


class Controls:
    """Each call takes effect with the next decision; workers see quarantine by themselves."""

    def __init__(self, change: Change, clock: Clock) -> None:
        self._change = change
        self._keys = change.keys
        self._clock = clock

    async def set_mode(self, pool: str, mode: Mode) -> PromotionResult:
        """A candidate that may not move on in `mode` is taken away with the change."""

        def plan(current: DesiredState, guards: Guards, generation: int) -> Transition:
            return change_mode(current, mode, guards, generation)

        return await self._change.apply(await self._change.shown(pool), plan)

    async def quarantine(
        self, artifact: str, reason: str, *, until: dt.datetime | None = None, operator: bool = False
    ) -> list[PromotionResult]:
        """Bans an artifact and purges it from every pool that shows it."""
        await self.ban(artifact, reason, until=until)
        return [await self.purge(pool, operator=operator) for pool in await self.pools()]

    async def ban(self, artifact: str, reason: str, *, until: dt.datetime | None = None) -> None:
        """Bans an artifact; desired states that show it are left to whoever calls, and to the reconciler."""
        entry = Quarantine(artifact=artifact, reason=reason, since=self._clock.now(), until=until)
        await self._keys.put(topology.QUARANTINE, artifact, entry)

    async def pools(self) -> list[str]:
        return await self._keys.pools()

    async def purge(self, pool: str, *, operator: bool = False) -> PromotionResult:
        """Takes what is in quarantine out of the desired state of `pool`."""

        def plan(current: DesiredState, guards: Guards, generation: int) -> Transition:
            return purge(current, guards, generation, operator=operator)

        return await self._change.apply(await self._change.shown(pool), plan)

    async def freeze(self, reason: str, *, pool: str = EVERY_POOL, until: dt.datetime | None = None) -> None:
        """Nothing is promoted until `thaw`, or `until`."""
        await self._keys.put(topology.FREEZE, pool, self._window(reason, until))

    async def thaw(self, pool: str = EVERY_POOL) -> None:
        await self._keys.drop(topology.FREEZE, pool)

    async def pause(self, reason: str, *, pool: str = EVERY_POOL, until: dt.datetime | None = None) -> None:
        """As a freeze, but the hand of whoever watches now: until `resume`."""
        await self._keys.put(topology.PAUSE, pool, self._window(reason, until))

    async def resume(self, pool: str = EVERY_POOL) -> None:
        await self._keys.drop(topology.PAUSE, pool)

    def _window(self, reason: str, until: dt.datetime | None) -> Freeze:
        return Freeze(reason=reason, since=self._clock.now(), until=until)
