"""The workers that the gateway knows, kept through times without a registry.

A worker that the registry no longer names, that went silent or refused a connection is suspect: it still counts until a
direct probe fails.
"""

from collections.abc import Collection
from dataclasses import dataclass

from polymorph.events.state import WorkerRecord

_SOFT_FAILURES = 3
_DEAD_PROBE_S = 5.0


@dataclass(slots=True)
class Member:
    """One worker; times are monotonic seconds.

    `absent`: no registry vouches for it, so only probes tell whether it lives. `suspect`: not even a probe has, lately.
    """

    record: WorkerRecord
    heard: float
    static: bool = False
    absent: bool = False
    suspect: bool = False
    dead: bool = False
    failures: int = 0
    probe_at: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetRules:
    """Seconds."""

    suspect_after_s: float = 12.0
    forget_after_s: float = 600.0


class Fleet:
    """Pure: the time comes with each call."""

    def __init__(self, rules: FleetRules | None = None) -> None:
        self._rules = rules or FleetRules()
        self._members: dict[str, Member] = {}

    def put(self, record: WorkerRecord, now: float, *, static: bool = False) -> bool:
        """Takes a heartbeat; whether it changes what is worth keeping on disk."""
        known = self._members.get(record.worker_id)
        self._members[record.worker_id] = Member(record, now, static=static)
        return known is None or _identity(known.record) != _identity(record)

    def remember(self, record: WorkerRecord, now: float) -> None:
        """Takes a worker from an earlier run: suspect until it is heard of or probed."""
        if record.worker_id not in self._members:
            self._members[record.worker_id] = Member(record, now, absent=True, suspect=True)

    def depart(self, worker_id: str, now: float) -> None:
        """The registry dropped it: from here on probes decide."""
        member = self._members.get(worker_id)
        if member is not None:
            member.absent = True
        self.doubt(worker_id, now)

    def doubt(self, worker_id: str, now: float) -> None:
        """A request could not reach it: look at it now."""
        member = self._members.get(worker_id)
        if member is not None:
            member.suspect = True
            member.probe_at = now

    def confirm(self, worker_id: str, now: float) -> None:
        """A probe succeeded. A worker last known as starting is ready by now."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.suspect = member.dead = False
        member.failures = 0
        member.heard = now
        if member.record.state == "starting":
            member.record = member.record.model_copy(update={"state": "ready"})

    def refute(self, worker_id: str, now: float, *, refused: bool) -> bool:
        """A probe failed. Only a refused connection is proof; a slow answer may be load, and is believed thrice.

        Returns whether the worker is dead by now.
        """
        member = self._members.get(worker_id)
        if member is None:
            return False
        member.suspect = True
        member.failures += 1
        if refused or member.failures >= _SOFT_FAILURES:
            member.dead = True
            member.probe_at = now + _DEAD_PROBE_S
        if member.dead and not member.static and now - member.heard > self._rules.forget_after_s:
            del self._members[worker_id]
        return member.dead

    def to_probe(self, now: float) -> list[WorkerRecord]:
        """Who must be looked at now."""
        for member in self._members.values():
            if not (member.static or member.absent) and now - member.heard > self._rules.suspect_after_s:
                member.absent = member.suspect = True
        return [
            m.record
            for m in self._members.values()
            if (m.suspect or m.absent or m.static) and m.probe_at <= now
        ]

    def live(self, model: str, exclude: Collection[str] = ()) -> list[WorkerRecord]:
        """Workers that may serve `model`: those without doubt, else the suspect, else those that hold requests until
        their next engine serves, else (never none) the dead.
        """
        named = [
            m for m in self._members.values() if m.record.model == model and m.record.worker_id not in exclude
        ]
        ready = [m for m in named if m.record.state == "ready"]
        living = [m for m in ready if not m.dead]
        found = (
            [m for m in living if not m.suspect]
            or living
            or [m for m in named if m.record.holds and not m.dead]
            or ready
        )
        return [m.record for m in found]

    def routed(self, model: str) -> bool:
        """Whether the router may know a worker of `model`: one that the registry told of."""
        return any(m.record.model == model and not m.static for m in self._members.values())

    def knows(self, model: str) -> bool:
        return any(m.record.model == model for m in self._members.values())

    def names(self) -> set[str]:
        """Every model that a worker is for, whether it serves now or not."""
        return {member.record.model for member in self._members.values()}

    def models(self) -> list[WorkerRecord]:
        """One worker for each model that is served now, by name."""
        by_name = {m.record.model: m.record for m in self._members.values() if self._serves(m)}
        return [by_name[name] for name in sorted(by_name)]

    def ready(self) -> bool:
        return any(self._serves(member) for member in self._members.values())

    def records(self) -> list[WorkerRecord]:
        """What is kept on disk: everyone that the registry told of and that is not dead."""
        return [m.record for m in self._members.values() if not m.static and not m.dead]

    @staticmethod
    def _serves(member: Member) -> bool:
        return (member.record.state == "ready" or member.record.holds) and not member.dead


def _identity(record: WorkerRecord) -> tuple[str, str, str, str]:
    return record.model, record.pool, record.url, record.state
