"""Metrics of the router."""

from prometheus_client import Counter, Gauge

PLACEMENTS = Counter("polymorph_router_placements_total", "Answers to placement requests", ["answer"])
HELD = Gauge("polymorph_router_held_requests", "Requests that wait for room")
WINDOWS = Counter("polymorph_router_windows_total", "Traffic windows", ["outcome"])
LEADS = Gauge("polymorph_router_publishes_windows", "1 where this router publishes the windows")
