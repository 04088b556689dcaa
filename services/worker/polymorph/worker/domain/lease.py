"""Bursts in which the evaluator has the host's cores to itself."""

from dataclasses import dataclass


@dataclass
class HostLease:
    """One lease of many bursts: what it took in all, reported when it ends."""

    lease_id: str
    bursts: int = 0
    stolen_s: float = 0.0

    def ended(self, paused_s: float) -> None:
        """A burst is over; the engine stood still for `paused_s`."""
        self.bursts += 1
        self.stolen_s += paused_s
