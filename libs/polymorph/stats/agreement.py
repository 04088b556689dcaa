"""Greedy agreement: how often two runs choose the same tokens, and where they part."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over pairs of greedy outputs: the share that are equal, and the mean position of the first difference.

    `first_difference` is in tokens over the outputs that differ, None where all are equal; `tokens` is the mean length of
    the first run's outputs.
    """

    requests: int
    equal: int
    first_difference: float | None
    tokens: float = 0.0

    @property
    def share(self) -> float:
        return self.equal / self.requests


def agreement(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Agreement:
    """Compares the outputs of two runs of the same requests, in the same order.

    Raises:
        ValueError: no requests, or another number of them on the two sides.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} and {len(second)} outputs: compare the same requests, at least 1")
    parts = [_first_difference(one, other) for one, other in zip(first, second, strict=True)]
    apart = [position for position in parts if position is not None]
    mean = sum(apart) / len(apart) if apart else None
    length = sum(len(one) for one in first) / len(first)
    return Agreement(len(parts), len(parts) - len(apart), mean, length)


def no_worse(candidate: Agreement, incumbent: Agreement) -> bool:
    """Whether the candidate agrees with the incumbent at least as often as the incumbent does with itself.

    One request of slack, since one flip among few requests is no evidence; none where the incumbent always agrees
    with itself over at least twenty requests. No slack makes an agreement of 0 pass, which shows nothing but that the
    two differ; nor one whose outputs part clearly earlier than the incumbent's own.
    """
    if candidate.equal == 0 or _parts_earlier(candidate, incumbent):
        return False
    slack = 0 if incumbent.equal == incumbent.requests and incumbent.requests >= 20 else 1
    scaled = incumbent.share * candidate.requests
    return candidate.equal >= scaled - slack


def _parts_earlier(candidate: Agreement, incumbent: Agreement) -> bool:
    """Before half of where the incumbent's outputs part on average, or in the first quarter where they never do."""
    if candidate.first_difference is None:
        return False
    if incumbent.first_difference is None:
        return candidate.first_difference <= candidate.tokens / 4
    return candidate.first_difference < incumbent.first_difference / 2


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))
