"""Telemetry, version 1: what was seen a moment ago; never kept, allowed to be lost."""

import datetime as dt
from typing import Annotated, Literal

from pydantic import Field

from polymorph.events.base import Telemetry
from polymorph.events.values import PLACEMENT_ID, Bucket, Operation, SampledSteps, Seconds


class RequestStarted(Telemetry):
    """The gateway sent a request to a worker."""

    DOMAIN = "gateway"
    NAME = "request-started"

    pool: str
    request_id: str
    worker_id: str
    program_id: str | None
    placed_by: Literal["router", "gateway"]
    at: dt.datetime
    placement_id: str = PLACEMENT_ID

    def subject_id(self) -> str:
        return self.pool


class RequestFinished(Telemetry):
    """A request left the gateway, however it ended."""

    DOMAIN = "gateway"
    NAME = "request-finished"

    pool: str
    request_id: str
    worker_id: str | None
    status: int
    outcome: Literal["ok", "error", "disconnect", "truncated"]
    first_byte_s: float | None
    total_s: float
    at: dt.datetime
    placement_id: str = PLACEMENT_ID

    def subject_id(self) -> str:
        return self.pool


class TokensCounted(Telemetry):
    """The engine's own counts for a finished request, keyed by X-Request-ID."""

    DOMAIN = "worker"
    NAME = "tokens-counted"

    pool: str
    worker_id: str
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: Seconds | None
    tpot_s: Seconds | None
    domain: str = "unknown"
    at: dt.datetime

    def subject_id(self) -> str:
        return self.pool


class StepsCounted(Telemetry):
    """What a worker's engine did in the last second."""

    DOMAIN = "worker"
    NAME = "steps-counted"

    pool: str
    worker_id: str
    at: dt.datetime
    interval_s: Seconds
    steps: int
    step_s: Annotated[Seconds, Field(description="seconds spent in engine steps")]
    tokens: Annotated[int, Field(description="tokens computed, prefill and decode")]
    output_tokens: int
    running: int
    waiting: int
    kv_used: Annotated[float, Field(description="share of the KV cache in use, in [0, 1]")]
    step_s_by_m: Annotated[
        dict[Bucket, Seconds], Field(description="bucket of M -> seconds of engine steps")
    ] = {}
    operations: tuple[Operation, ...] = ()
    revision: str = "empty"
    sampled_by_m: Annotated[
        dict[Bucket, SampledSteps],
        Field(
            description="bucket of M -> where the time of its steps went that were profiled meanwhile, if any"
        ),
    ] = {}

    def subject_id(self) -> str:
        return self.pool
