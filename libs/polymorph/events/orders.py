"""Orders, version 1: one piece of work each, kept in the work queue until it is done."""

from typing import Annotated

from pydantic import Field

from polymorph.events.base import Command
from polymorph.events.values import (
    Gate,
    Revision,
)


class EvaluateCandidate(Command):
    """Take one candidate through the gates, up to and with `until`.

    `incumbent` is the revision that the pool runs now; `best_so_far` the artifact that G3 compares with, or None for
    the engine's own code.
    """

    DOMAIN = "evaluator"
    NAME = "evaluate-candidate"

    pool: str
    search_id: str
    candidate_id: str
    evaluation_id: str
    hardware: Annotated[str, Field(description="hardware class token; one durable consumer for each")]
    definition: str
    solution: str
    workload: Annotated[str, Field(description="sha256 of the workload document in the object store")]
    incumbent: Revision
    until: Gate
    min_m: int
    max_m: int
    confirm_seed: Annotated[
        int, Field(description="0 for a first look; else a fresh round of secret seeds")
    ] = 0

    def subject_id(self) -> str:
        return self.hardware
