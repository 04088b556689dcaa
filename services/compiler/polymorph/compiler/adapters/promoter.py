"""The promoter: intent in the record, compare-and-set in key-value, confirmation in the record."""

from collections.abc import Callable

from polymorph.bus.errors import Conflict
from polymorph.compiler.adapters.promotion_change import Change, PromotionResult, UnknownPool
from polymorph.compiler.domain.promotion.advance import advance
from polymorph.compiler.domain.promotion.begin import begin
from polymorph.compiler.domain.promotion.guards import Guards
from polymorph.compiler.domain.promotion.judgement import Reading
from polymorph.compiler.domain.promotion.moves import FORWARD, Action, Proposal, Transition
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.policy import DIRECT, Policy
from polymorph.compiler.domain.promotion.retreat import roll_back
from polymorph.events.state import EMPTY, DesiredState, Mode
from polymorph.events.values import Gate, KernelBinding, Ratio, Revision
from polymorph.ledger.tables import PromotionRow


class Promoter:
    """Brings winners live. Several may run: of two that change one pool at once, one wins.

    Every call raises `Unavailable` where the bus does not answer; an intent that was written by then is finished by
    the reconciler, or by `promote` with the same `promotion_id`.
    """

    def __init__(self, change: Change, new_id: Callable[[], str], *, policy: Policy = DIRECT) -> None:
        self._change = change
        self._keys = change.keys
        self._ledger = change.ledger
        self._new_id = new_id
        self._policy = policy

    async def ensure_pool(self, pool: str, mode: Mode) -> DesiredState:
        """What key-value shows of `pool`; a new pool starts in `mode` with the empty revision at generation 0.

        Raises:
            UnknownPool: the record knows the pool and key-value lost it: the reconciler restores it.
        """
        while True:
            shown = await self._keys.shown(pool)
            if shown is not None:
                return shown.desired
            if await self._ledger.last_confirmed(pool) is not None:
                raise UnknownPool(f"key-value lost pool {pool!r}, which the record knows: reconcile first")
            try:
                await self._keys.commit(DesiredState(pool=pool, generation=0, mode=mode), None)
            except Conflict:
                continue

    async def promote(
        self,
        pool: str,
        *,
        bindings: tuple[KernelBinding, ...] = (),
        revision: Revision | None = None,
        reason: str,
        speedup: Ratio | None,
        gate: Gate = Gate.G5_END_TO_END,
        drift_id: str | None = None,
        promotion_id: str | None = None,
    ) -> PromotionResult:
        """Puts a winner on its way. Idempotent by `promotion_id` (a search's id is a good one).

        `bindings` are put over what the pool runs; a complete `revision` is taken only over its own parent.

        Raises:
            UnknownPool: `ensure_pool` was not called.
            ValueError: bindings that overlap.
        """
        proposal = Proposal(
            promotion_id=promotion_id or self._new_id(),
            pool=pool,
            bindings=bindings,
            revision=revision,
            reason=reason,
            gate=gate,
            speedup=speedup,
            drift_id=drift_id,
        )
        known = await self._ledger.promotion(proposal.promotion_id)
        return await self._begin(proposal) if known is None else await self.finish(known)

    async def approve(self, promotion_id: str) -> PromotionResult:
        """A person's yes to a held promotion.

        Raises:
            LookupError: no such promotion.
            ValueError: it is not held.
        """
        row = await self._ledger.promotion(promotion_id)
        if row is None:
            raise LookupError(f"promotion {promotion_id!r} is not in the record")
        if row.phase != Phase.HELD:
            raise ValueError(f"promotion {promotion_id} is {row.phase}: only a held one can be approved")
        proposal = Proposal.model_validate(row.proposal)
        return await self._begin(proposal.model_copy(update={"approved": True}))

    async def finish(self, row: PromotionRow) -> PromotionResult:
        """How a known promotion stands, after going on with what a crash left of it.

        A held one begins where nothing hinders it any more.
        """
        if row.phase == Phase.HELD:
            return await self._begin(Proposal.model_validate(row.proposal))
        for step in await self._ledger.intents(row.pool):
            if step.promotion_id == row.promotion_id:
                await self._change.commit.carry_out(step)
        return await self._change.standing(row.pool, row.promotion_id)

    async def advance(self, pool: str, reading: Reading) -> PromotionResult:
        """Takes the pool's candidate one stage on, or back, by what was read of it."""
        shown = await self._change.shown(pool)
        row = await self._ledger.promotion(shown.desired.promotion_id or "")
        drift_id = row.drift_id if row else None

        def plan(current: DesiredState, guards: Guards, generation: int) -> Transition:
            return advance(current, reading, self._policy, guards, generation, drift_id=drift_id)

        return await self._change.apply(shown, plan)

    async def roll_back(self, pool: str, reason: str, *, operator: bool = False) -> PromotionResult:
        """Takes the candidate away; without one, goes back to the parent of the stable revision."""
        shown = await self._change.shown(pool)
        back_to = await self.before(shown.desired)

        def plan(current: DesiredState, guards: Guards, generation: int) -> Transition:
            return roll_back(current, reason, guards, generation, back_to=back_to, operator=operator)

        return await self._change.apply(shown, plan)

    async def before(self, shown: DesiredState) -> Revision | None:
        """The parent of the stable revision, where the record knows it."""
        parent = shown.stable.parent
        return EMPTY if parent == EMPTY.revision else await self._ledger.revision(shown.pool, parent or "")

    async def brought(self, pool: str, generation: int) -> bool:
        """Whether a promotion brought what `generation` shows, rather than a way back. A change of mode brings nothing."""
        step = await self._ledger.step(pool, generation)
        while step is not None and step.action == Action.CHANGE_MODE:
            step = await self._ledger.step(pool, step.base_generation)
        return step is not None and step.action in FORWARD

    async def _begin(self, proposal: Proposal) -> PromotionResult:
        def plan(current: DesiredState, guards: Guards, generation: int) -> Transition:
            return begin(current, proposal, self._policy, guards, generation)

        return await self._change.apply(await self._change.shown(proposal.pool), plan, proposal)
