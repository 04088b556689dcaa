"""What a transition gives: a move to a new desired state, or a reason to stay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from polymorph.compiler.domain.promotion.guards import PASSING, Hindrance
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.compiler.domain.promotion.revisions import compose
from polymorph.events.base import Event
from polymorph.events.state import DesiredState
from polymorph.events.values import Gate, KernelBinding, Numerics, Ratio, Revision, Value


class Action(StrEnum):
    """Why a desired state changed."""

    BEGIN = "begin"
    ADVANCE = "advance"
    ROLL_BACK = "roll-back"
    PURGE = "purge"
    CHANGE_MODE = "change-mode"
    RESTORE = "restore"


FORWARD = frozenset({Action.BEGIN, Action.ADVANCE})


class Proposal(Value):
    """A winner with its evidence: bindings to put over what runs, or a complete revision.

    A complete revision is only taken where the pool still runs its parent, so that no other winner is undone.
    """

    promotion_id: str
    pool: str
    bindings: tuple[KernelBinding, ...] = ()
    revision: Revision | None = None
    reason: str
    gate: Gate
    speedup: Ratio | None
    drift_id: str | None = None
    approved: bool = False

    def over(self, stable: Revision) -> Revision:
        """The revision that the pool would run."""
        return self.revision or compose(stable, self.bindings)

    def lossy(self) -> bool:
        kernels = self.revision.kernels if self.revision else self.bindings
        return any(kernel.numerics is Numerics.LOSSY for kernel in kernels)


@dataclass(frozen=True, slots=True)
class Move:
    """The next desired state, unsigned. Its events are facts once key-value shows it, and not before."""

    action: Action
    desired: DesiredState
    reason: str
    events: tuple[Event, ...] = ()
    phases: Mapping[str, Phase] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stay:
    """Nothing changes. `phase` is what a promotion that wanted to begin becomes; None leaves a running one as it is."""

    hindrance: Hindrance | None
    reason: str
    phase: Phase | None = None

    @classmethod
    def of(cls, hindrance: Hindrance, reason: str) -> "Stay":
        return cls(hindrance, reason, Phase.HELD if hindrance in PASSING else Phase.ABORTED)


Transition = Move | Stay
