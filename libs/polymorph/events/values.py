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
    experts: Annotated[
        tuple[Share, ...],
        Field(
            description="share of an expert layer's token-expert pairs by expert, the busiest of each layer first; empty "
            "where the operation has no experts, or computed nothing"
        ),
    ] = ()


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


def _absent(value: object) -> bool:
    return value is None


class KernelBinding(Value):
    """One slot entry of a revision: for `definition` at M up to `max_m` (and above `min_m - 1`), use this artifact.

    Where the definition has a feature (x_polymorph.feature), `least` and `most` bound it; without them any value is
    meant, and nothing is written, so that a state signed before they came to be has the same bytes for ever.
    """

    definition: str
    min_m: Annotated[int, Field(ge=1)]
    max_m: Annotated[int, Field(ge=1)]
    manifest: Annotated[str, Field(description="sha256 of the signed manifest in the object store")]
    artifact: Annotated[str, Field(description="sha256 of the shared library in the object store")]
    numerics: Numerics
    least: Annotated[int | None, Field(ge=0, description="of the definition's feature")] = Field(
        default=None, exclude_if=_absent
    )
    most: Annotated[int | None, Field(ge=0, description="of the definition's feature")] = Field(
        default=None, exclude_if=_absent
    )


class EngineSettings(Value):
    """How the engine of a revision runs; what is not named stays as the worker's own settings have it.

    A name that is not supported is kept, so that signatures hold, and refused by the worker. What is not named is not
    written: a state that was signed before a field came to be has the same bytes for ever.
    """

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="null")

    max_num_seqs: Annotated[int | None, Field(description="sequences that run at the same time")] = Field(
        default=None, exclude_if=_absent
    )
    max_num_batched_tokens: Annotated[int | None, Field(description="tokens computed in one step")] = Field(
        default=None, exclude_if=_absent
    )
    long_prefill_token_threshold: Annotated[
        int | None, Field(description="longest piece of a prefill while others wait; 0 for no limit")
    ] = Field(default=None, exclude_if=_absent)
    long_prefill_token_threshold_adaptive: bool | None = Field(default=None, exclude_if=_absent)
    scheduler_reserve_full_isl: Annotated[
        bool | None, Field(description="admit a prompt only where the cache holds all of it")
    ] = Field(default=None, exclude_if=_absent)
    scheduling_policy: Annotated[str | None, Field(description="fcfs or priority")] = Field(
        default=None, exclude_if=_absent
    )
    block_size: Annotated[int | None, Field(description="tokens in a block of the KV cache")] = Field(
        default=None, exclude_if=_absent
    )
    enable_prefix_caching: bool | None = Field(default=None, exclude_if=_absent)
    enforce_eager: bool | None = Field(default=None, exclude_if=_absent)
    kv_gib: Annotated[int | None, Field(description="memory of the KV cache")] = Field(
        default=None, exclude_if=_absent
    )
    threads: Annotated[int | None, Field(description="cores that the engine computes on; 0 for all")] = Field(
        default=None, exclude_if=_absent
    )
    tensor_parallel_size: int | None = Field(default=None, exclude_if=_absent)
    speculative_method: Annotated[str | None, Field(description="none, ngram or draft_model")] = Field(
        default=None, exclude_if=_absent
    )
    speculative_model: Annotated[str | None, Field(description="a folder with the draft model")] = Field(
        default=None, exclude_if=_absent
    )
    num_speculative_tokens: Annotated[int | None, Field(description="lookahead")] = Field(
        default=None, exclude_if=_absent
    )


class Way(StrEnum):
    """How a change reaches a worker, from the quickest to the dearest: its engine takes it between two steps; another
    engine is warmed beside it; it is drained and restarted.
    """

    NOTHING = "nothing"
    LIVE = "live"
    ENGINE = "engine"
    ROLLING = "rolling"


class SettingChange(Value):
    """One setting of an engine that changes; values as JSON."""

    name: str
    now: str
    wanted: str
    live: Annotated[bool, Field(description="whether it alone could change while the engine runs")]


class SlotHits(Value):
    """What one slot served since its engine started: calls by bucket of M, and those of them by our kernels."""

    definition: str
    calls: dict[Bucket, Annotated[int, Field(ge=0)]] = {}
    by_kernel: Annotated[
        dict[str, dict[Bucket, int]], Field(description="artifact that is engaged -> bucket of M -> calls")
    ] = {}


class Revision(Value):
    """A complete set of what a pool runs; the empty revision runs the engine's own code as the worker's settings say."""

    revision: Annotated[str, Field(description="a name derived from the content")]
    parent: str | None = None
    kernels: tuple[KernelBinding, ...] = ()
    regime: str = "any"
    engine: EngineSettings | None = Field(default=None, exclude_if=_absent)
    slots: Annotated[
        tuple[str, ...] | None,
        Field(description="operations whose code may be changed while the engine runs"),
    ] = Field(default=None, exclude_if=_absent)
