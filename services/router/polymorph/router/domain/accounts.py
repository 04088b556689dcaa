"""What each worker has in flight, by our own count: it is there before the answer leaves.

Counted by placement id: a request id is the client's, and requests that run at the same time may share one.
"""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request that was sent to a worker. `since` is monotonic seconds."""

    placement_id: str
    worker_id: str
    tokens: int
    since: float


@dataclass(slots=True)
class Load:
    """Tokens and requests in flight."""

    tokens: int = 0
    requests: int = 0


class Accounts:
    """Reservations by request; the sums by worker are kept, not computed."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._by_request: dict[str, Reservation] = {}
        self._loads: defaultdict[str, Load] = defaultdict(Load)
        self._mean_tokens = 256.0

    def reserve(self, placement_id: str, worker_id: str, tokens: int, now: float) -> None:
        """Counts a request; one that is sent again counts only where it is now."""
        self.release(placement_id)
        self._by_request[placement_id] = Reservation(placement_id, worker_id, tokens, now)
        load = self._loads[worker_id]
        load.tokens += tokens
        load.requests += 1
        self._mean_tokens += 0.05 * (tokens - self._mean_tokens)

    def seen(self, placement_id: str, worker_id: str, now: float) -> None:
        """Counts a request that somebody else placed, at the mean size."""
        known = self._by_request.get(placement_id)
        if known is None or known.worker_id != worker_id:
            self.reserve(placement_id, worker_id, known.tokens if known else round(self._mean_tokens), now)

    def release(self, placement_id: str) -> bool:
        """Whether the request was counted; releasing twice is harmless."""
        known = self._by_request.pop(placement_id, None)
        if known is None:
            return False
        load = self._loads[known.worker_id]
        load.tokens -= known.tokens
        load.requests -= 1
        return True

    def load(self, worker_id: str) -> Load:
        return self._loads.get(worker_id) or Load()

    def forget_worker(self, worker_id: str) -> None:
        """A worker that is gone has nothing in flight."""
        for placement_id in [r.placement_id for r in self._by_request.values() if r.worker_id == worker_id]:
            self.release(placement_id)
        self._loads.pop(worker_id, None)

    def settle_idle(self, worker_id: str, before: float) -> int:
        """Drops what a worker that says it is idle cannot have any more: reservations older than `before`."""
        stale = [
            r.placement_id for r in self._by_request.values() if r.worker_id == worker_id and r.since < before
        ]
        for placement_id in stale:
            self.release(placement_id)
        return len(stale)

    def expire(self, now: float) -> int:
        """Drops reservations past their time to live; returns how many."""
        stale = [r.placement_id for r in self._by_request.values() if now - r.since > self._ttl_s]
        for placement_id in stale:
            self.release(placement_id)
        return len(stale)
