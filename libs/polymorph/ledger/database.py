"""Transactions on SQLite (embedded) and PostgreSQL (compose): one function, one transaction."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection, Engine, event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session as PlainSession
from sqlmodel import Session

T = TypeVar("T")
Work = Callable[[Session], T]

BUSY_TIMEOUT_MS = 10_000
_DRIVERS = frozenset({"sqlite+aiosqlite", "postgresql+asyncpg"})
_READ_ONLY = "polymorph_read_only"


class Database(Protocol):
    """Runs work in a transaction: all of it is kept, or none."""

    async def write(self, work: Work[T]) -> T: ...

    async def read(self, work: Work[T]) -> T: ...

    async def close(self) -> None: ...


class SqlDatabase:
    """A database by its URL: `sqlite+aiosqlite:///path` or `postgresql+asyncpg://user@host/name`."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    async def write(self, work: Work[T]) -> T:
        async with self._session() as session, session.begin():
            return await session.run_sync(cast("Callable[[PlainSession], T]", work))

    async def read(self, work: Work[T]) -> T:
        async with self._session() as session:
            await session.connection(execution_options={_READ_ONLY: True})
            return await session.run_sync(cast("Callable[[PlainSession], T]", work))

    async def close(self) -> None:
        await self._engine.dispose()

    def _session(self) -> AsyncSession:
        return AsyncSession(self._engine, sync_session_class=Session, expire_on_commit=False)


def create_engine(url: str) -> AsyncEngine:
    """An engine with our rules for its kind of database.

    Raises:
        ValueError: a URL of another kind.
    """
    driver = make_url(url).drivername
    if driver not in _DRIVERS:
        raise ValueError(
            f"{driver} is not supported: use sqlite+aiosqlite:///PATH or postgresql+asyncpg://..."
        )
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine.sync_engine)
    return engine


def prepare_sqlite(engine: Engine) -> None:
    """WAL, foreign keys, patience, and a write lock taken at the start of every transaction that may write.

    A deferred transaction that reads and then writes fails at once where another wrote in between; BEGIN IMMEDIATE
    waits instead, as long as `BUSY_TIMEOUT_MS`.
    """

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")
