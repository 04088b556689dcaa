"""Kernel calls that do not end."""

from collections.abc import Iterable

from polymorph.engine.flight import Flight


class Hanging:
    """Counts how long each call was seen in flight by us: a worker that was stopped itself has seen nothing."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[Flight, float] = {}

    def look(self, flights: Iterable[Flight], elapsed_s: float) -> Flight | None:
        """The call that has been in flight for too long, with what is in flight now, `elapsed_s` after the last look."""
        self._seen = {flight: self._seen.get(flight, -elapsed_s) + elapsed_s for flight in flights}
        longest = max(self._seen, key=lambda flight: self._seen[flight], default=None)
        return longest if longest is not None and self._seen[longest] >= self._limit_s else None


def blamed(flights: Iterable[Flight]) -> Flight | None:
    """Whose call took the engine down: the first that began, for the other ranks came as far only after it."""
    return min(flights, key=lambda flight: flight.began_ns, default=None)
