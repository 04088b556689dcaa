"""The phases of a promotion and the ways between them.

A phase is what the record says. Between the intent and its confirmation a step may already be committed: then
key-value shows it and the record does not yet, which the reconciler settles.
"""

from enum import StrEnum


class Phase(StrEnum):
    """Where a promotion stands. A canary's share is in the desired state."""

    INTENT = "intent"
    HELD = "held"
    SHADOW = "shadow"
    CANARY = "canary"
    CONFIRMED = "confirmed"
    ROLLED_BACK = "rolled-back"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


_WAYS: dict[Phase, frozenset[Phase]] = {
    Phase.INTENT: frozenset(Phase) - {Phase.INTENT, Phase.ROLLED_BACK},
    Phase.HELD: frozenset({Phase.INTENT, Phase.ABORTED, Phase.SUPERSEDED}),
    Phase.SHADOW: frozenset({Phase.CANARY, Phase.CONFIRMED, Phase.ROLLED_BACK, Phase.SUPERSEDED}),
    Phase.CANARY: frozenset({Phase.CANARY, Phase.CONFIRMED, Phase.ROLLED_BACK, Phase.SUPERSEDED}),
    Phase.CONFIRMED: frozenset({Phase.ROLLED_BACK}),
    # An intent that was given up may turn out to have been committed: what key-value showed, happened.
    Phase.ABORTED: frozenset({Phase.SHADOW, Phase.CANARY, Phase.CONFIRMED}),
    Phase.SUPERSEDED: frozenset({Phase.SHADOW, Phase.CANARY, Phase.CONFIRMED}),
    Phase.ROLLED_BACK: frozenset(),
}


def may_follow(before: Phase, after: Phase) -> bool:
    """Whether the record of a promotion may go from `before` to `after`."""
    return after in _WAYS[before]
