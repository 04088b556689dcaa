"""Where a request goes: filter, score, pick."""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker with what it has in flight. A capacity of 0 is unknown and never full."""

    worker_id: str
    url: str
    tokens: int
    requests: int
    capacity_tokens: int = 0
    capacity_requests: int = 0

    def has_room(self, demand: int) -> bool:
        """Whether `demand` more tokens fit. An idle worker takes any request: none is too large for ever."""
        if not self.requests:
            return True
        if self.capacity_requests and self.requests + 1 > self.capacity_requests:
            return False
        return not self.capacity_tokens or self.tokens + demand <= self.capacity_tokens


def eligible(candidates: Iterable[Candidate], exclude: Collection[str]) -> list[Candidate]:
    """Those that did not just fail this request."""
    return [candidate for candidate in candidates if candidate.worker_id not in exclude]


def pick(
    candidates: Iterable[Candidate],
    demand: int,
    placement_id: str,
    *,
    home: str | None = None,
    margin: int = 0,
) -> Candidate | None:
    """The worker with room and the fewest tokens in flight; None where all are full.

    `home` goes first while it has room and at most `margin` tokens more in flight than that worker: its cache holds the
    prefix. Ties go to the fewest requests, then to a hash of placement and worker, so that equal workers share.
    """
    roomy = [candidate for candidate in candidates if candidate.has_room(demand)]
    best = min(roomy, key=lambda candidate: _score(candidate, placement_id), default=None)
    if best is None or home is None:
        return best
    near = (c for c in roomy if c.worker_id == home and c.tokens <= best.tokens + margin)
    return next(near, best)


def _score(candidate: Candidate, placement_id: str) -> tuple[int, int, bytes]:
    spread = hashlib.blake2b(f"{placement_id}\n{candidate.worker_id}".encode(), digest_size=8).digest()
    return candidate.tokens, candidate.requests, spread
