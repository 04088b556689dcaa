"""Definition, Solution, Workload and Trace: FlashInfer-Bench's schema, with ours beside it in `x_polymorph`."""

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from polymorph.events.values import Numerics, Ratio


class Document(BaseModel):
    """A JSON document whose identity is the sha256 of its canonical form."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def canonical(self) -> bytes:
        """Sorted keys, no spaces, UTF-8: the bytes that are hashed and kept."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()

    def digest(self) -> str:
        return hashlib.sha256(self.canonical()).hexdigest()


class Axis(Document):
    type: Literal["const", "var"]
    value: int | None = None


class TensorSpec(Document):
    shape: tuple[str, ...] | None
    dtype: str


class DefinitionExtension(Document):
    accumulation: str = "float32"
    equivalence: Literal["bitwise", "allclose", "distributional"] = "allclose"
    flops: Annotated[str, Field(description="an expression of the axes, for example 2*M*N*K")] = "0"
    bytes: str = "0"
    packed_inputs: Annotated[
        tuple[str, ...],
        Field(description="weights that may be repacked at load, each by one call of pm_pack"),
    ] = ()
    feature: Annotated[
        str | None,
        Field(description="what decides beside the bucket, an integer that the slot computes at each call"),
    ] = None
    bucket_axis: str = "M"
    optional_inputs: Annotated[
        tuple[str, ...], Field(description="inputs that a call may leave out (data == NULL)")
    ] = ()
    output_aliases: Annotated[
        dict[str, str], Field(description="output to the input whose memory it may share")
    ] = {}


class Definition(Document):
    """An operation: its axes, tensors and a readable reference (`run`, torch, float64 on request)."""

    name: str
    op_type: str
    axes: dict[str, Axis]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    reference: str
    tags: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    x_polymorph: DefinitionExtension = DefinitionExtension()


class SourceFile(Document):
    path: str
    content: str


class BuildSpec(Document):
    language: str = "cpp"
    target_hardware: tuple[str, ...] = ()
    entry_point: str = "kernel.cpp::pm_run"
    dependencies: tuple[str, ...] = ()
    destination_passing_style: bool = True
    binding: str = "polymorph-c-abi-1"


class SolutionExtension(Document):
    parent: str | None = None
    patch: str | None = None
    proposer: str = "unknown"
    pattern: str = ""
    params: dict[str, str] = {}
    isa: Annotated[
        str, Field(description="the lowest tier it needs, a name of enum pm_isa without PM_ISA_")
    ] = "GENERIC"
    layout_source: Annotated[
        str | None, Field(description="path of the source that alone decides the packing")
    ] = None
    numerics: Numerics = Numerics.REORDERED
    min_m: int = 1
    max_m: int = 1 << 30


class Solution(Document):
    """Code for a definition."""

    name: str
    definition: str
    author: str
    spec: BuildSpec
    sources: tuple[SourceFile, ...]
    x_polymorph: SolutionExtension = SolutionExtension()


class CapturedFile(Document):
    """The inputs of one call by their names, in a safetensors file of the object store."""

    m: int
    path: Annotated[
        str, Field(description="sha256; in the store `captures` where they derive from users' text")
    ]


class WorkloadExtension(Document):
    weight: Annotated[float, Field(description="share of the operation's live time that has this shape")] = (
        1.0
    )
    signature: str = ""
    captured_at: str | None = None
    expires_at: Annotated[str | None, Field(description="when captured inputs are gone from the store")] = (
        None
    )
    source_position: str | None = None
    privacy: Literal["synthetic", "own-engine", "captured"] = "synthetic"
    expert_histogram: Annotated[
        tuple[float, ...],
        Field(
            description="share of token-expert pairs by expert, the busiest first; empty where there are none"
        ),
    ] = ()
    captures: Annotated[
        tuple[CapturedFile, ...], Field(description="all calls; `inputs` names that of the largest M")
    ] = ()


class Workload(Document):
    """Axes values and inputs to run a definition on."""

    uuid: str
    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]
    x_polymorph: WorkloadExtension = WorkloadExtension()


class TraceStatus(StrEnum):
    PASSED = "PASSED"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    TIMEOUT = "TIMEOUT"
    REWARD_HACK = "REWARD_HACK"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID_REFERENCE = "INVALID_REFERENCE"


class Evaluation(Document):
    status: TraceStatus
    environment: dict[str, Any] = {}
    correctness: dict[str, Any] = {}
    performance: dict[str, Any] = {}


class TraceExtension(Document):
    samples: dict[str, Any] = {}
    interval: Ratio | None = None
    design: str = ""
    seed_commitment: str = ""
    hardware: str = ""
    guards: dict[str, Any] = {}
    inputs: Annotated[
        tuple[str, ...],
        Field(
            description="workloads whose captured inputs were among the cases; where they lie their privacy says"
        ),
    ] = ()


class Trace(Document):
    """What came out when a solution ran on a workload."""

    definition: str
    workload: str
    solution: str
    evaluation: Evaluation
    x_polymorph: TraceExtension = TraceExtension()


def _absent(value: object) -> bool:
    return value is None


class Manifest(Document):
    """What the evaluator signs about one artifact. Its digest names it in a KernelBinding.

    The ABI tells what the artifact is: a shared library (`polymorph-c-abi-1`), or the source of a Triton kernel
    (`triton-1`, `polymorph.engine.gpu.source`).
    """

    artifact: Annotated[str, Field(description="sha256 of the shared library, or of the source")]
    definition: str
    definition_digest: str
    solution: str
    abi: Literal["polymorph-c-abi-1", "triton-1"] = "polymorph-c-abi-1"
    hardware: Annotated[str, Field(description="hardware fingerprint it was measured on")]
    isa: str
    toolchain: str
    layout: Annotated[
        str | None, Field(description="digest of the packing; equal layouts share one packed weight")
    ]
    numerics: Numerics
    min_m: int
    max_m: int
    evidence: str
    # Not written where absent: what was signed before they came to be has the same bytes for ever.
    least: Annotated[
        int | None, Field(description="of the definition's feature; absent: approved at every value")
    ] = Field(default=None, exclude_if=_absent)
    most: Annotated[int | None, Field(description="likewise")] = Field(default=None, exclude_if=_absent)


class SignedManifest(Document):
    """A manifest with the evaluator's Ed25519 signature over its canonical bytes."""

    manifest: Manifest
    key_id: str
    signature: Annotated[str, Field(description="base64")]
