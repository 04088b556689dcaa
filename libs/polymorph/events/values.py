"""Values that several messages share."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Value(BaseModel):
    """An immutable part of a message."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="null")


Bucket = Annotated[
    str, Field(pattern=r"^[1-9][0-9]{0,9}$", description="upper bound of a bucket of M, as text")
]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# A client may give requests that run at the same time one id; a sender that knows no better counts by it.
PLACEMENT_ID: str = Field(
    default_factory=lambda known: str(known["request_id"]),
    description="the gateway's own id of the request, which placement counts by; the request id where there is none",
)


class Numerics(StrEnum):
    """What a candidate does to outputs (evaluation classes; docs/architecture.md)."""

    BITWISE = "bitwise"
    REORDERED = "reordered"
    LOSSY = "lossy"


class Verdict(StrEnum):
    """How an evaluation ended. INCONCLUSIVE is an answer; it never promotes."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


class Gate(StrEnum):
    """The gates in their order, from cheap to dear."""

    G0_STATIC = "G0"
    G1_BUILD = "G1"
    G2_CORRECT = "G2"
    G3_MICRO = "G3"
    G4_CONFIRM = "G4"
    G5_END_TO_END = "G5"


class Quantiles(Value):
    """A distribution in five numbers and its mean."""

    mean: float
    p10: float
    p50: float
    p90: float
    p99: float


class Ratio(Value):
    """A measured ratio with its 95 % interval; above 1 is better."""

    point: float
    low: float
    high: float


class TrafficShape(Value):
    """What one pool's traffic looked like over a window.

    Lengths are in tokens, times in seconds. `tokens_per_step` maps a bucket of M (the number of tokens in one engine
    step, the upper bound of the bucket as text) to the share of engine step time spent in it.
    """

    requests: Annotated[int, Field(ge=0)]
    arrival_rate: Annotated[float, Field(description="requests per second")]
    burstiness: Annotated[float, Field(description="squared coefficient of variation of gaps; 1 is Poisson")]
    concurrency: Annotated[float, Field(description="mean requests in flight")]
    prompt_tokens: Quantiles
    output_tokens: Quantiles
    prefix_hit_rate: float = 0.0
    tokens_per_step: dict[Bucket, float] = {}
    domains: Annotated[dict[str, float], Field(description="share of requests by domain of content")] = {}


class Operation(Value):
    """One tunable operation with its share of engine step time, in [0, 1].

    `by_m` splits that share by the bucket of the operation's own M, which is not the step's: the output layer of a
    prefill computes one row for each sequence. Empty where the worker did not tell.
    """

    definition: str
    share: Share
    by_m: dict[Bucket, Share] = {}


class SampledSteps(Value):
    """Where the time of sampled engine steps went: seconds by family of operators.

    A family is a slot's name; `other` are operators that no slot reaches, `rest` is what no operator tells (code that
    the compiler fused, Python, waiting).
    """

    steps: Annotated[int, Field(ge=0)]
    seconds: dict[str, Seconds]


class StepTime(Value):
    """Shares of engine step time by family, from sampled steps; `reachable` is the share that slots can reach at all."""

    shares: dict[str, Share]
    reachable: Share
    sampled_steps: Annotated[int, Field(ge=0)]


class KernelBinding(Value):
    """One slot entry of a revision: for `definition` at M up to `max_m` (and above `min_m - 1`), use this artifact."""

    definition: str
    min_m: Annotated[int, Field(ge=1)]
    max_m: Annotated[int, Field(ge=1)]
    manifest: Annotated[str, Field(description="sha256 of the signed manifest in the object store")]
    artifact: Annotated[str, Field(description="sha256 of the shared library in the object store")]
    numerics: Numerics


class Revision(Value):
    """A complete set of what a pool runs; the empty revision runs the engine's own code."""

    revision: Annotated[str, Field(description="a name derived from the content")]
    parent: str | None = None
    kernels: tuple[KernelBinding, ...] = ()
    regime: str = "any"
