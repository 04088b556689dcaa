"""Revisions that served here, newest last: where to go back to."""

from collections import deque
from dataclasses import dataclass
from typing import Self

from polymorph.events.state import EMPTY
from polymorph.events.values import Revision
from polymorph.worker.faults import Faults
from polymorph.worker.loading import InForce

_KEPT = 8


@dataclass(frozen=True)
class AtWork:
    """What ran, or was about to, when an engine died; `definition` is the operation that was being computed."""

    generation: int
    revision: str
    definition: str
    leavable: bool

    @classmethod
    def of(cls, generation: int, ran: Revision, artifact: str | None) -> Self:
        definition = kernels(ran).get(artifact or "", "unknown")
        return cls(generation, ran.revision, definition, leavable=ran.revision != EMPTY.revision)


class Served:
    """What served before the revision of now, and what is being tried."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._before: deque[InForce] = deque(maxlen=_KEPT)
        self.trying = EMPTY

    def at_work(self, now: Revision, artifact: str | None, *, unsure: bool) -> Revision:
        """What holds `artifact`, else what ran; `unsure` where that may be what is being tried."""
        found = [each for each in (now, self.trying) if artifact in kernels(each)]
        return found[0] if found else self.trying if unsure else now

    def add(self, loaded: InForce) -> None:
        """Another took the place of `loaded`."""
        self._before = deque((each for each in self._before if each.revision != loaded.revision), _KEPT)
        self._before.append(loaded)

    def last_good(self, now: InForce) -> InForce | None:
        """`now`, else the newest before it, that was not left and has no kernel that is banned."""
        return next((each for each in (now, *reversed(self._before)) if self._good(each)), None)

    def _good(self, loaded: InForce) -> bool:
        return self._faults.left(loaded.revision) is None and not self._faults.banned(
            kernels(loaded.revision)
        )


def kernels(revision: Revision) -> dict[str, str]:
    """Artifact -> the operation that it computes."""
    return {kernel.artifact: kernel.definition for kernel in revision.kernels}
