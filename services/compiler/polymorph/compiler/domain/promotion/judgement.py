"""Three outcomes of looking at a canary: advance, hold, roll back. No data is not success."""

from dataclasses import dataclass
from enum import StrEnum

from polymorph.compiler.domain.promotion.policy import Policy
from polymorph.events.values import Ratio


class Outcome(StrEnum):
    ADVANCE = "advance"
    HOLD = "hold"
    ROLL_BACK = "roll-back"


@dataclass(frozen=True, slots=True)
class Reading:
    """A canary against the control that started at the same time.

    `speedup` is an always-valid interval, so that looking often costs nothing; None where there is no data.
    """

    speedup: Ratio | None
    samples: int
    stage_age_s: float
    errors: int = 0


def judge(reading: Reading, policy: Policy) -> tuple[Outcome, str]:
    """What to do, and why."""
    if reading.errors >= 1:
        return Outcome.ROLL_BACK, f"{reading.errors} requests failed under the candidate"
    late = reading.stage_age_s >= policy.patience_s
    if reading.speedup is None or reading.samples < policy.minimum_samples:
        few = f"{reading.samples} of {policy.minimum_samples} samples after {reading.stage_age_s:.0f} s"
        return (Outcome.ROLL_BACK if late else Outcome.HOLD), few
    interval = f"speed-up {reading.speedup.low:.3f} to {reading.speedup.high:.3f}"
    if reading.speedup.high < policy.harmful_high:
        return Outcome.ROLL_BACK, f"{interval}: slower than the control"
    if reading.speedup.low >= policy.minimum_low:
        return Outcome.ADVANCE, interval
    if late:
        return Outcome.ROLL_BACK, f"{interval} is still undecided after {reading.stage_age_s:.0f} s"
    return Outcome.HOLD, f"{interval} is undecided"
