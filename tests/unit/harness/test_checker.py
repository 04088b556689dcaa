"""Each invariant of the checker, with a history that breaks just that one."""

import datetime as dt

import pytest

from polymorph.events.state import DesiredState, Mode
from polymorph.events.types import PromotionCompleted
from polymorph.events.values import Revision
from polymorph.ledger.tables import StepRow, StepStatus
from polymorph.simulator.checker import violations
from polymorph.simulator.journal import Journal

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
R1, R2 = Revision(revision="r-1"), Revision(revision="r-2")


def state(generation, **more):
    return DesiredState(pool="p", generation=generation, mode=Mode.CANARY, **more)


def told(generation, revision):
    return PromotionCompleted(
        pool="p", promotion_id="p1", generation=generation, revision=revision, speedup=None, reason="faster"
    )


def step(generation, base, status, target):
    return StepRow(
        pool="p",
        generation=generation,
        base_generation=base,
        action="begin",
        status=status,
        reason="faster",
        target=target.model_dump(mode="json", exclude={"signature"}),
        messages=[],
        phases={},
        created_at=NOW,
    )


FIRST, SECOND = state(1, stable=R1), state(2, stable=R2)
SHOWN = [state(0), FIRST, SECOND]
TOLD = [told(1, R1), told(2, R2)]
STEPS = [step(1, 0, StepStatus.CONFIRMED, FIRST), step(2, 1, StepStatus.CONFIRMED, SECOND)]


def test_a_clean_history_has_no_violations():
    again = [*SHOWN, SECOND]
    assert violations(Journal(again, list(TOLD)), STEPS) == []


@pytest.mark.parametrize(
    ("shown", "events", "steps", "sentence"),
    [
        ([*SHOWN, FIRST], TOLD, STEPS, "p: generation 1 was shown after 2"),
        (SHOWN[:2], TOLD, [STEPS[0]], "p: completed of generation 2 was reported but not shown"),
        (SHOWN, [TOLD[0], told(2, R1)], STEPS, "p: completed of generation 2 was reported but not shown"),
        (SHOWN, TOLD[:1], STEPS, "p: generation 2 was shown but not reported"),
        (
            SHOWN,
            TOLD,
            [STEPS[0], step(2, 1, StepStatus.INTENT, SECOND)],
            "p: generation 2 is intent in the record and was shown",
        ),
        (
            SHOWN[:2],
            TOLD[:1],
            STEPS,
            "p: generation 2 is confirmed in the record and was not shown",
        ),
        (
            SHOWN,
            TOLD,
            [STEPS[0], step(2, 1, StepStatus.CONFIRMED, FIRST)],
            "p: generation 2 was shown other than recorded",
        ),
        (SHOWN, TOLD, STEPS[:1], "p: generation 2 was shown without an intent in the record"),
        (
            SHOWN,
            TOLD,
            [STEPS[0], step(2, 0, StepStatus.CONFIRMED, SECOND)],
            "p: generations 1 and 2 both won over 0",
        ),
        (
            SHOWN,
            TOLD,
            [*STEPS, step(3, 2, StepStatus.INTENT, state(3))],
            "p: generation 3 is still an intent",
        ),
    ],
)
def test_each_breach_is_named(shown, events, steps, sentence):
    assert sentence in violations(Journal(list(shown), list(events)), steps)
