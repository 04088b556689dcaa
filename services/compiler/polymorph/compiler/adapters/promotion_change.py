"""One change of a pool's desired state, from the plan to its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from polymorph.compiler.adapters.promotion_commit import Commit
from polymorph.compiler.adapters.promotion_keys import PromotionKeys, Shown
from polymorph.compiler.domain.promotion.guards import Guards, Hindrance
from polymorph.compiler.domain.promotion.moves import Move, Proposal, Stay, Transition
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.events.state import DesiredState
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.promotions import Proposed, StepPlan
from polymorph.ledger.tables import StepRow, StepStatus

Outcome = Literal["changed", "held", "aborted", "superseded", "rolled-back", "pending"]
Planner = Callable[[DesiredState, Guards, int], Transition]

_BY_PHASE: dict[Phase, Outcome] = {
    Phase.INTENT: "pending",
    Phase.HELD: "held",
    Phase.SHADOW: "changed",
    Phase.CANARY: "changed",
    Phase.CONFIRMED: "changed",
    Phase.ROLLED_BACK: "rolled-back",
    Phase.ABORTED: "aborted",
    Phase.SUPERSEDED: "superseded",
}
_BY_STATUS: dict[StepStatus, Outcome] = {
    StepStatus.INTENT: "pending",
    StepStatus.CONFIRMED: "changed",
    StepStatus.ABORTED: "aborted",
    StepStatus.SUPERSEDED: "superseded",
}


class UnknownPool(LookupError):
    """A pool without desired state: `ensure_pool` was not called for it, or key-value lost it."""


@dataclass(frozen=True, slots=True)
class PromotionResult:
    """What came of a call.

    `outcome` is `changed` if and only if key-value showed the change; `pending` means that the intent stands and the
    reconciler goes on with it. `desired` is what key-value shows now.
    """

    outcome: Outcome
    reason: str
    desired: DesiredState
    promotion_id: str | None = None
    phase: Phase | None = None
    hindrance: Hindrance | None = None

    @property
    def promoted(self) -> bool:
        """Whether the revision became the pool's stable one."""
        return self.outcome == "changed" and self.phase is Phase.CONFIRMED


class Change:
    """Plans on what is shown, writes the intent, carries it out."""

    def __init__(self, keys: PromotionKeys, ledger: Ledger) -> None:
        self.keys = keys
        self.ledger = ledger
        self.commit = Commit(keys, ledger)
        self._settled: dict[str, int] = {}

    async def shown(self, pool: str) -> Shown:
        """What key-value shows, with a record that agrees. Raises `UnknownPool`."""
        shown = await self.keys.shown(pool)
        if shown is None:
            raise UnknownPool(f"pool {pool!r} has no desired state: call ensure_pool, or reconcile")
        if self._settled.get(pool) != shown.generation:
            await self.ledger.settle(pool, shown.generation)
            self._settled[pool] = shown.generation
        return shown

    async def apply(self, shown: Shown, plan: Planner, proposal: Proposal | None = None) -> PromotionResult:
        """Carries out what `plan` gives for `shown`, or keeps why not."""
        current = shown.desired
        guards = await self.keys.guards(current.pool)
        preview = plan(current, guards, current.generation + 1)
        if isinstance(preview, Stay):
            return await self._stay(current, preview, proposal)
        step = await self.ledger.open_step(
            current.pool,
            current.generation,
            lambda generation: as_step(current, plan(current, guards, generation)),
            proposed=_proposed(proposal, current, Phase.INTENT, proposal.reason) if proposal else None,
        )
        if step is None:
            return await self.standing(current.pool, proposal.promotion_id if proposal else "")
        status = await self.commit.carry_out(step)
        return await self.result(step, status)

    async def result(self, step: StepRow, status: StepStatus) -> PromotionResult:
        """The result of a step that ended with `status`."""
        row = await self.ledger.promotion(step.promotion_id) if step.promotion_id else None
        shown = await self.keys.shown(step.pool)
        desired = shown.desired if shown else DesiredState.model_validate(step.target)
        phase = None if row is None else Phase(row.phase)
        reason = step.reason if status is StepStatus.CONFIRMED or row is None else row.reason
        return PromotionResult(_BY_STATUS[status], reason, desired, step.promotion_id, phase)

    async def standing(self, pool: str, promotion_id: str) -> PromotionResult:
        """How a promotion stands in the record. Raises LookupError where it is not there."""
        row = await self.ledger.promotion(promotion_id)
        if row is None:
            raise LookupError(f"promotion {promotion_id!r} is not in the record")
        shown = await self.shown(pool)
        phase = Phase(row.phase)
        return PromotionResult(_BY_PHASE[phase], row.reason, shown.desired, promotion_id, phase)

    async def _stay(self, current: DesiredState, stay: Stay, proposal: Proposal | None) -> PromotionResult:
        if proposal is None or stay.phase is None:
            return PromotionResult("held", stay.reason, current, current.promotion_id, None, stay.hindrance)
        if not await self.ledger.put_promotion(_proposed(proposal, current, stay.phase, stay.reason)):
            return await self.standing(current.pool, proposal.promotion_id)
        outcome = _BY_PHASE[stay.phase]
        return PromotionResult(
            outcome, stay.reason, current, proposal.promotion_id, stay.phase, stay.hindrance
        )


def as_step(current: DesiredState, transition: Transition) -> StepPlan:
    """A move as the record keeps it.

    Raises:
        TypeError: it is no move; a plan must not depend on the generation that it gets.
    """
    if not isinstance(transition, Move):
        raise TypeError(f"pool {current.pool}: a plan turned from a move into {transition!r}")
    return StepPlan(
        action=transition.action,
        base_generation=current.generation,
        target=transition.desired,
        promotion_id=transition.desired.promotion_id or current.promotion_id,
        reason=transition.reason,
        events=transition.events,
        phases={promotion_id: phase.value for promotion_id, phase in transition.phases.items()},
    )


def _proposed(proposal: Proposal, current: DesiredState, phase: Phase, reason: str) -> Proposed:
    return Proposed(
        promotion_id=proposal.promotion_id,
        pool=proposal.pool,
        revision=proposal.over(current.stable).revision,
        phase=phase.value,
        reason=reason,
        drift_id=proposal.drift_id,
        proposal=proposal.model_dump(mode="json"),
    )
