"""Migrations, shipped with the package: `await upgrade(url)` brings a database to this release's tables."""

import asyncio
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from polymorph.ledger.database import create_engine, use_wal

_LOCK = 0x706F6C79
"""The advisory lock of migrations: "poly" in ASCII."""


async def upgrade(url: str, revision: str = "head") -> None:
    """Runs what is missing, in one transaction; does nothing where nothing is."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite" and engine.url.database:
        await asyncio.to_thread(use_wal, engine.url.database)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(upgrade_connection, revision)
    finally:
        await engine.dispose()


def upgrade_connection(connection: Connection, revision: str = "head") -> None:
    """One at a time: services that start together find the tables made by the first."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    command.upgrade(_config(connection), revision)


def downgrade_connection(connection: Connection, revision: str) -> None:
    command.downgrade(_config(connection), revision)


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
