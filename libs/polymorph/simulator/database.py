"""The ledger's own SQL in a simulation: SQLite in memory, one transaction at a time, no thread."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy import Engine, StaticPool, create_engine
from sqlmodel import Session, SQLModel

import polymorph.ledger.memory
import polymorph.ledger.tables  # noqa: F401 - fills the metadata
from polymorph.ledger.database import Work, prepare_sqlite

T = TypeVar("T")
_IDLE: list[Engine] = []


class SimulatedDatabase:
    """A `polymorph.ledger.database.Database` that outlives the crashes of its callers.

    `pause` is awaited before and after every transaction: there the simulation interleaves and crashes.
    """

    def __init__(self, pause: Callable[[str], Awaitable[None]]) -> None:
        self._engine = _IDLE.pop() if _IDLE else _new_engine()
        self._pause = pause

    async def write(self, work: Work[T]) -> T:
        await self._pause("sql before")
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            result = work(session)
        await self._pause("sql after")
        return result

    async def read(self, work: Work[T]) -> T:
        await self._pause("sql before")
        with Session(self._engine, expire_on_commit=False) as session:
            return work(session)

    def peek(self, work: Work[T]) -> T:
        """Reads at once, for a checker: no pause, no fault."""
        with Session(self._engine, expire_on_commit=False) as session:
            return work(session)

    async def close(self) -> None:
        """Empties the database and leaves its engine, with every statement compiled, to the next simulation."""
        with self._engine.begin() as connection:
            for table in reversed(SQLModel.metadata.sorted_tables):
                connection.execute(table.delete())
        _IDLE.append(self._engine)


def _new_engine() -> Engine:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    prepare_sqlite(engine)
    SQLModel.metadata.create_all(engine)
    return engine
