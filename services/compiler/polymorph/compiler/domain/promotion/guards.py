"""What forbids a change of a pool's desired state now."""

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from polymorph.events.state import DesiredState, Freeze, Mode, Quarantine

EVERY_POOL = "all"


class Hindrance(StrEnum):
    """Why nothing moves. After a freeze, a pause or an approval the promotion may go on."""

    OBSERVE = "observe"
    PINNED = "pinned"
    FROZEN = "frozen"
    PAUSED = "paused"
    APPROVAL = "approval"
    QUARANTINE = "quarantine"
    EVIDENCE = "evidence"
    NOTHING = "nothing-new"


PASSING = frozenset({Hindrance.FROZEN, Hindrance.PAUSED, Hindrance.APPROVAL})


@dataclass(frozen=True, slots=True)
class Guards:
    """The operator's keys as they stand for one pool."""

    freeze: str | None = None
    pause: str | None = None
    quarantined: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(
        cls,
        pool: str,
        now: dt.datetime,
        *,
        freezes: Mapping[str, Freeze],
        pauses: Mapping[str, Freeze],
        quarantines: Iterable[Quarantine],
    ) -> "Guards":
        """What holds for `pool` at `now`; windows that have not begun or are over don't."""
        return cls(
            freeze=_window(pool, now, freezes),
            pause=_window(pool, now, pauses),
            quarantined=frozenset(
                entry.artifact for entry in quarantines if _holds(now, entry.since, entry.until)
            ),
        )


def hindrance(current: DesiredState, guards: Guards) -> tuple[Hindrance, str] | None:
    """What keeps the loop from changing `current` by itself."""
    if current.mode in {Mode.OBSERVE, Mode.PINNED}:
        return Hindrance(current.mode.value), f"the pool's mode is {current.mode}"
    if guards.freeze is not None:
        return Hindrance.FROZEN, f"frozen: {guards.freeze}"
    if guards.pause is not None:
        return Hindrance.PAUSED, f"paused: {guards.pause}"
    return None


def _window(pool: str, now: dt.datetime, windows: Mapping[str, Freeze]) -> str | None:
    for key in (pool, EVERY_POOL):
        window = windows.get(key)
        if window is not None and _holds(now, window.since, window.until):
            return window.reason
    return None


def _holds(now: dt.datetime, since: dt.datetime, until: dt.datetime | None) -> bool:
    return since <= now and (until is None or now < until)
