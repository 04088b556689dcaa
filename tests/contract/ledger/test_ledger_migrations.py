"""Migrations and tables agree, on both databases."""

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect
from sqlmodel import SQLModel

from polymorph.ledger.database import create_engine
from polymorph.ledger.migrations import downgrade_connection, upgrade


def differences(connection: Connection) -> list[object]:
    return compare_metadata(MigrationContext.configure(connection), SQLModel.metadata)


async def test_migrations_make_the_tables_of_the_models(database_url):
    await upgrade(database_url)
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


async def test_upgrade_is_a_no_op_the_second_time_and_downgrade_takes_everything_back(database_url):
    await upgrade(database_url)
    await upgrade(database_url)
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(downgrade_connection, "base")
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    assert names == ["alembic_version"]
    await engine.dispose()
    await upgrade(database_url)


async def test_sqlite_runs_with_wal_foreign_keys_and_full_sync(tmp_path):
    engine = create_engine(f"sqlite+aiosqlite:///{tmp_path}/x.db")
    async with engine.connect() as connection:
        read = {}
        for pragma in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout"):
            read[pragma] = (await connection.exec_driver_sql(f"PRAGMA {pragma}")).scalar()
    assert read == {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2, "busy_timeout": 10_000}
    await engine.dispose()


def test_another_kind_of_database_is_refused():
    with pytest.raises(ValueError, match="sqlite\\+aiosqlite:///PATH"):
        create_engine("sqlite:///x.db")
