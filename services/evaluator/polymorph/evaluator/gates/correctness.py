"""Gate G2: right everywhere it may be called, by the float64 reference and by the incumbent's own error."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from polymorph.evaluator.adapters.sandbox.lane import (
    CandidateDied,
    CandidateRefused,
    Forged,
    Lane,
    Process,
)
from polymorph.evaluator.domain.budget import Errors, astray, beyond
from polymorph.evaluator.domain.captured import tried
from polymorph.evaluator.domain.cases import Case, checked_columns, largest_tried, plan, spoiled, weights
from polymorph.evaluator.domain.number import Array, Floats, load
from polymorph.evaluator.domain.operation import Expected, Operation, expected
from polymorph.evaluator.domain.outcome import Outcome, failed, inconclusive, passed
from polymorph.evaluator.gates.calling import (
    WEIGHTS,
    Inputs,
    inputs,
    send_weight,
)
from polymorph.evaluator.gates.subject import GateFailed, Subject
from polymorph.evaluator.gates.trial import Trial
from polymorph.events.values import Gate, Numerics
from polymorph.kernels.schema import TraceStatus
from polymorph.sandbox.sealed import sealed

_GATE = Gate.G2_CORRECT
_CALL_S = 20.0
_RUBBISH = (0xFF, 0x3C)


@dataclass(frozen=True, slots=True)
class _Prepared:
    case: Case
    given: Inputs
    reference: dict[str, Expected]


class Correctness:
    """Compares a library with the reference, and with the incumbent's error in a process of its own."""

    def __init__(self, lane: Lane, *, call_s: float = _CALL_S) -> None:
        self._lane, self._call_s = lane, call_s

    def examine(self, subject: Subject, library: bytes) -> Outcome:
        most = largest_tried(subject.operation, subject.max_m)
        if most < subject.max_m:
            narrower = f"M up to {subject.max_m} is more than is tried here: ask for a range up to {most}"
            return failed(_GATE, TraceStatus.INVALID_REFERENCE, narrower, largest_m=most)
        return self._examine(subject, library)

    def _examine(self, subject: Subject, library: bytes) -> Outcome:
        rng = np.random.default_rng(subject.seed)
        op = subject.operation
        weight = weights(op, rng)
        prepared = _prepare(subject, weight, rng)
        try:
            native = self._native(op, weight, prepared)
        except (CandidateDied, CandidateRefused, Forged) as error:
            return inconclusive(_GATE, f"the incumbent's own code did not run: {error}")
        try:
            errors, bitwise = self._candidate(subject, library, weight, prepared, native, rng)
        except GateFailed as error:
            status = TraceStatus.REWARD_HACK if error.hack else TraceStatus.INCORRECT_NUMERICAL
            return failed(_GATE, status, error.reason)
        except CandidateRefused as error:
            return failed(_GATE, TraceStatus.RUNTIME_ERROR, str(error))
        except Forged as error:
            return failed(_GATE, TraceStatus.REWARD_HACK, str(error))
        except CandidateDied as error:
            return failed(_GATE, TraceStatus.RUNTIME_ERROR, str(error))
        return _judge(subject, prepared, errors, _errors(op, prepared, native), bitwise=bitwise)

    def _native(
        self, op: Operation, weight: Floats, prepared: list[_Prepared]
    ) -> dict[str, dict[str, Array]]:
        found = {}
        with self._lane.process({}, native=op.kind, dtype=op.dtype) as process:
            spec = send_weight(process, op, weight, "weight0")
            if op.packs:
                process.ask("pack", arm="native", name=WEIGHTS, weights=[spec])
            for item in prepared:
                with Trial(process, op, item.case, item.given, self._call_s) as call:
                    found[item.case.name] = call.run("native", weights=WEIGHTS)
        return found

    def _candidate(
        self,
        subject: Subject,
        library: bytes,
        weight: Floats,
        prepared: list[_Prepared],
        native: dict[str, dict[str, Array]],
        rng: np.random.Generator,
    ) -> tuple[Errors, bool]:
        op, errors, bitwise = subject.operation, Errors(), True
        absolute = np.abs(weight).T
        with self._lane.process({"candidate": [sealed("kernel", library)]}) as process:
            self._pack(process, subject, weight)
            for item in prepared:
                with Trial(process, op, item.case, item.given, self._call_s) as call:
                    first, second = (call.run("candidate", rubbish=value) for value in _RUBBISH)
                    if first is None or second is None:
                        continue
                    _same(item.case, first, second)
                    _as_apart(item.case, first, call.in_place("candidate", rubbish=_RUBBISH[0]))
                _add(errors, op, item, first)
                _unchecked(op, item, first, native[item.case.name], absolute)
                bitwise = bitwise and _equal(first, native[item.case.name])
            if op.packs and op.dtype == "float32" and subject.solution.x_polymorph.layout_source:
                self._spoiled(process, subject, weight, rng)
        return errors, bitwise

    def _pack(self, process: Process, subject: Subject, weight: Floats) -> None:
        spec = send_weight(process, subject.operation, weight, "weight0")
        if subject.operation.packs:
            raw = subject.solution.x_polymorph.layout_source is None
            process.ask("pack", arm="candidate", name=WEIGHTS, weights=[spec], raw=raw)
            if not raw:
                # An engine packs from a tensor that is gone afterwards: what was packed must not need it.
                process.ask("forbid", names=["weight0"])

    def _spoiled(self, process: Process, subject: Subject, weight: Floats, rng: np.random.Generator) -> None:
        """One value that bfloat16 does not hold: the packing refuses it, or serves it exactly."""
        op = subject.operation
        changed, row, column = spoiled(weight, rng)
        spec = send_weight(process, op, changed, "spoiled")
        try:
            process.ask("pack", arm="candidate", name=WEIGHTS, weights=[spec], raw=False)
        except CandidateRefused:
            return
        process.ask("forbid", names=["spoiled"])
        case = Case("one-weight-not-bfloat16", subject.min_m, "one-hot")
        x = np.zeros((case.m, op.depth), dtype=np.float32)
        x[:, column] = 1
        given = inputs(op, case, changed, rng, given={"x": x})
        item = _Prepared(case, given, {})
        with Trial(process, op, item.case, item.given, self._call_s) as call:
            output = call.run("candidate", rubbish=_RUBBISH[0])
        if output is None or load(output["y"], op.dtype)[0, row] != changed[row, column]:
            raise GateFailed(
                f"weight[{row}, {column}] = {changed[row, column]!r} was packed with less precision: pm_pack must "
                f"return non-zero for a value that its storage does not hold exactly"
            )


def _prepare(subject: Subject, weight: Floats, rng: np.random.Generator) -> list[_Prepared]:
    op = subject.operation
    items = []
    planned: list[tuple[Case, dict[str, Floats] | None]] = [
        (case, None) for case in plan(op, subject.min_m, subject.max_m, subject.heaviest, rng)
    ]
    for name, call in tried(subject.captured, subject.min_m):
        m = min(call.m, subject.max_m)
        planned.append((Case(name, m, call.source), call.rows(m)))
    for case, values in planned:
        given = inputs(op, case, weight, rng, given=values)
        columns = checked_columns(op, case.m, rng)
        items.append(_Prepared(case, given, expected(op, given.values, columns)))
    return items


def _add(errors: Errors, op: Operation, item: _Prepared, outputs: dict[str, Array]) -> None:
    for name, reference in item.reference.items():
        errors.add(item.case.name, load(outputs[name], op.dtype), reference)


def _errors(op: Operation, prepared: list[_Prepared], outputs: dict[str, dict[str, Array]]) -> Errors:
    """The incumbent's own errors, without those of calls that it does not serve (rows apart, say)."""
    errors = Errors()
    for item in prepared:
        one = Errors()
        _add(one, op, item, outputs[item.case.name])
        if math.isfinite(one.worst):
            errors.merge(one)
    return errors


def _unchecked(
    op: Operation, item: _Prepared, outputs: dict[str, Array], native: dict[str, Array], absolute: Floats
) -> None:
    """Columns without a reference are held against the incumbent's, so that no column goes unseen."""
    if op.kind != "gemm" or len(item.reference["y"].columns) == op.columns or op.dtype != "float32":
        return
    scale = np.abs(item.given.values["x"]) @ absolute
    if "bias" in item.given.values:
        scale = scale + np.abs(item.given.values["bias"])
    far = astray(load(outputs["y"], op.dtype), load(native["y"], op.dtype), scale)
    if far:
        raise GateFailed(f"case {item.case.name}: {far} elements of y are far from the incumbent's")


def _same(case: Case, first: dict[str, Array], second: dict[str, Array]) -> None:
    if not _equal(first, second):
        raise GateFailed(f"case {case.name}: two runs on equal inputs gave other bits")


def _as_apart(case: Case, apart: dict[str, Array], shared: dict[str, Array] | None) -> None:
    """A kernel that reads what it has written over is right only where outputs have memory of their own."""
    if shared is None:
        return
    for name, stored in apart.items():
        if stored.tobytes() != shared[name].tobytes():
            raise GateFailed(
                f"case {case.name}, in place: {name} gets other bits where outputs lie in the memory of inputs, as the "
                f"definition lets them: read an element before its place is written"
            )


def _equal(first: dict[str, Array], second: dict[str, Array]) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def _judge(
    subject: Subject, prepared: list[_Prepared], errors: Errors, native: Errors, *, bitwise: bool
) -> Outcome:
    declared = subject.solution.x_polymorph.numerics
    evidence: dict[str, Any] = {
        "cases": {item.case.name: errors.by_case.get(item.case.name) for item in prepared},
        "mean_error": errors.mean, "worst_error": errors.worst, "worst_case": errors.where,
        "incumbent_mean_error": native.mean, "incumbent_worst_error": native.worst,
        "largest_m": largest_tried(subject.operation, subject.max_m), "bitwise": bitwise,
    }  # fmt: skip
    problem = beyond(errors, native)
    if declared is Numerics.LOSSY:
        problem = (
            "declared lossy: no quality gate is declared for this pool, so only bitwise and reordered pass"
        )
    elif declared is Numerics.BITWISE and not bitwise:
        problem = (
            "declared bitwise, but its outputs differ from the incumbent's in some bit: declare reordered"
        )
    if problem is not None:
        return failed(_GATE, TraceStatus.INCORRECT_NUMERICAL, problem, **evidence)
    reason = f"right in {len(prepared)} cases; mean error {errors.mean:.3g} units, the incumbent's {native.mean:.3g}"
    return passed(_GATE, reason, **evidence)
