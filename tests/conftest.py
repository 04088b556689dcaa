"""Fixtures for every test: a real nats-server with its topology, and buses on it that are closed afterwards.

Tests run in two processes (`make test`). What shares a server or an engine runs in one of them, and a test that times
something has the machine to itself.
"""

import asyncio
import fcntl
import logging
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
from xdist.scheduler import LoadScopeScheduling

from polymorph.bus.credentials import Role
from polymorph.bus.nats import NatsBus
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock

# Cores that others use too make any example late.
hypothesis.settings.register_profile("shared-cores", deadline=None)
hypothesis.settings.load_profile("shared-cores")

BusFactory = Callable[..., Awaitable[NatsBus]]


SHARING = ("tests/integration/", "tests/contract/ledger/")
"""Folders whose tests share a server or an engine."""
CHANGES_VLLM = "polymorph.engine.extension"
ALONE = "tests/integration/evaluator/"
LONGEST = ("tests/integration/plain/", "tests/integration/worker/", "tests/integration/embedded/")
"""Folders that take minutes each: they begin first, so that no process is left with one when the other has ended."""


class ByPlace(LoadScopeScheduling):
    """One process runs all of a folder that shares something, else all of a file."""

    def _split_scope(self, nodeid: str) -> str:
        place = nodeid.split("::", maxsplit=1)[0]
        return place.rpartition("/")[0] if place.startswith(SHARING) else place


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest first, in every process alike; what is to run alone lies where `make test` looks for it, and no module of
    tests changes vLLM by being imported.
    """
    if CHANGES_VLLM in sys.modules:
        raise pytest.UsageError(
            f"import {CHANGES_VLLM} in a process of its own: it changes vLLM for all other tests"
        )
    for item in items:
        if item.get_closest_marker("alone") and not item.nodeid.startswith(ALONE):
            raise pytest.UsageError(
                f"{item.nodeid} is marked `alone`: make test looks for those in {ALONE} only"
            )
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        places = [*LONGEST, ""]
        items.sort(
            key=lambda item: next(i for i, place in enumerate(places) if item.nodeid.startswith(place))
        )


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM ends a run as Ctrl-C does: the servers and engines that fixtures started are stopped."""
    config.option.loadscopereorder = False  # `LONGEST` says what comes first
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPlace:
    return ByPlace(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` waits until the other process is between two tests, and that one waits for it."""
    run = getattr(item.config, "workerinput", {}).get("testrunuid")
    if run is None:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    with (Path(tempfile.gettempdir()) / f"polymorph-tests-{run}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _run(work: Any) -> Any:
    """Runs a coroutine where no event loop of a test can be in the way."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server of the test's own, with accounts and topology.

    `.url`, `.settings(role)`, `await .kill()`, `await .start()` on the same files.
    """
    port, monitor_port = free_ports(2)
    server = NatsServer(tmp_path / "nats", port=port, monitor_port=monitor_port)

    async def begin() -> None:
        await server.start()
        await provision(server.settings("operator"), monitor_url=server.monitor_url)

    try:
        _run(begin())
        yield server
    finally:
        _run(server.kill())


@pytest_asyncio.fixture
async def bus_factory(nats_server: NatsServer) -> AsyncIterator[BusFactory]:
    """`await bus_factory("compiler")` connects a NatsBus as that role."""
    made: list[NatsBus] = []

    async def connect(role: Role = "compiler", source: str | None = None, **options: Any) -> NatsBus:
        name = source or f"/polymorph/{role}/{len(made)}"
        bus = await NatsBus.connect(nats_server.settings(role), name, SystemClock(), **options)
        made.append(bus)
        return bus

    yield connect
    for bus in made:
        await bus.close()


@pytest.fixture(autouse=True)
def _heard() -> None:
    """vLLM, where a test of this process has loaded it, lets nothing below an error reach the root logger."""
    logging.getLogger().setLevel(logging.WARNING)
