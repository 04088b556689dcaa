"""What this worker should run, and whether a change still leads there."""

from dataclasses import dataclass

from polymorph.engine.loading.target import target
from polymorph.events.state import Reordered
from polymorph.events.values import Revision
from polymorph.worker.faults import Faults
from polymorph.worker.hearing import Hearing
from polymorph.worker.served import kernels
from polymorph.worker.service import InService
from polymorph.worker.waiting import News, Waiting


@dataclass(frozen=True)
class Change:
    """To another revision; `waiting` gives it up as soon as something else should come."""

    goal: Revision
    quarantined: set[str]
    waiting: Waiting


class Goals:
    """Of one worker, as heard."""

    def __init__(
        self, worker_id: str, hearing: Hearing, faults: Faults, service: InService, news: News
    ) -> None:
        self._worker_id = worker_id
        self._hearing = hearing
        self._faults = faults
        self._service = service
        self._news = news

    @property
    def desired(self) -> Revision:
        return target(self._hearing.desired, self._worker_id)

    @property
    def reordered(self) -> Reordered:
        desired = self._hearing.desired
        return Reordered.AT_ONCE if desired is None else desired.reordered

    def waiting(self, goal: Revision) -> Waiting:
        """For a change from what runs now to `goal`: from here on, whatever is heard may overtake it."""
        wanted, loaded = (self.desired, self.reordered), self._service.loaded

        def overtaken() -> str | None:
            if (self.desired, self.reordered) != wanted:
                return f"{goal.revision} still waited, and something else is desired now"
            if self._faults.banned(kernels(goal)):
                return f"{goal.revision} still waited, and a kernel of it came into quarantine"
            if self._service.loaded is not loaded or self._service.banned or self._service.unsure:
                return f"{goal.revision} still waited, and what ran before it is to be left"
            return None

        return Waiting(self._news, overtaken)
