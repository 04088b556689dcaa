"""Metrics of the evaluator. Each help text names the event that is counted."""

from prometheus_client import Counter, Gauge

EVALUATIONS = Counter(
    "polymorph_evaluator_evaluations_total",
    "candidate.evaluated, when an evaluation has its verdict (an order that comes again is answered from the record "
    "and not counted again); gate: the last one it met; verdict: passed, failed or inconclusive",
    ["gate", "verdict"],
)
BUSY = Gauge("polymorph_evaluator_busy", "1 while a candidate goes through the gates")
STOLEN_S = Counter(
    "polymorph_evaluator_stolen_seconds_total",
    "Seconds that the engines on this host stood still for measurements, as workers say when a burst ends",
)
