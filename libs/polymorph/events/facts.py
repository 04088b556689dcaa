"""Facts, version 1: what happened, in the past tense, kept in the stream of events."""

import datetime as dt
from typing import Annotated, Literal

from pydantic import Field

from polymorph.events.base import Event
from polymorph.events.values import (
    EngineSettings,
    Gate,
    Numerics,
    Operation,
    Quantiles,
    Ratio,
    Revision,
    StepTime,
    TrafficShape,
    Verdict,
    Way,
)


class TrafficShapeObserved(Event):
    """One window of one pool's traffic, folded by the router."""

    DOMAIN = "traffic"
    NAME = "shape-observed"

    pool: str
    model: str
    window_start: dt.datetime
    window_s: float
    shape: TrafficShape
    ttft_s: Quantiles | None = None
    tpot_s: Quantiles | None = None
    output_tokens_per_s: float = 0.0
    step_s: Annotated[float, Field(ge=0, description="seconds of engine steps, all workers together")] = 0.0
    operations: tuple[Operation, ...] = ()
    step_time: Annotated[
        StepTime | None, Field(description="None where no step was profiled in the window")
    ] = None
    workers: Annotated[int, Field(ge=0)] = 0
    revision: str = "empty"

    def subject_id(self) -> str:
        return self.pool


class DriftDetected(Event):
    """The traffic of a pool has left the shape that its revision was tuned for."""

    DOMAIN = "traffic"
    NAME = "drift-detected"

    pool: str
    drift_id: str
    window_start: dt.datetime
    distance: Annotated[float, Field(description="0 is the same shape; the threshold is in `threshold`")]
    threshold: float
    windows: Annotated[int, Field(description="windows in a row that stood beyond the threshold")]
    reason: Annotated[str, Field(description="one plain sentence")]
    tuned_for: TrafficShape | None
    observed: TrafficShape
    operations: Annotated[
        tuple[Operation, ...], Field(description="where the engines' time went while this was observed")
    ] = ()
    step_time: Annotated[
        StepTime | None, Field(description="the same by profiled steps; None where none was profiled")
    ] = None

    def subject_id(self) -> str:
        return self.pool


class SearchOpened(Event):
    """A search began, because what it may gain pays for what it costs."""

    DOMAIN = "search"
    NAME = "opened"

    pool: str
    search_id: str
    drift_id: str | None
    definition: str
    min_m: int
    max_m: int
    share: Annotated[float, Field(description="share of engine step time of the operation, in [0, 1]")]
    budget_candidates: int
    hardware: str
    reason: str

    def subject_id(self) -> str:
        return self.pool


class SearchClosed(Event):
    """A search ended, with a winner or without."""

    DOMAIN = "search"
    NAME = "closed"

    pool: str
    search_id: str
    outcome: Literal["promoted", "nothing-better", "budget-spent", "cancelled", "failed"]
    winner: str | None
    candidates: int
    cpu_s: Annotated[float, Field(description="processor seconds the evaluations took")]
    reason: str

    def subject_id(self) -> str:
        return self.pool


class CandidateProposed(Event):
    """An agent proposed a candidate; its sources lie in the object store under `solution`."""

    DOMAIN = "candidate"
    NAME = "proposed"

    pool: str
    search_id: str
    candidate_id: str
    definition: str
    solution: Annotated[str, Field(description="sha256 of the solution document in the object store")]
    parent: str | None
    proposer: str
    pattern: Annotated[str, Field(description="what was changed, in the agent's vocabulary")]
    params: dict[str, str] = {}

    def subject_id(self) -> str:
        return self.pool


class CandidateEvaluated(Event):
    """A candidate left the gates; `gate` is the last one it met."""

    DOMAIN = "candidate"
    NAME = "evaluated"

    pool: str
    search_id: str
    candidate_id: str
    evaluation_id: str
    gate: Gate
    verdict: Verdict
    reason: Annotated[str, Field(description="one sentence that the candidate's author can act on")]
    speedup: Annotated[Ratio | None, Field(description="against the incumbent, 95 % interval")] = None
    numerics: Numerics | None = None
    manifest: Annotated[str | None, Field(description="sha256; only where the verdict is passed")] = None
    artifact: str | None = None
    isolation: Annotated[str, Field(description="the isolation level the candidate ran under")] = ""
    evidence: Annotated[str | None, Field(description="sha256 of the Trace document in the object store")] = (
        None
    )
    cpu_s: float = 0.0
    greedy_agreement: float | None = None
    greedy_agreement_incumbent: float | None = None

    def subject_id(self) -> str:
        return self.pool


class PromotionAdvanced(Event):
    """The desired state of a pool moved one stage."""

    DOMAIN = "promotion"
    NAME = "advanced"

    pool: str
    promotion_id: str
    generation: int
    stage: Literal["shadow", "canary", "full"]
    share: float
    revision: Revision
    reason: str

    def subject_id(self) -> str:
        return self.pool


class PromotionCompleted(Event):
    """A revision is the stable one of its pool, and the desired state says so."""

    DOMAIN = "promotion"
    NAME = "completed"

    pool: str
    promotion_id: str
    generation: int
    revision: Revision
    speedup: Ratio | None
    drift_id: str | None = None
    reason: str

    def subject_id(self) -> str:
        return self.pool


class PromotionRolledBack(Event):
    """A revision was taken back."""

    DOMAIN = "promotion"
    NAME = "rolled-back"

    pool: str
    promotion_id: str
    generation: int
    revision: Revision
    back_to: Revision
    reason: str

    def subject_id(self) -> str:
        return self.pool


class WorkerLoaded(Event):
    """A worker runs a revision: every engaged slot was read back and had served calls."""

    DOMAIN = "worker"
    NAME = "loaded"

    pool: str
    worker_id: str
    generation: int
    revision: str
    kernels: tuple[str, ...]
    served_calls: Annotated[int, Field(description="calls that the new kernels served when read back")]
    load_s: float
    paused_s: Annotated[float, Field(description="how long the engine stood still")]
    settings: Annotated[
        EngineSettings | None, Field(description="in force, as read from inside the engine afterwards")
    ] = None
    way: Annotated[Way | None, Field(description="how the settings came to be")] = None
    stood_s: Annotated[
        float | None,
        Field(description="how long streams, or newcomers where none ran, stood still for the settings"),
    ] = None
    served: Annotated[
        dict[str, int], Field(description="artifact -> calls that it had served when read back")
    ] = {}

    def subject_id(self) -> str:
        return self.pool


class WorkerRefused(Event):
    """A worker did not load a revision and goes on with what it had."""

    DOMAIN = "worker"
    NAME = "refused"

    pool: str
    worker_id: str
    generation: Annotated[int, Field(description="-1 where the desired state could not be read")]
    revision: str
    reason: str

    def subject_id(self) -> str:
        return self.pool


class WorkerKernelFaulted(Event):
    """A kernel took a worker's engine down or held it up; the worker runs it no more and started another engine."""

    DOMAIN = "worker"
    NAME = "kernel-faulted"

    pool: str
    worker_id: str
    generation: int
    revision: str
    definition: str
    artifact: str
    how: Literal["crash", "hang"]
    evidence: Annotated[str, Field(description="one plain sentence: what was seen")]
    at: dt.datetime

    def subject_id(self) -> str:
        return self.pool


class HostLeased(Event):
    """The evaluator had the host's cores to itself for a while; requests waited that long in all."""

    DOMAIN = "worker"
    NAME = "host-leased"

    pool: str
    worker_id: str
    lease_id: str
    bursts: int
    stolen_s: Annotated[
        float, Field(description="seconds that the engine was paused, in bursts of at most 0.3")
    ]

    def subject_id(self) -> str:
        return self.pool
