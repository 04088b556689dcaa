"""The first step of a promotion: the direct path, or the first stage of a canary."""

from polymorph.compiler.domain.promotion import guards as guarding
from polymorph.compiler.domain.promotion.guards import Guards, Hindrance
from polymorph.compiler.domain.promotion.moves import Action, Move, Proposal, Stay, Transition
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.compiler.domain.promotion.revisions import artifacts, without
from polymorph.compiler.domain.promotion.stages import Subject, enter, next_generation, taken_back
from polymorph.events.state import DesiredState, Mode
from polymorph.events.values import Gate


def begin(
    current: DesiredState, proposal: Proposal, policy: Policy, guards: Guards, generation: int
) -> Transition:
    """Puts a winner on its way, or says why not. A canary that runs is superseded."""
    next_generation(current, generation)
    stay = (
        _forbidden(current, proposal, guards)
        or _unproven(current, proposal, policy, guards)
        or _unapproved(current, proposal, policy)
    )
    if stay is not None:
        return stay
    stable = without(current.stable, guards.quarantined)
    subject = Subject(
        proposal.promotion_id, proposal.over(stable), proposal.speedup, proposal.drift_id, proposal.reason
    )
    base = current.model_copy(update={"stable": stable, "signature": None})
    move = enter(base, subject, policy, generation, after=None)
    return _superseding(current, move, proposal)


def _superseding(current: DesiredState, move: Move, proposal: Proposal) -> Move:
    if current.candidate is None or current.promotion_id is None:
        return Move(Action.BEGIN, move.desired, move.reason, move.events, move.phases)
    reason = f"superseded by promotion {proposal.promotion_id}"
    event = taken_back(current, current.candidate, current.stable, move.desired.generation, reason)
    phases = {current.promotion_id: Phase.SUPERSEDED, **move.phases}
    return Move(Action.BEGIN, move.desired, move.reason, (event, *move.events), phases)


def _forbidden(current: DesiredState, proposal: Proposal, guards: Guards) -> Stay | None:
    forbidden = guarding.hindrance(current, guards)
    if forbidden is not None:
        return Stay.of(*forbidden)
    banned = artifacts(proposal.over(without(current.stable, guards.quarantined))) & guards.quarantined
    if banned:
        return Stay.of(Hindrance.QUARANTINE, f"artifact {min(banned)} is in quarantine")
    return None


def _unproven(current: DesiredState, proposal: Proposal, policy: Policy, guards: Guards) -> Stay | None:
    evidence = proposal.speedup
    if proposal.gate is not Gate.G5_END_TO_END or evidence is None:
        return Stay.of(Hindrance.EVIDENCE, f"evidence ends at gate {proposal.gate}: G5 is wanted")
    if not evidence.low >= policy.minimum_low:
        return Stay.of(
            Hindrance.EVIDENCE, f"speed-up is at least {evidence.low:.3f}: {policy.minimum_low} is wanted"
        )
    stable = without(current.stable, guards.quarantined)
    if proposal.over(stable).revision == stable.revision:
        return Stay.of(Hindrance.NOTHING, f"the pool runs {stable.revision} already")
    if current.candidate is not None and proposal.over(stable).revision == current.candidate.revision:
        return Stay.of(Hindrance.NOTHING, f"the pool tries {current.candidate.revision} already")
    if proposal.revision is not None and proposal.revision.parent not in {None, current.stable.revision}:
        reason = f"measured over {proposal.revision.parent}, the pool runs {current.stable.revision}"
        return Stay(Hindrance.EVIDENCE, reason, Phase.SUPERSEDED)
    return None


def _unapproved(current: DesiredState, proposal: Proposal, policy: Policy) -> Stay | None:
    if proposal.approved:
        return None
    if current.mode is Mode.RECOMMEND:
        return Stay.of(Hindrance.APPROVAL, "the pool's mode is recommend: it waits for approval")
    if proposal.lossy() and not policy.allow_lossy:
        return Stay.of(Hindrance.APPROVAL, "it is lossy and the pool allows that only with approval")
    return None
