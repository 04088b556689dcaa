"""What other routers have not been told yet."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from polymorph.router.domain.programs import Program


class Announcements:
    """The last worker of each program, oldest first. Where it is full the oldest goes untold."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._untold: OrderedDict[Program, str] = OrderedDict()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._untold)

    def put(self, program: Program, worker_id: str) -> None:
        """Replaces what was to be told of the program before."""
        self._untold[program] = worker_id
        self._untold.move_to_end(program)
        while len(self._untold) > self._limit:
            self._untold.popitem(last=False)
            self._dropped += 1

    def oldest(self, count: int) -> list[tuple[Program, str]]:
        """They stay until `told`, so that nothing is lost where telling fails."""
        return list(islice(self._untold.items(), count))

    def told(self, announced: Iterable[tuple[Program, str]]) -> None:
        """Removes those that were not replaced meanwhile."""
        for program, worker_id in announced:
            if self._untold.get(program) == worker_id:
                del self._untold[program]

    def take_dropped(self) -> int:
        """How many went untold since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped
