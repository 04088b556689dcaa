"""Inserts that a second writer may repeat: on both databases, without an error and without a second row."""

from typing import Any

from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlmodel import Session, SQLModel


def insert_once(session: Session, table: type[SQLModel], **values: Any) -> bool:
    """Whether the row is new; one with the same key stays as it is."""
    postgresql = session.get_bind().dialect.name == "postgresql"
    insert = postgresql_insert if postgresql else sqlite_insert
    statement = insert(table).values(**values).on_conflict_do_nothing()
    inserted: int = session.connection().execute(statement).rowcount
    return inserted == 1
