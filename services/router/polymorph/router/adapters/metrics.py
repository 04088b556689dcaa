"""Metrics of the router."""

from prometheus_client import Counter, Gauge

PLACEMENTS = Counter("polymorph_router_placements_total", "Answers to placement requests", ["answer"])
HELD = Gauge("polymorph_router_held_requests", "Requests that wait for room")
WINDOWS = Counter("polymorph_router_windows_total", "Traffic windows", ["outcome"])
LEADS = Gauge("polymorph_router_publishes_windows", "1 where this router publishes the windows")
PROGRAMS = Counter(
    "polymorph_router_programs_total",
    "Entries about programs: announced, dropped (untold), heard, loaded, malformed",
    ["what"],
)
VALKEY = Gauge("polymorph_router_valkey_connected", "1 while programs are shared through Valkey")
