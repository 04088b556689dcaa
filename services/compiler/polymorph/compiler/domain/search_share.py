"""The share of engine step time that an operation has: by the slots' timers, corrected by steps that were profiled."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from polymorph.events.values import Operation, StepTime, Value
from polymorph.kernels.definitions import slot_of

LEAST_SAMPLED = 3
"""Fewer profiled steps may all have been of one kind."""
MOST_RAISED = 2.0
"""A slot's family counts its operators wherever they are called. What its timers see less than half of runs elsewhere."""


class Profiled(Value):
    """What profiled steps said of the slot that an operation is called through."""

    slot: str
    slot_share: float
    reachable: float
    sampled_steps: int


class Share(Value):
    """Of all the step time, in [0, 1]; `profiled` is None where the timers alone tell it."""

    share: float
    profiled: Profiled | None = None


def measured(operations: Iterable[Operation], step_time: StepTime | None) -> Mapping[str, Share]:
    """Share by definition.

    Timers see one slot's calls against steps as the front counts them, a profile sees whole steps from inside, by slot
    alone: so a slot's share is the profile's, and is split between its operations as the timers say.
    """
    listed = tuple(operations)
    timed: defaultdict[str | None, float] = defaultdict(float)
    for operation in listed:
        timed[_slot(operation)] += operation.share
    return {each.definition: _share(each, timed[_slot(each)], step_time) for each in listed}


def _share(operation: Operation, timed: float, step_time: StepTime | None) -> Share:
    slot = _slot(operation)
    told = None if step_time is None or slot is None else step_time.shares.get(slot)
    if step_time is None or slot is None or told is None or not timed:
        return Share(share=min(1.0, operation.share))
    if step_time.sampled_steps < LEAST_SAMPLED:
        return Share(share=min(1.0, operation.share))
    held = min(told, timed * MOST_RAISED, 1.0)
    return Share(
        share=held * operation.share / timed,
        profiled=Profiled(
            slot=slot,
            slot_share=told,
            reachable=step_time.reachable,
            sampled_steps=step_time.sampled_steps,
        ),
    )


def _slot(operation: Operation) -> str | None:
    """None for an operation of another release, which no slot here is known for."""
    try:
        return slot_of(operation.definition)
    except ValueError:
        return None
