"""What the evaluator counts: verdicts by gate, once each, and whether it is at work."""

import datetime as dt
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.port import Delivery
from polymorph.config.clock import SystemClock
from polymorph.evaluator.adapters.records import Records
from polymorph.evaluator.domain.outcome import passed
from polymorph.evaluator.gates.pipeline import Job, Report
from polymorph.evaluator.handlers import Evaluating, Identity
from polymorph.events.envelope import wrap
from polymorph.events.state import EMPTY
from polymorph.events.types import EvaluateCandidate
from polymorph.events.values import Gate, Numerics
from polymorph.kernels.signing import Signer

EVALUATIONS = "polymorph_evaluator_evaluations_total"
BUSY = "polymorph_evaluator_busy"


class Gates:
    """A double of the pipeline: notes whether the evaluator says that it is busy."""

    def __init__(self) -> None:
        self.busy: list[float | None] = []

    def run(self, job: Job) -> Report:
        self.busy.append(REGISTRY.get_sample_value(BUSY))
        return Report([passed(Gate.G3_MICRO, "faster")])


class Fetching(Evaluating):
    """Has the documents of its order at hand."""

    async def _fetch(self, order: EvaluateCandidate) -> Job:
        class Extension:
            numerics = Numerics.REORDERED

        class Document:
            x_polymorph = Extension()

        return Job(order, cast("Any", Document()), cast("Any", Document()))


def _delivery(evaluation_id: str) -> Delivery:
    order = EvaluateCandidate(
        pool="p", search_id="s", candidate_id="c", evaluation_id=evaluation_id, hardware="h", definition="d",
        solution="none", workload="none", incumbent=EMPTY, until=Gate.G3_MICRO, min_m=1, max_m=4,
    )  # fmt: skip
    return Delivery(wrap(order, source="/test", time=dt.datetime.now(dt.UTC)), order, 1, 1)


def _count(gate: str, verdict: str) -> float:
    return REGISTRY.get_sample_value(EVALUATIONS, {"gate": gate, "verdict": verdict}) or 0.0


@pytest.mark.parametrize(
    ("kind", "gate", "verdict", "busy"), [(Fetching, "G3", "passed", [1.0]), (Evaluating, "G0", "failed", [])]
)
async def test_a_verdict_is_counted_once_though_its_order_comes_twice(
    tmp_path: Path, kind: type[Evaluating], gate: str, verdict: str, busy: list[float]
) -> None:
    bus, gates = InMemoryBus("/polymorph/evaluator/test", SystemClock()), Gates()
    evaluating = kind(
        bus,
        cast("Any", gates),
        Signer.generate(tmp_path / "key"),
        Records(tmp_path / "evaluations"),
        Identity("h", "f", "t", "none"),
    )
    before = _count(gate, verdict)
    for _ in range(2):
        await evaluating.handle(_delivery("e-1"))
    assert _count(gate, verdict) == before + 1
    assert gates.busy == busy
    assert REGISTRY.get_sample_value(BUSY) == 0
