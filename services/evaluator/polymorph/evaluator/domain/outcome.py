"""What a gate says about a candidate."""

from dataclasses import dataclass, field
from typing import Any

from polymorph.events.values import Gate, Ratio, Verdict
from polymorph.kernels.schema import TraceStatus


@dataclass(frozen=True, slots=True)
class Outcome:
    """One gate's answer. `reason` is a sentence that the candidate's author can act on."""

    gate: Gate
    verdict: Verdict
    reason: str
    status: TraceStatus = TraceStatus.PASSED
    evidence: dict[str, Any] = field(default_factory=dict)
    speedup: Ratio | None = None

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASSED


def passed(gate: Gate, reason: str, *, speedup: Ratio | None = None, **evidence: Any) -> Outcome:
    return Outcome(gate, Verdict.PASSED, reason, TraceStatus.PASSED, evidence, speedup)


def failed(
    gate: Gate, status: TraceStatus, reason: str, *, speedup: Ratio | None = None, **evidence: Any
) -> Outcome:
    return Outcome(gate, Verdict.FAILED, reason, status, evidence, speedup)


def inconclusive(gate: Gate, reason: str, *, speedup: Ratio | None = None, **evidence: Any) -> Outcome:
    return Outcome(gate, Verdict.INCONCLUSIVE, reason, TraceStatus.INCONCLUSIVE, evidence, speedup)
