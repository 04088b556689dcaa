"""Metrics of the worker, beside vLLM's own on its `/metrics`. Each help text names the event that is counted."""

from prometheus_client import Counter, Histogram

ENGINE_DEATHS = Counter(
    "polymorph_worker_engine_deaths_total",
    "Engines that ended by themselves or were ended since they hung; how: crash or hang; "
    "blamed: kernel, or nobody where no kernel was being called",
    ["how", "blamed"],
)
INTERRUPTED = Counter(
    "polymorph_worker_interrupted_requests_total",
    "Requests whose engine died under them; outcome: continued in another engine, "
    "or ended with an error since they could not be",
    ["outcome"],
)
SENT_BACK = Counter(
    "polymorph_worker_sent_back_requests_total",
    "Requests without a byte of an answer that the gateway was told to give to another worker",
)
UNFORESEEN = Counter(
    "polymorph_worker_unforeseen_errors_total",
    "Tries of a task of the worker that ended with an error that nobody foresaw; the task goes on",
    ["task"],
)
RECOVERY_S = Histogram(
    "polymorph_worker_recovery_seconds",
    "Seconds from a death that was noticed to the next engine that takes requests",
    buckets=(1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
)


def interrupted(continued: bool) -> None:
    INTERRUPTED.labels("continued" if continued else "ended").inc()
