"""What is known of one request so far."""

from dataclasses import dataclass, field
from typing import Literal

from polymorph.gateway.adapters.inbound import Scope, Send

NO_POOL = "none"
Told = Literal["ok", "error", "disconnect", "truncated"]
Outcome = Told | Literal["refused", "client_error"]
TOLD: dict[Outcome, Told] = {
    "ok": "ok",
    "client_error": "ok",
    "refused": "error",
    "error": "error",
    "disconnect": "disconnect",
    "truncated": "truncated",
}
"""The words of the telemetry for ours: it asks whether the fleet did its part, /metrics also who was at fault."""


@dataclass(slots=True)
class Journey:
    """What is known of one request so far."""

    scope: Scope
    send: Send
    request_id: str
    placement_id: str
    began: float
    pool: str = NO_POOL
    worker_id: str | None = None
    status: int = 0
    outcome: Outcome = "error"
    first_byte_s: float | None = None
    tried: list[str] = field(default_factory=list)
