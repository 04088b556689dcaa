"""Entering a stage: the desired state and the events that every path shares."""

from dataclasses import dataclass
from typing import Literal

from polymorph.compiler.domain.promotion.moves import Action, Move
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.events.state import DesiredState, Stage
from polymorph.events.types import PromotionAdvanced, PromotionCompleted, PromotionRolledBack
from polymorph.events.values import Ratio, Revision


@dataclass(frozen=True, slots=True)
class Subject:
    """What is promoted, and why."""

    promotion_id: str
    revision: Revision
    speedup: Ratio | None
    drift_id: str | None
    reason: str


def next_generation(current: DesiredState, generation: int) -> None:
    """Raises ValueError where `generation` is no fencing token for a change of `current`."""
    if generation <= current.generation:
        raise ValueError(f"generation {generation} must be above {current.generation} of pool {current.pool}")


def enter(
    base: DesiredState, subject: Subject, policy: Policy, generation: int, *, after: Stage | None
) -> Move:
    """The stage that follows `after` (None: nothing yet) under `policy`."""
    if after is None and policy.shadow:
        return _trial(base, subject, generation, Stage.SHADOW, 0.0)
    share = policy.share_after(base.share if after is Stage.CANARY else 0.0)
    if share is None:
        return _complete(base, subject, generation)
    return _trial(base, subject, generation, Stage.CANARY, share)


def taken_back(
    current: DesiredState, revision: Revision, back_to: Revision, generation: int, reason: str
) -> PromotionRolledBack:
    return PromotionRolledBack(
        pool=current.pool,
        promotion_id=current.promotion_id or f"{current.pool}-{current.generation}",
        generation=generation,
        revision=revision,
        back_to=back_to,
        reason=reason,
    )


def _trial(base: DesiredState, subject: Subject, generation: int, stage: Stage, share: float) -> Move:
    desired = base.model_copy(
        update={
            "generation": generation,
            "candidate": subject.revision,
            "stage": stage,
            "share": share,
            "promotion_id": subject.promotion_id,
            "signature": None,
        }
    )
    phase = Phase.SHADOW if stage is Stage.SHADOW else Phase.CANARY
    event = _advanced(desired, subject, "shadow" if stage is Stage.SHADOW else "canary", share)
    return Move(Action.ADVANCE, desired, subject.reason, (event,), {subject.promotion_id: phase})


def _complete(base: DesiredState, subject: Subject, generation: int) -> Move:
    desired = base.model_copy(
        update={
            "generation": generation,
            "stable": subject.revision,
            "candidate": None,
            "stage": Stage.NONE,
            "share": 0.0,
            "regime": subject.revision.regime,
            "promotion_id": subject.promotion_id,
            "signature": None,
        }
    )
    completed = PromotionCompleted(
        pool=desired.pool,
        promotion_id=subject.promotion_id,
        generation=generation,
        revision=subject.revision,
        speedup=subject.speedup,
        drift_id=subject.drift_id,
        reason=subject.reason,
    )
    events = (_advanced(desired, subject, "full", 1.0), completed)
    return Move(Action.ADVANCE, desired, subject.reason, events, {subject.promotion_id: Phase.CONFIRMED})


def _advanced(
    desired: DesiredState, subject: Subject, stage: Literal["shadow", "canary", "full"], share: float
) -> PromotionAdvanced:
    return PromotionAdvanced(
        pool=desired.pool,
        promotion_id=subject.promotion_id,
        generation=desired.generation,
        stage=stage,
        share=share,
        revision=subject.revision,
        reason=subject.reason,
    )
