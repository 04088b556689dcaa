"""A database that is away, busy or restarted is a thing to wait for, not a reason to die."""

import asyncio
import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from polymorph.config.clock import SystemClock
from polymorph.ledger import database as databases
from polymorph.ledger.database import DatabaseUnavailable, SqlDatabase
from polymorph.ledger.migrations import upgrade
from polymorph.ledger.promotions import add_pool, pools


async def test_a_busy_sqlite_is_told_as_unavailable_and_works_again_after(tmp_path, monkeypatch):
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    await upgrade(url)
    monkeypatch.setattr(databases, "BUSY_TIMEOUT_MS", 50)
    opened = SqlDatabase(url)
    other = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    now = SystemClock().now()
    with pytest.raises(DatabaseUnavailable, match="locked"):
        await opened.write(lambda session: add_pool(session, "p", now))
    assert await opened.read(pools) == []
    other.execute("ROLLBACK")
    other.close()
    await opened.write(lambda session: add_pool(session, "p", now))
    assert await opened.read(pools) == ["p"]
    await opened.close()


async def test_a_database_without_our_tables_is_our_fault_and_stays_loud(tmp_path):
    opened = SqlDatabase(f"sqlite+aiosqlite:///{tmp_path}/x.db")
    with pytest.raises(OperationalError, match="no such table"):
        await opened.read(pools)
    await opened.close()


async def test_a_server_that_is_not_there_is_told_as_unavailable():
    opened = SqlDatabase("postgresql+asyncpg://nobody@127.0.0.1:1/x")
    with pytest.raises(DatabaseUnavailable, match="does not answer"):
        await opened.read(pools)
    await opened.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_connections_that_the_server_ended_are_made_anew(database):
    end_all = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    now = SystemClock().now()
    await database.write(lambda session: add_pool(session, "p", now))
    killer = SqlDatabase(database.engine.url.render_as_string(hide_password=False))
    await killer.read(lambda session: session.connection().execute(end_all).all())
    assert await database.read(pools) == ["p"]

    def dies_within(session):
        session.connection().execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(DatabaseUnavailable):
        await database.write(dies_within)
    assert await database.read(pools) == ["p"]
    await killer.close()


async def test_services_that_start_together_migrate_once(database_url):
    await asyncio.gather(*(upgrade(database_url) for _ in range(4)))
    opened = SqlDatabase(database_url)
    assert await opened.read(pools) == []
    await opened.close()


def test_processes_that_make_the_file_together_all_find_it_in_wal_mode(tmp_path):
    """SQLite refuses one of two that switch a new file at once, without waiting."""
    for number in range(20):
        path = str(tmp_path / f"{number}.db")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(databases.use_wal, [path] * 8))
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
