"""What a plain server says of itself in `status.json`."""

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Refusal(BaseModel):
    """Something that the server was told to run and does not."""

    model_config = ConfigDict(frozen=True)

    at: dt.datetime
    generation: int
    revision: str
    reason: str


class Engaged(BaseModel):
    """A kernel that a slot points at; calls since the engine started, on all ranks."""

    model_config = ConfigDict(frozen=True)

    definition: str
    min_m: int
    max_m: int
    artifact: str
    served_calls: int
    by_m: dict[str, int] = {}
    errors: int


class PlainStatus(BaseModel):
    """Written anew every few seconds: where `at` is old, nobody serves this folder."""

    model_config = ConfigDict(frozen=True)

    pool: str
    at: dt.datetime
    process: int
    state: Literal["converged", "loading", "waiting", "refused", "stock"]
    reason: Annotated[str, Field(description="why it waits, or why the newest revision is not run")] = ""
    generation: Annotated[int, Field(description="the newest that was admitted; -1 before the first")]
    revision: Annotated[str, Field(description="what the engine runs")]
    epoch: Annotated[int, Field(description="how often the table of kernels was replaced")] = 0
    ranks: int = 0
    kernels: tuple[Engaged, ...] = ()
    slots: Annotated[
        dict[str, dict[str, int]],
        Field(description="definition, bucket of M, calls by whatever code"),
    ] = {}
    missing: Annotated[dict[str, str], Field(description="slots that are off, with the reason")] = {}
    refusals: Annotated[tuple[Refusal, ...], Field(description="the newest last")] = ()

    def lines(self) -> list[str]:
        """For a person."""
        told = [
            f"pool {self.pool}, {self.state}, generation {self.generation}, runs {self.revision}",
            f"  epoch {self.epoch}, {self.ranks} ranks, told at {self.at:%Y-%m-%d %H:%M:%S %Z}",
        ]
        if self.reason:
            told.append(f"  {self.reason}")
        told += [
            f"  {kernel.definition} M {kernel.min_m} to {kernel.max_m}: {kernel.artifact[:12]} served "
            f"{kernel.served_calls} calls, {kernel.errors} errors"
            for kernel in self.kernels
        ]
        told += [f"  off: {slot}: {reason}" for slot, reason in self.missing.items()]
        told += [f"  refused: generation {each.generation}: {each.reason}" for each in self.refusals]
        return told


def counted(documents: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Calls by definition and bucket over all ranks, from the answers of `slots_read`."""
    total: dict[str, dict[str, int]] = {}
    for document in documents:
        for definition, counts in document.get("definitions", {}).items():
            buckets = total.setdefault(definition, {})
            for upper, tally in counts["by_m"].items():
                buckets[upper] = buckets.get(upper, 0) + tally["calls"]
    return total


def engaged(bindings: list[dict[str, Any]], documents: list[dict[str, Any]]) -> tuple[Engaged, ...]:
    """What each binding's artifact served, over all ranks."""
    return tuple(_engaged(binding, documents) for binding in bindings)


def _engaged(binding: dict[str, Any], documents: list[dict[str, Any]]) -> Engaged:
    counts = [
        document["artifacts"][binding["artifact"]]
        for document in documents
        if binding["artifact"] in document.get("artifacts", {})
    ]
    by_m: dict[str, int] = {}
    for one in counts:
        for upper, tally in one.get("by_m", {}).items():
            by_m[upper] = by_m.get(upper, 0) + tally["calls"]
    return Engaged(
        definition=binding["definition"],
        min_m=binding["min_m"],
        max_m=binding["max_m"],
        artifact=binding["artifact"],
        served_calls=sum(one["served"]["calls"] for one in counts),
        by_m=by_m,
        errors=sum(one["errors"] for one in counts),
    )
