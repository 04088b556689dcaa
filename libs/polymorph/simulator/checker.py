"""Invariant 4 of the architecture and what it rests on, checked over a whole run.

Safety: generations only grow, one winner for each base, nothing reported that was not shown. Liveness, once faults
have stopped and the reconciler has passed: everything shown is in the record and was reported, nothing is left open.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from polymorph.events.state import DesiredState
from polymorph.events.types import PromotionAdvanced, PromotionCompleted, PromotionRolledBack
from polymorph.ledger.tables import PromotionRow, StepRow, StepStatus
from polymorph.simulator.journal import Journal

Report = PromotionAdvanced | PromotionCompleted | PromotionRolledBack


def violations(
    journal: Journal, steps: Sequence[StepRow], promotions: Sequence[PromotionRow] = ()
) -> list[str]:
    """Every breach of the invariants, as sentences; empty where all hold."""
    found: list[str] = []
    for pool in journal.pools():
        states = journal.states(pool)
        reports = [event for event in journal.told if isinstance(event, Report) and event.pool == pool]
        own = [step for step in steps if step.pool == pool]
        found += growth(states)
        found += phantom_reports(states, reports)
        found += lost_reports(states, reports)
        found += record_disagrees(states, own)
        found += double_winners(own)
        found += phases_disagree(states[-1], reports, [row for row in promotions if row.pool == pool])
    return found


def growth(states: Sequence[DesiredState]) -> Iterator[str]:
    """A generation that did not grow: a fencing token that fences nothing."""
    for before, after in itertools.pairwise(states):
        if after.generation <= before.generation:
            yield f"{after.pool}: generation {after.generation} was shown after {before.generation}"


def phantom_reports(states: Sequence[DesiredState], reports: Iterable[Report]) -> Iterator[str]:
    """A report whose state was never shown."""
    by_generation = {state.generation: state for state in states}
    for report in reports:
        state = by_generation.get(report.generation)
        if state is None or not _agrees(report, state):
            yield f"{report.pool}: {report.NAME} of generation {report.generation} was reported but not shown"


def lost_reports(states: Sequence[DesiredState], reports: Iterable[Report]) -> Iterator[str]:
    """A change that was shown and never reported."""
    reported = {report.generation for report in reports}
    for before, after in itertools.pairwise(states):
        same = (before.stable, before.candidate, before.stage, before.share) == (
            after.stable,
            after.candidate,
            after.stage,
            after.share,
        )
        if not same and after.generation not in reported:
            yield f"{after.pool}: generation {after.generation} was shown but not reported"


def record_disagrees(states: Sequence[DesiredState], steps: Iterable[StepRow]) -> Iterator[str]:
    """A step whose status is not what key-value showed."""
    shown = {state.generation: state.model_copy(update={"signature": None}) for state in states}
    for step in steps:
        state = shown.pop(step.generation, None)
        if (state is not None) != (step.status == StepStatus.CONFIRMED):
            told = "shown" if state else "not shown"
            yield f"{step.pool}: generation {step.generation} is {step.status} in the record and was {told}"
        if state is not None and state != DesiredState.model_validate(step.target):
            yield f"{step.pool}: generation {step.generation} was shown other than recorded"
        elif step.status == StepStatus.INTENT:
            yield f"{step.pool}: generation {step.generation} is still an intent"
    for state in shown.values():
        if state.generation > 0:
            yield f"{state.pool}: generation {state.generation} was shown without an intent in the record"


def double_winners(steps: Iterable[StepRow]) -> Iterator[str]:
    """Two confirmed steps on one base: two winners of one race."""
    winners: dict[int, int] = {}
    for step in steps:
        if step.status != StepStatus.CONFIRMED:
            continue
        if step.base_generation in winners:
            first = winners[step.base_generation]
            yield f"{step.pool}: generations {first} and {step.generation} both won over {step.base_generation}"
        winners[step.base_generation] = step.generation


def phases_disagree(
    last: DesiredState, reports: Iterable[Report], promotions: Iterable[PromotionRow]
) -> Iterator[str]:
    """A promotion whose phase is not what key-value shows, or what was told of it."""
    completed = {report.promotion_id for report in reports if isinstance(report, PromotionCompleted)}
    expected = "confirmed" if last.candidate is None else last.stage.value
    for row in promotions:
        name = f"{row.pool}: promotion {row.promotion_id} is {row.phase}"
        if row.phase == "intent":
            yield f"{name}: nobody finished it"
        if row.promotion_id == last.promotion_id and row.phase != expected:
            yield f"{name}, and key-value shows it as {expected}"
        if row.promotion_id != last.promotion_id and row.phase in {"shadow", "canary"}:
            yield f"{name}, and key-value does not show it"
        if row.phase == "confirmed" and row.promotion_id not in completed:
            yield f"{name}, and nobody was told"
        if row.promotion_id in completed and row.phase not in {"confirmed", "rolled-back"}:
            yield f"{name}, and was told as completed"


def _agrees(report: Report, state: DesiredState) -> bool:
    match report:
        case PromotionCompleted():
            return state.stable == report.revision and state.candidate is None
        case PromotionAdvanced(stage="full"):
            return state.stable == report.revision
        case PromotionAdvanced():
            return state.candidate == report.revision and state.share == report.share
        case PromotionRolledBack():
            return state.stable == report.back_to
