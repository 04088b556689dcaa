"""How long a worker tries what is desired before what ran before it comes back, and when it tries again."""

from dataclasses import dataclass

RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses between tries of one goal; the last one stays."""
_OFF_S, _OFF_MOST_S = 60.0, 900.0


@dataclass
class Trying:
    """Of one goal, which is a generation and a revision. Seconds are the caller's, and monotonic."""

    failures: int = 0
    _goal: tuple[int, str] | None = None
    _returns: int = 0
    _off_until_s: float = 0.0

    @property
    def pause_s(self) -> float | None:
        """Before the next try; None where none has failed."""
        return RETRY_S[min(self.failures, len(RETRY_S)) - 1] if self.failures else None

    @property
    def owed_first(self) -> bool:
        """Whether what ran before has its turn: from then on both have, one after the other, since either may not come."""
        late = self.failures - len(RETRY_S)
        return late > 0 and late % 2 == 1

    def of(self, goal: tuple[int, str]) -> None:
        """Another goal than before has not failed yet."""
        if goal != self._goal:
            self.anew()
            self._goal = goal

    def anew(self) -> None:
        """Whatever it failed with may be gone."""
        self.failures, self._returns, self._off_until_s = 0, 0, 0.0

    def put_off(self, now_s: float) -> float:
        """What ran before is back. The way there and back may take restarts, which a goal that goes on failing must not
        cost again and again: it is tried after `seconds`, and twice as many each time.
        """
        seconds = min(_OFF_S * 2.0**self._returns, _OFF_MOST_S)
        self._returns += 1
        self._off_until_s = now_s + seconds
        return seconds

    def off(self, now_s: float) -> bool:
        return now_s < self._off_until_s
