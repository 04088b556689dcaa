"""Where engines spend their time, and on which experts, added up over reports, workers and windows."""

from collections import defaultdict
from collections.abc import Iterable

from polymorph.events.values import Operation


class Operations:
    """Time by operation and M. Reports add up by the step time that they are shares of."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._by_m: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._experts: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, operations: Iterable[Operation], step_s: float) -> None:
        """`operations` hold shares of `step_s` seconds of engine steps."""
        self._step_s += step_s
        for operation in operations:
            self._seconds[operation.definition] += operation.share * step_s
            for upper, share in operation.by_m.items():
                self._by_m[operation.definition][upper] += share * step_s
            for rank, share in enumerate(operation.experts):
                self._experts[operation.definition][rank] += share * operation.share * step_s

    def shares(self) -> tuple[Operation, ...]:
        """Shares of all the step time, the largest first; none where no step was told of."""
        if not self._step_s:
            return ()
        ranked = sorted(self._seconds.items(), key=lambda item: (-item[1], item[0]))
        return tuple(self._share(name, seconds) for name, seconds in ranked)

    def _share(self, name: str, seconds: float) -> Operation:
        by_m = {upper: s / self._step_s for upper, s in sorted(self._by_m[name].items(), key=_by_number)}
        return Operation(
            definition=name, share=seconds / self._step_s, by_m=by_m, experts=self._histogram(name)
        )

    def _histogram(self, name: str) -> tuple[float, ...]:
        pairs = self._experts[name]
        total = sum(pairs.values())
        return tuple(pairs[rank] / total for rank in sorted(pairs)) if total else ()


def _by_number(item: tuple[str, float]) -> int:
    return int(item[0])
