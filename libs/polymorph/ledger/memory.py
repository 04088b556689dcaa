"""What a service must remember between two starts, as documents by key."""

import datetime as dt
from typing import Any

from sqlalchemy import Column
from sqlmodel import Field, Session, SQLModel, col, select

from polymorph.ledger.columns import DOCUMENT, UtcDateTime


class MemoryRow(SQLModel, table=True):
    """One document of one service; written in the transaction of the facts that it agrees with."""

    __tablename__ = "memory"

    owner: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    document: dict[str, Any] = Field(sa_column=Column(DOCUMENT, nullable=False))
    updated_at: dt.datetime = Field(sa_column=Column(UtcDateTime, nullable=False))


def recall(session: Session, owner: str, key: str) -> dict[str, Any] | None:
    row = session.get(MemoryRow, (owner, key))
    return None if row is None else row.document


def recall_all(session: Session, owner: str, prefix: str) -> dict[str, dict[str, Any]]:
    """Every document of `owner` whose key begins with `prefix`, by key."""
    statement = select(MemoryRow).where(
        MemoryRow.owner == owner, col(MemoryRow.key).startswith(prefix, autoescape=True)
    )
    return {row.key: row.document for row in session.exec(statement)}


def remember(session: Session, owner: str, key: str, document: dict[str, Any], now: dt.datetime) -> None:
    """Keeps `document` in place of the one before."""
    session.merge(MemoryRow(owner=owner, key=key, document=document, updated_at=now))
    session.flush()
