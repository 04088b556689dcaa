"""Carrying out a step: from its intent in the record to the compare-and-set, to its confirmation."""

import logging

from polymorph.bus.errors import Conflict
from polymorph.compiler.adapters.promotion_keys import PromotionKeys, Shown
from polymorph.compiler.domain.promotion.moves import Action
from polymorph.events.state import DesiredState
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.promotions import OUTRUN, GivenUp
from polymorph.ledger.tables import StepRow, StepStatus

_log = logging.getLogger(__name__)


class StepLost(LookupError):
    """A step that was written is not in the record any more."""


class Commit:
    """Safe to run by several at once for one step, and again after a crash at any point.

    A step is only committed onto the generation that it was planned on. Whoever gives a step up closes it in the
    record first and touches the key then, so that a compare-and-set still under way loses; one that came through
    before is found by `settle`, since key-value is the truth.
    """

    ATTEMPTS = 8

    def __init__(self, keys: PromotionKeys, ledger: Ledger) -> None:
        self._keys = keys
        self._ledger = ledger

    async def carry_out(self, step: StepRow) -> StepStatus:
        """How the step ended; INTENT where others kept writing the key, which the reconciler goes on with.

        Raises `Unavailable` where the bus does not answer: the intent stands, and may have been committed.
        """
        for _ in range(self.ATTEMPTS):
            shown = await self._keys.shown(step.pool)
            status = await self._standing(step, shown)
            if status is not StepStatus.INTENT:
                return status
            desired = DesiredState.model_validate(step.target)
            try:
                await self._keys.commit(desired, None if shown is None else shown.kv_revision)
            except Conflict:
                _log.info("pool %s: generation %d met another write", step.pool, step.generation)
                continue
            await self._ledger.settle(step.pool, step.generation)
            return StepStatus.CONFIRMED
        return StepStatus.INTENT

    async def give_up(self, step: StepRow, end: GivenUp) -> StepStatus:
        """Closes an intent that shall not be committed any more; how it really ended."""
        shown = await self._keys.shown(step.pool)
        if shown is None or shown.generation < step.generation:
            await self._ledger.abort_step(step.pool, step.generation, end)
            while shown is not None and not await self._keys.touch(shown):
                shown = await self._keys.shown(step.pool)
        if shown is not None:
            await self._ledger.settle(step.pool, shown.generation)
        return await self._recorded(step)

    async def _standing(self, step: StepRow, shown: Shown | None) -> StepStatus:
        """INTENT where the step may be committed onto what is shown; else how it ended."""
        if shown is None:
            if step.action == Action.RESTORE:
                return await self._recorded(step)
            await self._ledger.abort_step(step.pool, step.generation, OUTRUN)
            return await self._recorded(step)
        if shown.generation >= step.generation:
            await self._ledger.settle(step.pool, shown.generation)
            return await self._recorded(step)
        if shown.generation != step.base_generation:
            await self._ledger.abort_step(step.pool, step.generation, OUTRUN)
        return await self._recorded(step)

    async def _recorded(self, step: StepRow) -> StepStatus:
        row = await self._ledger.step(step.pool, step.generation)
        if row is None:
            raise StepLost(f"generation {step.generation} of pool {step.pool} is not in the record any more")
        return StepStatus(row.status)
