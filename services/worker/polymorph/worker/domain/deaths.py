"""Deaths of engines that no kernel is blamed for, counted: when a revision is left, and when the worker gives up."""

from collections import deque
from dataclasses import dataclass, field

WITHIN_S = 600.0
UNDER_ONE = 3
MOST = 6
_PAUSES_S = (0.0, 0.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class Verdict:
    """What follows a death: `leave` the revision, `give_up` altogether, or start again after a pause."""

    leave: bool
    give_up: bool
    pause_s: float


@dataclass
class Deaths:
    """Of the last ten minutes. Times are monotonic seconds."""

    _seen: deque[tuple[float, str | None]] = field(default_factory=deque)

    def died(self, revision: str, *, blamed: bool, leavable: bool, now: float) -> Verdict:
        """One more death, under `revision`. `leavable` is not what has no kernels and no settings of its own."""
        while self._seen and now - self._seen[0][0] > WITHIN_S:
            self._seen.popleft()
        # Where a kernel is blamed and left, the revision without it may be as good as any.
        self._seen.append((now, None if blamed else revision))
        under = sum(seen == revision for _, seen in self._seen)
        leave = leavable and under >= UNDER_ONE
        if leave:  # what comes next is judged by itself
            self._seen = deque((at, None if seen == revision else seen) for at, seen in self._seen)
        count = len(self._seen)
        return Verdict(leave, count > MOST, _PAUSES_S[min(count, len(_PAUSES_S)) - 1])
