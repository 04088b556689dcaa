"""Transactions on SQLite (embedded) and PostgreSQL (compose): one function, one transaction."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection, Engine, event, make_url
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session as PlainSession
from sqlmodel import Session

from polymorph.bus.errors import Retryable

T = TypeVar("T")
Work = Callable[[Session], T]

BUSY_TIMEOUT_MS = 10_000
_WAL_RETRY_S = 0.02
_DRIVERS = frozenset({"sqlite+aiosqlite", "postgresql+asyncpg"})
_LOST_RACE = frozenset({"40001", "40P01"})
"""PostgreSQL's serialization failure and deadlock: the other transaction won, ours may be tried again."""
_READ_ONLY = "polymorph_read_only"


class DatabaseUnavailable(Retryable):
    """The database does not answer, or somebody held it too long."""


class Database(Protocol):
    """Runs work in a transaction: all of it is kept, or none. Raises `DatabaseUnavailable`."""

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
        with _told_as_unavailable():
            return await self._write(work)

    async def read(self, work: Work[T]) -> T:
        with _told_as_unavailable():
            return await self._read(work)

    async def _write(self, work: Work[T]) -> T:
        async with self._session() as session, session.begin():
            return await session.run_sync(cast("Callable[[PlainSession], T]", work))

    async def _read(self, work: Work[T]) -> T:
        async with self._session() as session:
            await session.connection(execution_options={_READ_ONLY: True})
            return await session.run_sync(cast("Callable[[PlainSession], T]", work))

    async def close(self) -> None:
        await self._engine.dispose()

    def _session(self) -> AsyncSession:
        return AsyncSession(self._engine, sync_session_class=Session, expire_on_commit=False)


@contextlib.contextmanager
def _told_as_unavailable() -> Iterator[None]:
    """What may be gone by the next attempt becomes `DatabaseUnavailable`; a fault of ours stays what it is."""
    try:
        yield
    except OSError as error:
        raise DatabaseUnavailable(f"the database does not answer: {error}") from error
    except DBAPIError as error:
        busy = isinstance(error, OperationalError) and "locked" in str(error.orig)
        lost = getattr(error.orig, "sqlstate", None) in _LOST_RACE
        if busy or lost or error.connection_invalidated:
            raise DatabaseUnavailable(f"the database does not answer: {error.orig}") from error
        raise


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
    engine = create_async_engine(url, pool_pre_ping=driver.startswith("postgresql"))
    if engine.dialect.name == "sqlite":
        prepare_sqlite(engine.sync_engine)
    return engine


def use_wal(path: str) -> None:
    """Puts the SQLite file at `path` into WAL mode, which it keeps. Blocks.

    The change needs the file alone, and SQLite refuses it at once where another process opens the new file too: its
    own patience does not cover this one lock.

    Raises:
        sqlite3.OperationalError: the file is not ours, or was held for all of `BUSY_TIMEOUT_MS`.
    """
    until = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(_WAL_RETRY_S)
            else:
                return


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
