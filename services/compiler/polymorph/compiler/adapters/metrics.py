"""Metrics of the compiler. Each help text names the event that is counted."""

from prometheus_client import Counter

from polymorph.events.base import Command, Event
from polymorph.events.types import CandidateEvaluated, DriftDetected, SearchClosed, SearchOpened

DRIFTS = Counter(
    "polymorph_compiler_drifts_detected_total",
    "traffic.drift-detected, when it is saved to be told",
    ["pool"],
)
SEARCHES_OPENED = Counter(
    "polymorph_compiler_searches_opened_total", "search.opened, when it is saved to be told", ["pool"]
)
SEARCHES_CLOSED = Counter(
    "polymorph_compiler_searches_closed_total",
    "search.closed, when it is saved to be told; "
    "outcome: promoted, nothing-better, budget-spent, cancelled or failed",
    ["pool", "outcome"],
)
CANDIDATES_EVALUATED = Counter(
    "polymorph_compiler_candidates_evaluated_total",
    "candidate.evaluated that a search of ours waited for, when its verdict is saved; gate: the last one it met; "
    "verdict: passed, failed or inconclusive",
    ["pool", "gate", "verdict"],
)
PROMOTIONS = Counter(
    "polymorph_compiler_promotions_total",
    "Promotions that ended, when the event comes back from the bus; "
    "outcome: completed (promotion.completed) or rolled-back (promotion.rolled-back)",
    ["pool", "outcome"],
)
KERNEL_FAULTS = Counter(
    "polymorph_compiler_kernel_faults_total",
    "worker.kernel-faulted, when its artifact is in quarantine; how: crash or hang",
    ["pool", "how"],
)


def saved(message: Event | Command) -> None:
    """Counts what entered the record for the first time."""
    match message:
        case DriftDetected():
            DRIFTS.labels(message.pool).inc()
        case SearchOpened():
            SEARCHES_OPENED.labels(message.pool).inc()
        case SearchClosed():
            SEARCHES_CLOSED.labels(message.pool, message.outcome).inc()
        case CandidateEvaluated():
            CANDIDATES_EVALUATED.labels(message.pool, message.gate.value, message.verdict.value).inc()
