"""The gates in their order, from cheap to dear; the first that does not pass ends an evaluation."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import Protocol

from polymorph.evaluator.adapters.sandbox.lane import Lane, SandboxBroken
from polymorph.evaluator.domain.captured import Captured, OwnInputs
from polymorph.evaluator.domain.operation import UnknownOperation, operation
from polymorph.evaluator.domain.outcome import Outcome, failed, inconclusive
from polymorph.evaluator.gates.building import Builder
from polymorph.evaluator.gates.correctness import Correctness
from polymorph.evaluator.gates.micro import Micro
from polymorph.evaluator.gates.subject import Incumbent, Subject
from polymorph.events.types import EvaluateCandidate
from polymorph.events.values import Gate, Revision
from polymorph.kernels.schema import Solution, TraceStatus, Workload

_ORDER = tuple(Gate)


@dataclass(frozen=True, slots=True)
class Job:
    """An order with the documents it names. `incumbents` are the artifacts of the revision that serves now, `captured`
    what workers gave of the operation's inputs.
    """

    order: EvaluateCandidate
    solution: Solution
    workload: Workload
    incumbents: dict[str, bytes] = field(default_factory=dict)
    layouts: dict[str, str | None] = field(default_factory=dict)
    captured: tuple[Captured, ...] = ()


@dataclass(slots=True)
class Report:
    """What came of a job."""

    outcomes: list[Outcome] = field(default_factory=list)
    library: bytes = b""
    largest_m: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    seeds: list[str] = field(default_factory=list)
    own: OwnInputs = field(default_factory=OwnInputs)

    @property
    def last(self) -> Outcome:
        return self.outcomes[-1]

    @property
    def artifact(self) -> str:
        return hashlib.sha256(self.library).hexdigest()


class EndToEnd(Protocol):
    """The gate that replays traffic in a warm engine."""

    def inputs(self, job: Job, *, wait: bool) -> OwnInputs:
        """Inputs of the operation as bundled texts make them that look like the job's traffic. Without `wait`, none
        while the engine is not warm.
        """
        ...

    def replay(self, job: Job, library: bytes, max_m: int) -> Outcome: ...


class Pipeline:
    """Takes one job at a time through the gates."""

    def __init__(
        self, builder: Builder, lane: Lane, correctness: Correctness, micro: Micro, end_to_end: EndToEnd
    ) -> None:
        self._builder, self._lane = builder, lane
        self._correctness, self._micro, self._end_to_end = correctness, micro, end_to_end

    def run(self, job: Job) -> Report:
        """Never raises for what a candidate does; raises `SandboxBroken` where no verdict is possible."""
        report = Report()
        began, cpu, lane_cpu = time.monotonic(), time.process_time(), self._lane.cpu_s
        for outcome in self._gates(job, report):
            report.outcomes.append(outcome)
            if not outcome.passed:
                break
        report.cpu_s = time.process_time() - cpu + self._lane.cpu_s - lane_cpu
        report.wall_s = time.monotonic() - began
        return report

    def _gates(self, job: Job, report: Report) -> Iterator[Outcome]:
        order, until = job.order, _ORDER.index(job.order.until)
        yield self._builder.static(job.solution, order.definition)
        try:
            # What may be promoted is never judged without values of the model; a first look need not wait for them.
            report.own = self._end_to_end.inputs(job, wait=until >= 5)
            subject = _subject(job, (*job.captured, *report.own.calls))
        except (UnknownOperation, ValueError, TypeError) as error:
            yield failed(Gate.G0_STATIC, TraceStatus.INVALID_REFERENCE, str(error))
            return
        packs = job.solution.x_polymorph.layout_source is not None
        if until >= 1:
            outcome, report.library = self._builder.build(job.solution, packs=packs)
            yield outcome
        if until >= 2:
            outcome = self._correctness.examine(_seeded(subject, report), report.library)
            report.largest_m = int(outcome.evidence.get("largest_m", 0))
            yield outcome
        if until >= 3 and not (order.confirm_seed and until >= 4):
            yield self._micro.measure(_seeded(subject, report), report.library, Gate.G3_MICRO)
        if until >= 4:
            yield from self._confirm(subject, report)
        if until >= 5:
            yield self._end_to_end.replay(job, report.library, report.largest_m)

    def _confirm(self, subject: Subject, report: Report) -> Iterator[Outcome]:
        """G4: right and faster once more, on seeds that nobody has seen a result of."""
        again = self._correctness.examine(_seeded(subject, report), report.library)
        if not again.passed:
            yield replace(again, gate=Gate.G4_CONFIRM, reason=f"on fresh seeds: {again.reason}")
            return
        yield self._micro.measure(_seeded(subject, report), report.library, Gate.G4_CONFIRM)


class NoEngine:
    """The end-to-end gate where there is no engine: it says so."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why

    def inputs(self, job: Job, *, wait: bool) -> OwnInputs:
        del job, wait
        return OwnInputs()

    def replay(self, job: Job, library: bytes, max_m: int) -> Outcome:
        del job, library, max_m
        return inconclusive(Gate.G5_END_TO_END, self._why())


def binding_of(revision: Revision, definition: str, m: int) -> str | None:
    """The artifact that serves `definition` at M, None where the engine's own code does."""
    for kernel in revision.kernels:
        if kernel.definition == definition and kernel.min_m <= m <= kernel.max_m:
            return kernel.artifact
    return None


def typical(workload: Workload, min_m: int, max_m: int) -> dict[int, float]:
    """M by its share of live time, within the range; the workload's own M where it tells no shares.

    Raises:
        ValueError: a range that is empty.
    """
    if not 1 <= min_m <= max_m:
        raise ValueError(f"M from {min_m} to {max_m} holds nothing: 1 <= min_m <= max_m")
    extra = workload.x_polymorph.model_extra or {}
    shares = {int(m): float(weight) for m, weight in dict(extra.get("m_weights", {})).items()}
    inside = {m: weight for m, weight in shares.items() if min_m <= m <= max_m and weight > 0}
    if inside:
        return inside
    return {min(max(workload.axes.get("M", min_m), min_m), max_m): 1.0}


def _subject(job: Job, captured: tuple[Captured, ...]) -> Subject:
    order, op = job.order, operation(job.order.definition)
    shares = typical(job.workload, order.min_m, order.max_m)
    heaviest = max(shares, key=lambda m: shares[m])
    artifact = binding_of(order.incumbent, order.definition, heaviest)
    incumbent = None
    if artifact is not None and artifact in job.incumbents:
        packs = job.layouts.get(artifact) is not None
        incumbent = Incumbent(artifact, job.incumbents[artifact], packs)
    return Subject(
        job.solution,
        op,
        order.min_m,
        order.max_m,
        shares,
        incumbent,
        captured=captured,
    )


def _seeded(subject: Subject, report: Report) -> Subject:
    """The subject with a secret seed of its own; its hash is kept, so that it can be shown later."""
    seed = randbits(63)
    report.seeds.append(hashlib.sha256(str(seed).encode()).hexdigest())
    return replace(subject, seed=seed)


__all__ = ["EndToEnd", "Job", "NoEngine", "Pipeline", "Report", "SandboxBroken", "binding_of", "typical"]
