"""The next stage of a canary, by what was read of it."""

from polymorph.compiler.domain.promotion import guards as guarding
from polymorph.compiler.domain.promotion.guards import Guards, Hindrance
from polymorph.compiler.domain.promotion.judgement import Outcome, Reading, judge
from polymorph.compiler.domain.promotion.moves import Stay, Transition
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.compiler.domain.promotion.retreat import roll_back
from polymorph.compiler.domain.promotion.revisions import artifacts, without
from polymorph.compiler.domain.promotion.stages import Subject, enter, next_generation
from polymorph.events.state import DesiredState


def advance(
    current: DesiredState,
    reading: Reading,
    policy: Policy,
    guards: Guards,
    generation: int,
    *,
    drift_id: str | None = None,
) -> Transition:
    """One stage on, no change, or back, for the candidate that `current` carries."""
    next_generation(current, generation)
    if current.candidate is None or current.promotion_id is None:
        return Stay(Hindrance.NOTHING, f"pool {current.pool} has no candidate")
    forbidden = guarding.hindrance(current, guards)
    if forbidden is not None:
        return Stay(*forbidden)
    banned = artifacts(current.candidate) & guards.quarantined
    if banned:
        return roll_back(current, f"artifact {min(banned)} is in quarantine", guards, generation)
    outcome, reason = judge(reading, policy)
    if outcome is Outcome.HOLD:
        return Stay(None, reason)
    if outcome is Outcome.ROLL_BACK:
        return roll_back(current, reason, guards, generation)
    subject = Subject(current.promotion_id, current.candidate, reading.speedup, drift_id, reason)
    base = current.model_copy(update={"stable": without(current.stable, guards.quarantined)})
    return enter(base, subject, policy, generation, after=current.stage)
