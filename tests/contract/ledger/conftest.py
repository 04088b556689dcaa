"""Every database that the ledger runs on: SQLite in a file, and PostgreSQL where there is one to be had."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from polymorph.config.clock import SystemClock
from polymorph.ledger.database import SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.migrations import upgrade

SOURCE = "/polymorph/compiler/test"
NO_POSTGRES = (
    "no PostgreSQL: set POLYMORPH_TEST_POSTGRES_URL, or install one that a user other than root can start"
)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server without database name."""
    given = os.environ.get("POLYMORPH_TEST_POSTGRES_URL")
    if given:
        yield given.rsplit("/", 1)[0]
        return
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    account = _account()
    if not binaries or account is None:
        pytest.skip(NO_POSTGRES)
    yield from _own_server(binaries[-1].parent, account)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sqlite":
        yield f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
        return
    server = request.getfixturevalue("postgres_server")
    name = f"test_{uuid.uuid4().hex[:12]}"
    connection = await asyncpg.connect(f"{server.replace('+asyncpg', '')}/postgres")
    await connection.execute(f"CREATE DATABASE {name}")
    yield f"{server}/{name}"
    await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await connection.close()


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[SqlDatabase]:
    await upgrade(database_url)
    opened = SqlDatabase(database_url)
    yield opened
    await opened.close()


@pytest.fixture
def ledger(database: SqlDatabase) -> Ledger:
    return Ledger(database, SystemClock(), source=SOURCE)


def _account() -> str | None:
    """PostgreSQL refuses to run as root; another user's name where we are root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


def _own_server(binaries: Path, account: str) -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="polymorph-postgres-"))
    as_user = {}
    if os.getuid() == 0:
        owner = pwd.getpwnam(account)
        shutil.chown(folder, owner.pw_uid, owner.pw_gid)
        as_user = {"user": account, "group": owner.pw_gid, "extra_groups": []}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, **as_user}
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "polymorph", "-A", "trust", "--no-sync"],
        check=True,
        env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
        **quiet,
    )
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    control = [binaries / "pg_ctl", "-D", data, "-w"]
    subprocess.run([*control, "-l", folder / "log", "-o", options, "start"], check=True, **quiet)
    try:
        yield f"postgresql+asyncpg://polymorph@127.0.0.1:{port}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, **quiet)
        shutil.rmtree(folder)
