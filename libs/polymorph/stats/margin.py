"""What a measured ratio says: better by a margin, worse, or nothing."""

from enum import StrEnum

from polymorph.events.values import Ratio


class Call(StrEnum):
    """The three outcomes; no difference that was shown is not the same as no difference."""

    BETTER = "better"
    NOT_BETTER = "not-better"
    UNDECIDED = "undecided"


def judge(ratio: Ratio, *, margin: float, widest: float) -> Call:
    """Better where the whole interval lies above 1 + margin.

    Undecided where the interval reaches across 1 + margin and is wider than `widest`: then the measurement was too
    noisy to say no. A narrow interval across the margin is a plain no.
    """
    bar = 1.0 + margin
    if ratio.low > bar:
        return Call.BETTER
    if ratio.high >= bar and ratio.high - ratio.low > widest:
        return Call.UNDECIDED
    return Call.NOT_BETTER
