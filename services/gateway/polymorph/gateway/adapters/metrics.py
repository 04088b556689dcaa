"""Metrics of the gateway."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SMALL = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 30)

REQUESTS = Counter("polymorph_gateway_requests_total", "Requests that ended", ["pool", "status", "outcome"])
IN_FLIGHT = Gauge("polymorph_gateway_requests_in_flight", "Requests that run or wait")
PLACED = Counter("polymorph_gateway_placements_total", "Placements", ["by"])
RETRIES = Counter("polymorph_gateway_retries_total", "Requests sent again before the first byte")
PLACEMENT_S = Histogram("polymorph_gateway_placement_seconds", "Time until a placement", buckets=_SMALL)
FIRST_BYTE_S = Histogram("polymorph_gateway_first_byte_seconds", "Time to the first byte", buckets=_SECONDS)
TOTAL_S = Histogram("polymorph_gateway_request_seconds", "Time of a request", buckets=_SECONDS)
ROUTER_AWAY = Gauge("polymorph_gateway_router_away", "1 while the gateway places by itself")
TELEMETRY_DROPPED = Counter("polymorph_gateway_telemetry_dropped_total", "Telemetry that found no room")
EVENT_WATCHERS = Gauge("polymorph_gateway_event_watchers", "Open /v1/events streams")
