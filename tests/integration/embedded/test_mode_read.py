"""The mode that `polymorph status` and the ready line tell: the pool's own, from a real NATS."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polymorph.bus import topology
from polymorph.bus.credentials import Credentials
from polymorph.bus.nats.bus import NatsBus
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock
from polymorph.embedded import secrets
from polymorph.embedded.cli import main
from polymorph.embedded.folder import DataFolder, free_port
from polymorph.embedded.mode import settled_mode, told
from polymorph.events.state import DesiredState, Mode

pytestmark = pytest.mark.real
POOL = "pool-of-this-test"


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    made = DataFolder(tmp_path / "data")
    made.make()
    return made


@pytest.fixture
def server(folder: DataFolder) -> Iterator[NatsServer]:
    """As the supervisor runs it: with the credentials of the data folder."""
    nats = NatsServer(
        folder.service("nats"),
        port=free_port(),
        monitor_port=free_port(),
        credentials=secrets.ensure(folder),
    )
    with (folder.logs / "nats.log").open("wb") as log:
        process = subprocess.Popen(nats.command(), stdout=log, stderr=log)
    try:
        asyncio.run(provisioned(nats))
        yield nats
    finally:
        process.kill()
        process.wait(timeout=30)


async def provisioned(nats: NatsServer) -> None:
    async with asyncio.timeout(30):
        while not await nats.healthy():
            await asyncio.sleep(0.05)
    await provision(nats.settings("operator"), monitor_url=nats.monitor_url)


async def put(nats: NatsServer, mode: Mode) -> None:
    bus = await NatsBus.connect(nats.settings("compiler"), "test", SystemClock())
    state = DesiredState(pool=POOL, generation=1, mode=mode)
    await bus.kv_put(topology.DESIRED, POOL, state.model_dump_json().encode())
    await bus.close()


def write_state(folder: DataFolder, nats: NatsServer) -> None:
    """As a start without --mode writes it."""
    child = {"state": "ready", "restarts": 0, "detail": "", "where": ""}
    facts = {"nats": nats.url, "pool": POOL, "mode": None, "url": "u", "model": "m"}
    folder.write_state({"pid": 1, **facts, "children": {"nats": child}})


def until_told(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A read is bounded and may come too late on a busy machine; the next one tells."""
    for _ in range(20):
        assert main(command) == 0
        told = capsys.readouterr().out
        if text in told:
            return
    pytest.fail(f"{text!r} is not in {told!r}")


def test_status_tells_the_mode_that_the_pool_kept(
    folder: DataFolder, server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with folder.lock():
        write_state(folder, server)
        command = ["status", "--data", str(folder.root)]
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["mode"] is None, "the pool has no state yet"
        assert main(command) == 0
        assert "mode is set at the first request" in capsys.readouterr().out
        asyncio.run(put(server, Mode.CANARY))
        until_told([*command, "--json"], '"mode": "canary"', capsys)
        until_told(command, "mode canary", capsys)


def test_the_ready_line_waits_for_the_mode_that_was_given(folder: DataFolder, server: NatsServer) -> None:
    assert told("new", given="canary") == "mode canary from the first request on"
    operator = Credentials.load(folder.keys / secrets.CREDENTIALS).nats_settings("operator", server.url)

    async def changed_meanwhile() -> object:
        await put(server, Mode.OBSERVE)
        reading = asyncio.create_task(settled_mode(operator, POOL, "canary", 20))
        await asyncio.sleep(0.3)
        await put(server, Mode.CANARY)
        return await reading

    assert asyncio.run(settled_mode(operator, POOL, "canary", 20)) == "new"
    assert asyncio.run(changed_meanwhile()) is Mode.CANARY
    assert asyncio.run(settled_mode(operator, POOL, None, 20)) is Mode.CANARY
    assert asyncio.run(settled_mode(operator, POOL, "pinned", 0)) is Mode.CANARY
