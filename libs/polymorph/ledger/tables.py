"""The record: what was searched, proposed, measured and promoted, and the messages that go with it."""

import datetime as dt
from enum import StrEnum
from typing import Any

from sqlalchemy import Column
from sqlmodel import Field, SQLModel

from polymorph.ledger.columns import DOCUMENT, UtcDateTime


def _moment(*, nullable: bool = False, index: bool = False) -> Any:
    return Field(sa_column=Column(UtcDateTime, nullable=nullable, index=index))


def _optional_moment(*, index: bool = False) -> Any:
    return Field(default=None, sa_column=Column(UtcDateTime, nullable=True, index=index))


def _document() -> Any:
    return Field(sa_column=Column(DOCUMENT, nullable=False))


def _optional_document() -> Any:
    return Field(default=None, sa_column=Column(DOCUMENT, nullable=True))


class StepStatus(StrEnum):
    """Where one change of a desired state stands. What key-value shows is the truth; this is the record of it."""

    INTENT = "intent"
    CONFIRMED = "confirmed"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


class PoolRow(SQLModel, table=True):
    """A pool and the last generation allocated in it: the fencing token of its desired state."""

    __tablename__ = "pools"

    pool: str = Field(primary_key=True)
    generation: int = 0
    created_at: dt.datetime = _moment()


class RevisionRow(SQLModel, table=True):
    """A revision that a pool was, at some time, meant to run."""

    __tablename__ = "revisions"

    pool: str = Field(primary_key=True, foreign_key="pools.pool")
    revision: str = Field(primary_key=True)
    parent: str | None = None
    content: dict[str, Any] = _document()
    created_at: dt.datetime = _moment()


class PromotionRow(SQLModel, table=True):
    """One promotion from the proposal to its end; `phase` is the compiler's word."""

    __tablename__ = "promotions"

    promotion_id: str = Field(primary_key=True)
    pool: str = Field(foreign_key="pools.pool", index=True)
    revision: str
    phase: str = Field(index=True)
    reason: str
    drift_id: str | None = None
    proposal: dict[str, Any] = _document()
    created_at: dt.datetime = _moment()
    updated_at: dt.datetime = _moment()


class StepRow(SQLModel, table=True):
    """One change of a pool's desired state: the intent, with everything needed to finish it.

    `base_generation` is the generation that the change was planned on; `target` the desired state without signature;
    `messages` are published and `phases` set once key-value shows the target.
    """

    __tablename__ = "promotion_steps"

    pool: str = Field(primary_key=True, foreign_key="pools.pool")
    generation: int = Field(primary_key=True)
    base_generation: int
    promotion_id: str | None = None
    action: str
    status: str = Field(index=True)
    reason: str
    target: dict[str, Any] = _document()
    messages: list[dict[str, Any]] = _document()
    phases: dict[str, str] = _document()
    created_at: dt.datetime = _moment()
    settled_at: dt.datetime | None = _optional_moment()


class SearchRow(SQLModel, table=True):
    """A search; `outcome` is empty while it runs."""

    __tablename__ = "searches"

    search_id: str = Field(primary_key=True)
    pool: str = Field(index=True)
    drift_id: str | None = None
    definition: str
    min_m: int
    max_m: int
    share: float
    budget_candidates: int
    hardware: str
    reason: str
    outcome: str | None = Field(default=None, index=True)
    winner: str | None = None
    candidates: int = 0
    cpu_s: float = 0.0
    closing_reason: str | None = None
    opened_at: dt.datetime = _moment()
    closed_at: dt.datetime | None = _optional_moment()


class CandidateRow(SQLModel, table=True):
    """A candidate of a search; its sources lie in the object store under `solution`."""

    __tablename__ = "candidates"

    candidate_id: str = Field(primary_key=True)
    search_id: str = Field(foreign_key="searches.search_id", index=True)
    pool: str
    definition: str
    solution: str
    parent: str | None = None
    proposer: str
    pattern: str
    params: dict[str, str] = _document()
    proposed_at: dt.datetime = _moment()


class EvaluationRow(SQLModel, table=True):
    """An evaluation from its order to its verdict; `verdict` is empty until then."""

    __tablename__ = "evaluations"

    evaluation_id: str = Field(primary_key=True)
    candidate_id: str = Field(foreign_key="candidates.candidate_id", index=True)
    search_id: str = Field(foreign_key="searches.search_id", index=True)
    until: str | None = None
    gate: str | None = None
    verdict: str | None = Field(default=None, index=True)
    reason: str | None = None
    speedup: dict[str, Any] | None = _optional_document()
    result: dict[str, Any] | None = _optional_document()
    cpu_s: float = 0.0
    ordered_at: dt.datetime | None = _optional_moment()
    evaluated_at: dt.datetime | None = _optional_moment()


class TenantRow(SQLModel, table=True):
    """Who may call the gateway; only the digest of a key is kept."""

    __tablename__ = "tenants"

    tenant_id: str = Field(primary_key=True)
    name: str
    key_digest: str = Field(unique=True)
    disabled: bool = False
    created_at: dt.datetime = _moment()


class OutboxRow(SQLModel, table=True):
    """A message to publish, written in the transaction of the state that it tells of."""

    __tablename__ = "outbox"

    sequence: int | None = Field(default=None, primary_key=True)
    message_id: str = Field(unique=True)
    type: str
    data: dict[str, Any] = _document()
    created_at: dt.datetime = _moment()
    published_at: dt.datetime | None = _optional_moment(index=True)


class InboxRow(SQLModel, table=True):
    """A message whose effect a consumer has already written."""

    __tablename__ = "inbox"

    consumer: str = Field(primary_key=True)
    message_id: str = Field(primary_key=True)
    received_at: dt.datetime = _moment()
