"""Metrics of the gateway. Each help text names the event that is counted."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SMALL = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30)

REQUESTS = Counter(
    "polymorph_gateway_requests_total",
    "Completion requests that ended. outcome: ok (answered below 400), client_error (a worker answered 4xx), "
    "refused (the gateway itself answered 4xx or 503), error (a worker answered 5xx, or the gateway failed), "
    "truncated (the worker broke off inside its answer), disconnect (the client left first); "
    "status: the one sent, 0 where none was",
    ["pool", "status", "outcome"],
)
IN_FLIGHT = Gauge("polymorph_gateway_requests_in_flight", "Completion requests that came and have not ended")
PLACED = Counter(
    "polymorph_gateway_placements_total",
    "Workers chosen for a request, one for each try; by: router, or gateway where it chose by itself",
    ["by"],
)
RETRIES = Counter(
    "polymorph_gateway_retries_total",
    "Tries that ended before the first byte of an answer's body: the worker failed, or had no engine",
)
HELD = Counter(
    "polymorph_gateway_held_total",
    "Requests sent to a worker that restarts its engine, to wait there, since no other could take them",
)
PLACEMENT_S = Histogram(
    "polymorph_gateway_placement_seconds", "Seconds from asking for a worker to its choice", buckets=_SMALL
)
FIRST_BYTE_S = Histogram(
    "polymorph_gateway_first_byte_seconds",
    "Seconds from a request's arrival to the first byte of the body of a worker's answer",
    buckets=_SECONDS,
)
TOTAL_S = Histogram(
    "polymorph_gateway_request_seconds",
    "Seconds from a request's arrival to its end, however it ended",
    buckets=_SECONDS,
)
ROUTER_AWAY = Gauge(
    "polymorph_gateway_router_away", "1 while the router does not answer and the gateway places by itself"
)
TELEMETRY_DROPPED = Counter(
    "polymorph_gateway_telemetry_dropped_total", "Telemetry messages that found the queue to the bus full"
)
EVENT_WATCHERS = Gauge("polymorph_gateway_event_watchers", "Streams of /v1/events that are open")
