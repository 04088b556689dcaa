"""What each worker has in flight, by our own count: it is there before the answer leaves."""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request that was sent to a worker. `since` is monotonic seconds."""

    request_id: str
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

    def reserve(self, request_id: str, worker_id: str, tokens: int, now: float) -> None:
        """Counts a request; one that is sent again counts only where it is now."""
        self.release(request_id)
        self._by_request[request_id] = Reservation(request_id, worker_id, tokens, now)
        load = self._loads[worker_id]
        load.tokens += tokens
        load.requests += 1
        self._mean_tokens += 0.05 * (tokens - self._mean_tokens)

    def seen(self, request_id: str, worker_id: str, now: float) -> None:
        """Counts a request that somebody else placed, at the mean size."""
        known = self._by_request.get(request_id)
        if known is None or known.worker_id != worker_id:
            self.reserve(request_id, worker_id, known.tokens if known else round(self._mean_tokens), now)

    def release(self, request_id: str) -> bool:
        """Whether the request was counted; releasing twice is harmless."""
        known = self._by_request.pop(request_id, None)
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
        for request_id in [r.request_id for r in self._by_request.values() if r.worker_id == worker_id]:
            self.release(request_id)
        self._loads.pop(worker_id, None)

    def settle_idle(self, worker_id: str, before: float) -> int:
        """Drops what a worker that says it is idle cannot have any more: reservations older than `before`."""
        stale = [
            r.request_id for r in self._by_request.values() if r.worker_id == worker_id and r.since < before
        ]
        for request_id in stale:
            self.release(request_id)
        return len(stale)

    def expire(self, now: float) -> int:
        """Drops reservations past their time to live; returns how many."""
        stale = [r.request_id for r in self._by_request.values() if now - r.since > self._ttl_s]
        for request_id in stale:
            self.release(request_id)
        return len(stale)
