"""The right to time: bursts in which nothing else of ours uses the host's cores."""

from typing import Protocol


class HostBusy(RuntimeError):
    """The host's cores were not given within the time that the evaluator waits for them."""


class Host(Protocol):
    """Grants bursts of at most 0.3 s. `stolen_s` is how long engines stood still for them."""

    stolen_s: float
    bursts: int

    def ensure(self, seconds: float) -> None:
        """Returns with at least `seconds` left in a burst, or with as much as a burst has. Raises `HostBusy`."""
        ...

    def release(self) -> None:
        """Ends the burst; without one does nothing."""
        ...


class FreeHost:
    """Nobody serves on this host: every moment is ours."""

    def __init__(self) -> None:
        self.stolen_s = 0.0
        self.bursts = 0

    def ensure(self, seconds: float) -> None:
        del seconds

    def release(self) -> None:
        pass
