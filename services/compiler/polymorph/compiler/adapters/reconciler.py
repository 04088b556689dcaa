"""The reconciler: finishes what a crash left, restores what key-value lost, purges, and begins what was held."""

import datetime as dt
import logging

from polymorph.bus.errors import Retryable
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change, as_step
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.domain.promotion import guards as guarding
from polymorph.compiler.domain.promotion.moves import FORWARD
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.retreat import restore
from polymorph.compiler.domain.promotion.revisions import artifacts
from polymorph.config.clock import Clock
from polymorph.events.state import DesiredState, Mode
from polymorph.ledger.promotions import GivenUp
from polymorph.ledger.tables import StepRow, StepStatus

_log = logging.getLogger(__name__)
_HELD = frozenset({Phase.HELD.value})


class Reconciler:
    """Level-triggered and idempotent: each pass makes record and key-value agree, whatever happened before."""

    def __init__(
        self,
        change: Change,
        promoter: Promoter,
        controls: Controls,
        clock: Clock,
        *,
        mode: Mode | None = None,
        every_s: float = 5.0,
        evidence_lasts_s: float = 3600.0,
    ) -> None:
        self._change = change
        self._keys = change.keys
        self._ledger = change.ledger
        self._promoter = promoter
        self._controls = controls
        self._clock = clock
        self._mode = mode
        self._in_mode: set[str] = set()
        self._parked: dict[str, str] = {}
        self._every_s = every_s
        self._evidence_lasts = dt.timedelta(seconds=evidence_lasts_s)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.reconcile()
            except Retryable as error:
                _log.warning("reconciling waits for the bus: %s", error)
            await self._clock.sleep(self._every_s)

    async def reconcile(self) -> None:
        """One pass over every pool of the record and of key-value; one that cannot be read is left out of it."""
        pools = {*await self._ledger.pools(), *await self._keys.pools()}
        for pool in sorted(pools):
            try:
                await self._pool(pool)
                self._parked.pop(pool, None)
            except (ValueError, LookupError) as error:
                if self._parked.get(pool) != str(error):
                    _log.exception("pool %s is not reconciled until this is put right", pool)
                self._parked[pool] = str(error)

    async def _pool(self, pool: str) -> None:
        shown = await self._keys.shown(pool)
        if shown is None:
            await self._restore(pool)
        else:
            await self._ledger.settle(pool, shown.generation)
        for step in await self._ledger.intents(pool):
            await self._finish(step)
        if await self._keys.shown(pool) is None:
            return
        if self._mode is not None and pool not in self._in_mode:
            await self._start_in(pool, self._mode)
        await self._controls.purge(pool)
        for row in reversed(await self._ledger.promotions(pool, _HELD)):
            if self._clock.now() - row.created_at < self._evidence_lasts:
                await self._promoter.finish(row)

    async def _start_in(self, pool: str, mode: Mode) -> None:
        """The mode that this start was given, once: an operator may change it while we run."""
        result = await self._controls.set_mode(pool, mode)
        if result.desired.mode is mode:
            self._in_mode.add(pool)
        if result.outcome == "changed":
            _log.info("pool %s: %s", pool, result.reason)

    async def _finish(self, step: StepRow) -> None:
        """Goes on with an intent, unless something that came since forbids it."""
        guards = await self._keys.guards(step.pool)
        target = DesiredState.model_validate(step.target)
        banned = (artifacts(target.stable) | artifacts(target.candidate)) & guards.quarantined
        if banned:
            reason = f"artifact {min(banned)} is in quarantine"
            end = GivenUp(StepStatus.ABORTED, Phase.ABORTED.value, reason)
            await self._change.commit.give_up(step, end)
            return
        forbidden = guarding.hindrance(target, guards) if step.action in FORWARD else None
        if forbidden is not None:
            end = GivenUp(StepStatus.ABORTED, Phase.HELD.value, forbidden[1])
            await self._change.commit.give_up(step, end)
            return
        await self._change.commit.carry_out(step)

    async def _restore(self, pool: str) -> None:
        """Shows what was confirmed last, under a new generation: workers refuse an old one."""
        last = await self._ledger.last_confirmed(pool)
        if last is None:
            return
        lost = DesiredState.model_validate(last.target)
        guards = await self._keys.guards(pool)
        step = await self._ledger.open_step(
            pool, lost.generation, lambda generation: as_step(lost, restore(lost, guards, generation))
        )
        if step is not None:
            await self._change.commit.carry_out(step)
