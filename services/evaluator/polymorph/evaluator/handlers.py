"""From an order to its one event: fetch, evaluate, keep the evidence, sign what passed, tell."""

import asyncio
import logging
from dataclasses import dataclass, replace

from pydantic import ValidationError

from polymorph.bus.errors import BusError, Corrupt, NotFound, Poison, Retryable, TooLarge
from polymorph.bus.port import Bus, Delivery
from polymorph.evaluator.adapters import metrics
from polymorph.evaluator.adapters.captures import BadInputs
from polymorph.evaluator.adapters.inputs import Given, LiveInputs
from polymorph.evaluator.adapters.records import Records
from polymorph.evaluator.domain.operation import operation
from polymorph.evaluator.domain.outcome import Outcome, failed, inconclusive
from polymorph.evaluator.gates.pipeline import Job, Pipeline, Report, SandboxBroken
from polymorph.events.types import CandidateEvaluated, EvaluateCandidate
from polymorph.events.values import Gate
from polymorph.kernels.build import MOST_SOURCE_BYTES
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.schema import (
    Evaluation,
    Manifest,
    SignedManifest,
    Solution,
    Trace,
    TraceExtension,
    TraceStatus,
    Workload,
)
from polymorph.kernels.signing import Signer, sign_manifest
from polymorph.kernels.state import MOST_BYTES

_log = logging.getLogger(__name__)
_SOLUTION_BYTES = 2 * MOST_SOURCE_BYTES  # in JSON, with all that is said about it
_WORKLOAD_BYTES = 16 << 20
_MANIFEST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    """What this evaluator's results are keyed by."""

    hardware: str
    fingerprint: str
    toolchain: str
    isolation: str


class Evaluating:
    """Handles `EvaluateCandidate`. Idempotent by evaluation id: what was answered once is answered the same again."""

    def __init__(
        self, bus: Bus, pipeline: Pipeline, signer: Signer, records: Records, identity: Identity
    ) -> None:
        self._bus, self._pipeline, self._signer = bus, pipeline, signer
        self._inputs = LiveInputs(bus)
        self._records, self._identity = records, identity

    async def handle(self, delivery: Delivery) -> None:
        order = delivery.message
        if not isinstance(order, EvaluateCandidate):
            raise Poison(f"{type(order).__name__} is no EvaluateCandidate")
        event = self._records.find(order.evaluation_id)
        if event is None:
            with metrics.BUSY.track_inprogress():
                event = await self._evaluate(order)
            self._records.keep(event)
            metrics.EVALUATIONS.labels(event.gate.value, event.verdict.value).inc()
        await self._bus.publish(event)

    async def _evaluate(self, order: EvaluateCandidate) -> CandidateEvaluated:
        _log.info("evaluation %s of %s begins, up to %s", order.evaluation_id, order.definition, order.until)
        given = Given()
        try:
            job = await self._fetch(order)
            given = await self._inputs.of(order, job.workload)
        except BadInputs as error:
            # Neither right nor wrong: nobody's candidate is to blame for a file that is.
            reason = f"inputs that the order's workload names cannot be read: {str(error)[:300]}"
            return await self._tell(order, None, Report([inconclusive(Gate.G0_STATIC, reason)]), given)
        except (NotFound, Corrupt, ValidationError, ValueError) as error:
            reason = f"a document of the order cannot be read: {str(error)[:300]}"
            report = Report([failed(Gate.G0_STATIC, TraceStatus.RUNTIME_ERROR, reason)])
            return await self._tell(order, None, report, given)
        job = replace(job, captured=tuple(given.calls))
        try:
            report = await asyncio.to_thread(self._pipeline.run, job)
        except SandboxBroken as error:
            raise Retryable(str(error)) from error
        return await self._tell(order, job, report, given)

    async def _fetch(self, order: EvaluateCandidate) -> Job:
        solution = Solution.model_validate_json(
            await self._read(order.solution, _SOLUTION_BYTES, "a solution")
        )
        workload = Workload.model_validate_json(
            await self._read(order.workload, _WORKLOAD_BYTES, "a workload")
        )
        incumbents, layouts = {}, {}
        for kernel in order.incumbent.kernels:
            incumbents[kernel.artifact] = await self._read(kernel.artifact, MOST_BYTES, "a library")
            manifest = await self._read(kernel.manifest, _MANIFEST_BYTES, "a manifest")
            layouts[kernel.artifact] = SignedManifest.model_validate_json(manifest).manifest.layout
        return Job(order, solution, workload, incumbents, layouts)

    async def _read(self, digest: str, at_most: int, what: str) -> bytes:
        try:
            return await self._bus.get_object(digest, at_most=at_most)
        except TooLarge as error:
            raise ValueError(f"{what} has at most {at_most} bytes: {error}") from error

    async def _tell(
        self, order: EvaluateCandidate, job: Job | None, report: Report, given: Given
    ) -> CandidateEvaluated:
        last = report.last
        inputs = (*given.workloads, *await self._own_inputs(job, report))
        trace = self._trace(order, report, inputs, given.left_out)
        evidence = await self._bus.put_object(trace.canonical())
        manifest = artifact = None
        if job is not None and last.passed:
            artifact = await self._bus.put_object(report.library) if report.library else None
            if last.gate is Gate.G5_END_TO_END and artifact is not None:
                signed = self._sign(order, job, report, artifact, evidence)
                manifest = await self._bus.put_object(signed.canonical())
        _log.info("evaluation %s: %s at %s: %s", order.evaluation_id, last.verdict, last.gate, last.reason)
        return CandidateEvaluated(
            pool=order.pool,
            search_id=order.search_id,
            candidate_id=order.candidate_id,
            evaluation_id=order.evaluation_id,
            gate=last.gate,
            verdict=last.verdict,
            reason=last.reason,
            speedup=last.speedup,
            numerics=job.solution.x_polymorph.numerics if job is not None else None,
            manifest=manifest,
            artifact=artifact,
            isolation=self._identity.isolation,
            evidence=evidence,
            cpu_s=round(report.cpu_s, 3),
            greedy_agreement=last.evidence.get("greedy_agreement"),
            greedy_agreement_incumbent=last.evidence.get("greedy_agreement_incumbent"),
        )

    async def _own_inputs(self, job: Job | None, report: Report) -> tuple[str, ...]:
        """Keeps what our own engine gave beside the evidence, as a Workload that says so."""
        if job is None or not report.own.calls:
            return ()
        paths = [await self._bus.put_object(content) for content in report.own.files]
        workload = report.own.workload(paths, job.workload.x_polymorph.weight)
        return (await self._bus.put_object(workload.canonical()),)

    def _sign(
        self, order: EvaluateCandidate, job: Job, report: Report, artifact: str, evidence: str
    ) -> SignedManifest:
        solution = job.solution
        manifest = Manifest(
            artifact=artifact,
            definition=order.definition,
            definition_digest=operation(order.definition).definition.digest(),
            solution=order.solution,
            hardware=self._identity.fingerprint,
            isa=solution.x_polymorph.isa,
            toolchain=self._identity.toolchain,
            layout=layout_digest(solution),
            numerics=solution.x_polymorph.numerics,
            min_m=order.min_m,
            max_m=min(order.max_m, report.largest_m),
            evidence=evidence,
        )
        return sign_manifest(manifest, self._signer)

    def _trace(
        self, order: EvaluateCandidate, report: Report, inputs: tuple[str, ...], left_out: dict[str, str]
    ) -> Trace:
        gates = {outcome.gate.value: _shown(outcome) for outcome in report.outcomes}
        micro = [o for o in report.outcomes if o.gate in (Gate.G3_MICRO, Gate.G4_CONFIRM)]
        correct = [o for o in report.outcomes if o.gate is Gate.G2_CORRECT]
        return Trace(
            definition=order.definition,
            workload=order.workload,
            solution=order.solution,
            evaluation=Evaluation(
                status=report.last.status,
                environment={
                    "hardware": self._identity.fingerprint,
                    "toolchain": self._identity.toolchain,
                    "isolation": self._identity.isolation,
                },
                correctness=correct[-1].evidence if correct else {},
                performance={"cpu_s": report.cpu_s, "wall_s": report.wall_s, "gates": gates},
            ),
            x_polymorph=TraceExtension(
                samples={outcome.gate.value: outcome.evidence for outcome in micro},
                interval=report.last.speedup,
                design="pairs within loads within processes; Student's t over process means",
                seed_commitment=",".join(report.seeds),
                hardware=self._identity.fingerprint,
                guards={"largest_m": report.largest_m, "inputs_left_out": left_out},
                inputs=inputs,
            ),
        )


def _shown(outcome: Outcome) -> dict[str, object]:
    interval = outcome.speedup.model_dump() if outcome.speedup is not None else None
    return {
        "verdict": outcome.verdict.value, "status": outcome.status.value, "reason": outcome.reason,
        "speedup": interval, "evidence": outcome.evidence,
    }  # fmt: skip


__all__ = ["BusError", "Evaluating", "Identity"]
