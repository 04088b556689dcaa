"""What stands in the key-value buckets: desired state, live workers. Level-triggered truth, never a queue."""

import datetime as dt
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from polymorph.events.values import EngineSettings, Revision, Share, SlotHits, Value, Way

EMPTY = Revision(revision="empty")


class Mode(StrEnum):
    """How far the loop may go in a pool by itself."""

    OBSERVE = "observe"
    RECOMMEND = "recommend"
    CANARY = "canary"
    PINNED = "pinned"


class Stage(StrEnum):
    """How far the candidate of a pool has come."""

    NONE = "none"
    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"


class PromoterSignature(Value):
    """The promoter's word over pool, generation and content of the revisions (Ed25519, base64)."""

    key_id: str
    signature: str


class Reordered(StrEnum):
    """When kernels of a pool may begin to serve that compute the same sums in another order."""

    AT_ONCE = "at-once"
    NEW_REQUESTS = "new-requests"


def _at_once(value: Reordered) -> bool:
    return value is Reordered.AT_ONCE


class DesiredState(Value):
    """Bucket `desired`, key = pool. `generation` is the fencing token: allocated in SQL, it only grows."""

    pool: str
    generation: Annotated[int, Field(ge=0)]
    mode: Mode = Mode.OBSERVE
    stable: Revision = EMPTY
    candidate: Revision | None = None
    stage: Stage = Stage.NONE
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    regime: str = "any"
    promotion_id: str | None = None
    reordered: Annotated[Reordered, Field(description="when kernels of class reordered may engage")] = Field(
        default=Reordered.AT_ONCE, exclude_if=_at_once
    )  # absent from what was signed before it was there
    signature: PromoterSignature | None = None

    def signed_content(self) -> bytes:
        """The bytes that the promoter signs and a worker verifies."""
        return self.model_dump_json(exclude={"signature"}).encode()


class Quarantine(Value):
    """Bucket `quarantine`, key = artifact digest: never load this."""

    artifact: str
    reason: str
    since: dt.datetime
    until: dt.datetime | None = None


class Freeze(Value):
    """Bucket `freeze`, key = pool or `all`: nothing is promoted in this window."""

    reason: str
    since: dt.datetime
    until: dt.datetime | None = None


class WorkerRecord(Value):
    """Bucket `workers` (TTL), key = worker id: put anew every heartbeat."""

    worker_id: str
    pool: str
    model: str
    url: str
    state: Literal["starting", "ready", "draining"]
    generation: int
    revision: str
    hardware: str
    slots: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_capacity_tokens: int = 0
    max_num_seqs: int = 0
    started_at: dt.datetime
    settings: Annotated[EngineSettings | None, Field(description="in force, as read from the engine")] = None
    way: Annotated[Way | None, Field(description="how the settings in force came to be")] = None
    stood_s: Annotated[float | None, Field(description="how long streams stood still for that")] = None
    kernels: Annotated[tuple[str, ...], Field(description="artifacts that are engaged")] = ()
    features: Annotated[
        dict[str, str],
        Field(
            description="what the engine has in use beside slots: supported, native or refused, with the reason"
        ),
    ] = {}
    hits: Annotated[tuple[SlotHits, ...], Field(description="as counted last; empty slots too")] = ()
    missing: Annotated[
        dict[str, str], Field(description="slots that were asked for and are off, with the reason")
    ] = {}
    holds: Annotated[
        bool,
        Field(
            description="though not ready, it takes requests and holds them until its next engine serves: to be sent "
            "any only where no worker of the pool is ready"
        ),
    ] = False


class CapturedWorkload(Value):
    """Bucket `workloads` (TTL), key = pool.definition.digest: real inputs that a worker gave, and where they lie.

    `workload` is the digest of the Workload document in the object store `captures`, which names the inputs beside it.
    """

    pool: str
    definition: str
    workload: str
    worker_id: str
    model: str
    m: Annotated[tuple[int, ...], Field(description="of each captured call")]
    signature: Annotated[str, Field(description="buckets of M, with commas")]
    size: Annotated[int, Field(ge=0, description="bytes of all inputs")]
    weight: Share
    experts: tuple[Share, ...] = ()
    captured_at: dt.datetime
    expires_at: dt.datetime

    def key(self) -> str:
        return f"{self.pool}.{self.definition}.{self.workload[:16]}"


STATES: tuple[type[Value], ...] = (DesiredState, Quarantine, Freeze, WorkerRecord, CapturedWorkload)
