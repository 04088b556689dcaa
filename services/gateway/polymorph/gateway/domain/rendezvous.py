"""Placement without the router: highest random weight (Thaler and Ravishankar, 1998)."""

import hashlib
from collections.abc import Iterable

from polymorph.events.state import WorkerRecord


def rendezvous(key: str, workers: Iterable[WorkerRecord]) -> WorkerRecord | None:
    """The worker whose hash with `key` is highest; None where there is none.

    When a worker comes or goes, only the keys that move to it or from it change place.
    """
    return max(workers, key=lambda worker: _weight(key, worker.worker_id), default=None)


def _weight(key: str, worker_id: str) -> bytes:
    return hashlib.blake2b(f"{key}\n{worker_id}".encode(), digest_size=8).digest()
