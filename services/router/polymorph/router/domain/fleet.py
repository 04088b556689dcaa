"""The workers that the router knows, with the time it last heard of each."""

from polymorph.events.state import WorkerRecord


class Fleet:
    """Live workers by pool. Times are monotonic seconds."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._records: dict[str, WorkerRecord] = {}
        self._heard: dict[str, float] = {}

    def put(self, record: WorkerRecord, now: float) -> None:
        self._records[record.worker_id] = record
        self._heard[record.worker_id] = now

    def remove(self, worker_id: str) -> None:
        self._records.pop(worker_id, None)
        self._heard.pop(worker_id, None)

    def expire(self, now: float) -> list[str]:
        """Removes workers that went silent; returns their ids."""
        silent = [worker_id for worker_id, heard in self._heard.items() if now - heard > self._ttl_s]
        for worker_id in silent:
            self.remove(worker_id)
        return silent

    def ready(self, pool: str) -> list[WorkerRecord]:
        return [r for r in self._records.values() if r.pool == pool and r.state == "ready"]

    def takers(self, pool: str) -> list[WorkerRecord]:
        """Ready workers; where there is none, those that hold requests until their next engine serves."""
        holding = (r for r in self._records.values() if r.pool == pool and r.holds)
        return self.ready(pool) or list(holding)

    def count(self, pool: str) -> int:
        return len(self.ready(pool))

    def any_ready(self) -> bool:
        return any(record.state == "ready" for record in self._records.values())

    def model_of(self, pool: str) -> str | None:
        """The served name of a pool's model; None where no worker of it is known."""
        return next((r.model for r in self._records.values() if r.pool == pool), None)
