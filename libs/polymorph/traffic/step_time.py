"""Where all steps spend their time, told from the few that were profiled."""

from collections import defaultdict
from collections.abc import Mapping

from polymorph.events.values import SampledSteps, StepTime

UNREACHABLE = frozenset({"other", "rest"})


class StepTimes:
    """Adds up reports. Steps of one size stand for the steps of that size: they weigh by the time of all of them."""

    def __init__(self) -> None:
        self._sampled = 0
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, sampled_by_m: Mapping[str, SampledSteps]) -> None:
        for m, sampled in sampled_by_m.items():
            self._sampled += sampled.steps
            for family, seconds in sampled.seconds.items():
                self._seconds[m][family] += seconds

    def told(self, step_s_by_m: Mapping[str, float]) -> StepTime | None:
        """Shares over all steps; `step_s_by_m` is the time of all of them. None where none was profiled."""
        shares: defaultdict[str, float] = defaultdict(float)
        total = 0.0
        for m, families in self._seconds.items():
            told, weight = sum(families.values()), step_s_by_m.get(m, 0.0)
            if told <= 0 or weight <= 0:
                continue
            total += weight
            for family, seconds in families.items():
                shares[family] += weight * seconds / told
        if not total:
            return None
        ranked = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
        by_family = {family: share / total for family, share in ranked}
        reachable = sum(share for family, share in by_family.items() if family not in UNREACHABLE)
        return StepTime(shares=by_family, reachable=min(1.0, reachable), sampled_steps=self._sampled)
