"""Ways back: a candidate taken away, a stable revision undone, a quarantined kernel purged, a mode changed."""

from polymorph.compiler.domain.promotion import guards as guarding
from polymorph.compiler.domain.promotion.guards import Guards, Hindrance
from polymorph.compiler.domain.promotion.moves import Action, Move, Stay, Transition
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.revisions import artifacts, without
from polymorph.compiler.domain.promotion.stages import next_generation, taken_back
from polymorph.events.state import DesiredState, Mode, Stage
from polymorph.events.values import Revision

_NO_CANDIDATE = {
    "candidate": None,
    "stage": Stage.NONE,
    "share": 0.0,
    "promotion_id": None,
    "signature": None,
}


def roll_back(
    current: DesiredState,
    reason: str,
    guards: Guards,
    generation: int,
    *,
    back_to: Revision | None = None,
    operator: bool = False,
) -> Transition:
    """Takes the candidate away, or without one puts `back_to` in the stable revision's place.

    By itself the loop does not move a pool that is frozen, paused, pinned or observed; an operator does.
    """
    next_generation(current, generation)
    stay = _forbidden(current, guards, operator=operator)
    if stay is not None:
        return stay
    wanted = current.stable if current.candidate is not None else back_to
    if wanted is None:
        return Stay(Hindrance.NOTHING, f"pool {current.pool} has no earlier revision to go back to")
    stable = without(wanted, guards.quarantined)
    if current.candidate is None and stable.revision == current.stable.revision:
        return Stay(Hindrance.NOTHING, f"the pool runs {stable.revision} already")
    return _take_back(current, stable, reason, generation, Action.ROLL_BACK)


def purge(current: DesiredState, guards: Guards, generation: int, *, operator: bool = False) -> Transition:
    """Takes quarantined kernels out of the desired state; a candidate goes too: its control is gone."""
    next_generation(current, generation)
    banned = (artifacts(current.stable) | artifacts(current.candidate)) & guards.quarantined
    if not banned:
        return Stay(Hindrance.NOTHING, f"pool {current.pool} runs nothing that is in quarantine")
    stay = _forbidden(current, guards, operator=operator)
    if stay is not None:
        return stay
    reason = f"artifact {min(banned)} is in quarantine"
    stable = without(current.stable, guards.quarantined)
    return _take_back(current, stable, reason, generation, Action.PURGE)


def change_mode(current: DesiredState, mode: Mode, guards: Guards, generation: int) -> Transition:
    """An operator's change of mode. A candidate that may not move on is taken away with it."""
    next_generation(current, generation)
    if current.mode is mode:
        return Stay(Hindrance.NOTHING, f"the pool's mode is {mode} already")
    reason = f"the mode became {mode}"
    banned = (artifacts(current.stable) | artifacts(current.candidate)) & guards.quarantined
    if banned or (current.candidate is not None and mode is not Mode.CANARY):
        stable = without(current.stable, guards.quarantined)
        move = _take_back(current, stable, reason, generation, Action.CHANGE_MODE)
        desired = move.desired.model_copy(update={"mode": mode})
        return Move(Action.CHANGE_MODE, desired, reason, move.events, move.phases)
    desired = current.model_copy(update={"generation": generation, "mode": mode, "signature": None})
    return Move(Action.CHANGE_MODE, desired, reason)


def restore(lost: DesiredState, guards: Guards, generation: int) -> Move:
    """What was confirmed last, under a new generation and without what came into quarantine since."""
    next_generation(lost, generation)
    reason = "key-value had lost the pool"
    if (artifacts(lost.stable) | artifacts(lost.candidate)) & guards.quarantined:
        stable = without(lost.stable, guards.quarantined)
        return _take_back(lost, stable, reason, generation, Action.RESTORE)
    return Move(Action.RESTORE, lost.model_copy(update={"generation": generation}), reason)


def _forbidden(current: DesiredState, guards: Guards, *, operator: bool) -> Stay | None:
    forbidden = None if operator else guarding.hindrance(current, guards)
    return None if forbidden is None else Stay(*forbidden)


def _take_back(current: DesiredState, stable: Revision, reason: str, generation: int, action: Action) -> Move:
    desired = current.model_copy(update={**_NO_CANDIDATE, "stable": stable, "generation": generation})
    gone = current.candidate or current.stable
    event = taken_back(current, gone, stable, generation, reason)
    phases = {current.promotion_id: Phase.ROLLED_BACK} if current.promotion_id else {}
    return Move(action, desired, reason, (event,), phases)
