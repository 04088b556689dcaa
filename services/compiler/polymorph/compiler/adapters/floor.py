"""What the loop does to the world: the object store, the work queue and the promoter, behind one port."""

import logging

from polymorph.bus.errors import Retryable
from polymorph.bus.port import Bus
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import PromotionResult, UnknownPool
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.domain.promotion.moves import Proposal
from polymorph.compiler.domain.promotion.revisions import artifacts
from polymorph.compiler.domain.search_pool import Ended
from polymorph.compiler.domain.search_state import Answer
from polymorph.events.state import DesiredState, Mode
from polymorph.events.types import EvaluateCandidate

_log = logging.getLogger(__name__)


class BusFloor:
    """Objects and orders go over the bus, winners to the promoter."""

    def __init__(self, bus: Bus, promoter: Promoter, controls: Controls, *, default_mode: Mode) -> None:
        self._bus = bus
        self._promoter = promoter
        self._controls = controls
        self._default_mode = default_mode

    async def keep(self, data: bytes) -> None:
        await self._bus.put_object(data)

    async def order_again(self, command: EvaluateCandidate) -> None:
        """Within the queue's window for duplicates this does nothing, for the first order is still there."""
        await self._bus.publish(command)

    async def pool(self, pool: str) -> DesiredState:
        """Raises `Retryable` where the pool's state was lost and is being restored."""
        try:
            return await self._promoter.ensure_pool(pool, self._default_mode)
        except UnknownPool as error:
            raise Retryable(str(error)) from error

    async def promote(self, proposal: Proposal) -> Ended | None:
        """Raises `Retryable` like `pool`."""
        try:
            result = await self._promoter.promote(
                proposal.pool,
                bindings=proposal.bindings,
                reason=proposal.reason,
                speedup=proposal.speedup,
                gate=proposal.gate,
                drift_id=proposal.drift_id,
                promotion_id=proposal.promotion_id,
            )
        except UnknownPool as error:
            raise Retryable(str(error)) from error
        answer = _answer(result)
        if answer is None:
            return None
        shown = result.desired
        return Ended(proposal.promotion_id, answer, shown.generation, shown.stable, result.reason)

    async def take_back(self, pool: str, generation: int, reason: str) -> None:
        """Rolls back, where the pool still shows what was refused and a promotion brought it.

        A generation that is itself the way back is left: whoever refuses that as well would refuse everything.
        """
        shown = await self.pool(pool)
        if shown.generation != generation:
            return
        if await self._promoter.brought(pool, generation):
            await self._promoter.roll_back(pool, reason)
        else:
            _log.warning("pool %s: generation %d brought nothing new and stays. %s", pool, generation, reason)

    async def quarantine(self, artifact: str, reason: str) -> None:
        """Bans it first, so that nothing brings it back meanwhile; then every pool that shows it leaves it."""
        await self._controls.ban(artifact, reason)
        for pool in await self._controls.pools():
            try:
                await self._leave(pool, artifact, reason)
            except UnknownPool as error:
                _log.warning("%s: it is restored without what is in quarantine", error)

    async def _leave(self, pool: str, artifact: str, reason: str) -> None:
        """Goes back to what served before where that did without it, else on without it alone."""
        shown = await self.pool(pool)
        if artifact not in artifacts(shown.stable) | artifacts(shown.candidate):
            return
        before = await self._promoter.before(shown)
        if shown.candidate is not None or (before is not None and artifact not in artifacts(before)):
            await self._promoter.roll_back(pool, reason)
        else:
            await self._controls.purge(pool)


def _answer(result: PromotionResult) -> Answer | None:
    """None for an intent that the reconciler still goes on with."""
    if result.promoted:
        return Answer.LIVE
    if result.outcome == "pending":
        return None
    return {"changed": Answer.UNDER_WAY, "held": Answer.HELD}.get(result.outcome, Answer.REFUSED)
