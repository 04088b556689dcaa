"""Requests over core NATS and their answers. An answer is one JSON object with a `status` that names its type."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter

from polymorph.events.base import Message
from polymorph.events.values import PLACEMENT_ID, EngineSettings, Revision, SettingChange, Share, Value, Way


class Request(Message):
    """A question that one service answers."""

    KIND = "req"


class PlaceRequest(Request):
    """Where shall this request run? Subject id: the pool."""

    DOMAIN = "router"
    NAME = "place"

    pool: str
    request_id: str
    program_id: str | None = None
    prompt_chars: int = 0
    prompt_tokens_estimate: int = 0
    max_tokens: int | None = None
    stream: bool = False
    exclude: Annotated[tuple[str, ...], Field(description="workers that just failed this request")] = ()
    placement_id: str = PLACEMENT_ID

    def subject_id(self) -> str:
        return self.pool


class Placed(Value):
    """Send it there."""

    status: Literal["placed"] = "placed"
    worker_id: str
    url: str


class Held(Value):
    """Wait: further answers follow on the same reply subject at least every `heartbeat_s` until `deadline_s`.

    `deadline_s` is in seconds from this answer on.
    """

    status: Literal["held"] = "held"
    reason: str
    deadline_s: float
    heartbeat_s: float


class Unplaceable(Value):
    """No worker can take it; answer the client with 503 and Retry-After."""

    status: Literal["unplaceable"] = "unplaceable"
    reason: str
    retry_after_s: float
    cause: Annotated[
        Literal["full", "no-worker"],
        Field(description="no-worker: the router knows none; a gateway that knows one may place by itself"),
    ] = "full"


Placement = Annotated[Placed | Held | Unplaceable, Field(discriminator="status")]
PLACEMENT: TypeAdapter[Placed | Held | Unplaceable] = TypeAdapter(Placement)


class LeaseHost(Request):
    """Give the host's cores to the evaluator for one burst. Subject id: the worker.

    The worker pauses its engine between two steps, answers, and resumes by itself after `burst_s`, so that a dead
    evaluator never leaves an engine paused. `release` ends a burst early.
    """

    DOMAIN = "worker"
    NAME = "lease-host"

    MAX_BURST_S: ClassVar[float] = 0.3

    worker_id: str
    lease_id: str
    burst_s: Annotated[float, Field(gt=0, le=0.3)]
    release: bool = False

    def subject_id(self) -> str:
        return self.worker_id


class LeaseAnswer(Value):
    """Whether the burst is granted; `paused_s` is how long the engine stood still in the burst that just ended."""

    granted: bool
    reason: str = ""
    paused_s: float = 0.0


class ControlSlots(Request):
    """Switch a worker between its revision and empty slots, for paired measurements. Subject id: the worker.

    `revision` is "stable" for what the desired state holds, or "empty". It expires after `ttl_s`.
    """

    DOMAIN = "worker"
    NAME = "control-slots"

    worker_id: str
    revision: Literal["stable", "empty"]
    ttl_s: Annotated[float, Field(gt=0, le=600)]

    def subject_id(self) -> str:
        return self.worker_id


class ControlAnswer(Value):
    ok: bool
    reason: str = ""
    served_calls: int = 0


class CaptureInputs(Request):
    """Keep real inputs of a slot for some seconds and send them. Subject id: the worker.

    Activations derive from users' text: a worker refuses unless its configuration allows the capture of content. The
    answers are a `CaptureTold` (or a `CaptureRefused`) and then the bytes of each call, in parts.
    """

    DOMAIN = "worker"
    NAME = "capture-inputs"

    worker_id: str
    definition: str
    calls: Annotated[int, Field(ge=1, le=64, description="the last so many calls are kept")] = 8
    every: Annotated[int, Field(ge=1, description="one call in so many")] = 1
    min_m: Annotated[int, Field(ge=1)] = 1
    max_m: Annotated[int, Field(ge=1)] = 1 << 30
    seconds: Annotated[float, Field(gt=0, le=60)] = 5.0
    max_mib: Annotated[int, Field(ge=1, le=64)] = 16

    def subject_id(self) -> str:
        return self.worker_id


class PlanChange(Request):
    """What would a worker do to run this revision? Nothing is done. Subject id: the worker."""

    DOMAIN = "worker"
    NAME = "plan-change"

    worker_id: str
    revision: Revision

    def subject_id(self) -> str:
        return self.worker_id


class PlanAnswer(Value):
    """The plan, or why the worker would refuse. `inverse` and `inverse_slots` name what takes the change back."""

    ok: bool
    reason: str = ""
    way: Way = Way.NOTHING
    why: str = ""
    changes: tuple[SettingChange, ...] = ()
    kernels: Annotated[bool, Field(description="whether slots would be pointed at other code")] = False
    pause: Annotated[bool, Field(description="whether newcomers wait meanwhile")] = False
    recapture: Annotated[bool, Field(description="whether graphs are compiled or captured anew")] = False
    cache_reset: Annotated[bool, Field(description="whether the prefix cache is lost")] = False
    inverse: EngineSettings | None = None
    inverse_slots: tuple[str, ...] | None = None
    generation: Annotated[int, Field(description="the newest that the worker has told to have loaded")] = 0


class CaptureRefused(Value):
    """Nothing was captured."""

    status: Literal["refused"] = "refused"
    reason: str


class CapturedCall(Value):
    """One call's inputs: a safetensors file of `size` bytes."""

    m: Annotated[int, Field(ge=1)]
    size: Annotated[int, Field(ge=0)]
    sha256: str


class CaptureTold(Value):
    """What was captured; `parts` answers with the bytes follow, call by call."""

    status: Literal["captured"] = "captured"
    model: str
    definition: str
    calls: tuple[CapturedCall, ...]
    parts: Annotated[int, Field(ge=0)]
    weight: Annotated[
        Share, Field(description="of the operation's time meanwhile, the share of calls of the M asked for")
    ] = 1.0
    experts: Annotated[
        tuple[Share, ...],
        Field(description="of the token-expert pairs meanwhile, the share by expert, the busiest first"),
    ] = ()


class CapturePart(Value):
    """A piece of the bytes of one call, in their order; base64."""

    status: Literal["part"] = "part"
    call: Annotated[int, Field(ge=0)]
    content: str


CaptureAnswer = Annotated[CaptureRefused | CaptureTold | CapturePart, Field(discriminator="status")]
CAPTURE: TypeAdapter[CaptureRefused | CaptureTold | CapturePart] = TypeAdapter(CaptureAnswer)


REQUESTS: tuple[type[Request], ...] = (PlaceRequest, LeaseHost, ControlSlots, PlanChange, CaptureInputs)
ANSWERS: dict[type[Request], tuple[type[Value], ...]] = {
    PlaceRequest: (Placed, Held, Unplaceable),
    LeaseHost: (LeaseAnswer,),
    ControlSlots: (ControlAnswer,),
    PlanChange: (PlanAnswer,),
    CaptureInputs: (CaptureRefused, CaptureTold, CapturePart),
}
