"""Requests that wait for room, in the order they came."""

from dataclasses import dataclass

from polymorph.events.requests import PlaceRequest


@dataclass(frozen=True, slots=True)
class Waiting:
    """A held request; `deadline` is monotonic seconds."""

    request: PlaceRequest
    deadline: float


class Line:
    """One line a pool."""

    def __init__(self) -> None:
        self._by_pool: dict[str, dict[str, Waiting]] = {}

    def join(self, request: PlaceRequest, deadline: float) -> None:
        self._by_pool.setdefault(request.pool, {})[request.placement_id] = Waiting(request, deadline)

    def leave(self, placement_id: str) -> bool:
        """Whether the request stood in a line."""
        return any(pool.pop(placement_id, None) is not None for pool in self._by_pool.values())

    def length(self, pool: str) -> int:
        return len(self._by_pool.get(pool, {}))

    def pools(self) -> list[str]:
        return [pool for pool, waiting in self._by_pool.items() if waiting]

    def waiting(self, pool: str) -> list[Waiting]:
        return list(self._by_pool.get(pool, {}).values())

    def overdue(self, now: float) -> list[Waiting]:
        """Takes out those whose deadline has come."""
        late = [w for pool in self._by_pool.values() for w in pool.values() if w.deadline <= now]
        for waiting in late:
            self.leave(waiting.request.placement_id)
        return late
