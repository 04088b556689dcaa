"""docs/events/README.md works as it stands: its example follows a server that lies where embedded mode puts it."""

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

from polymorph.embedded.folder import DataFolder
from polymorph.embedded.secrets import CREDENTIALS
from polymorph.events.types import WorkerRefused

pytestmark = [pytest.mark.asyncio, pytest.mark.real]
README = Path(__file__).parents[3] / "docs/events/README.md"


def data_folder(root: Path, nats_server) -> DataFolder:
    """A data folder as an instance that runs keeps it."""
    folder = DataFolder(root)
    folder.make()
    folder.write_state({"nats": nats_server.url})
    nats_server.credentials.save(folder.keys / CREDENTIALS)
    return folder


async def first_line(folder: Path, *command: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(30):
            return (await process.stdout.readline()).decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_the_python_example_tells_what_is_kept(tmp_path, nats_server, bus_factory):
    data_folder(tmp_path / ".polymorph", nats_server)
    bus = await bus_factory("worker")
    await bus.publish(
        WorkerRefused(pool="p", worker_id="w", generation=1, revision="r", reason="told to the reader")
    )
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    told = await first_line(tmp_path, sys.executable, "-c", example)
    assert re.match(r"\d+-1 polymorph.evt.worker.refused.v1 ", told), told
    assert "told to the reader" in told


async def test_the_shell_example_gives_the_nats_command_what_connects(tmp_path, nats_server):
    """The `nats` command is Go's and is not here: a double in its place shows what it would be called with."""
    data_folder(tmp_path / ".polymorph", nats_server)
    double = tmp_path / "bin/nats"
    double.parent.mkdir()
    double.write_text('#!/bin/sh\necho "$@"\n')
    double.chmod(0o755)
    text = README.read_text()
    block = text[text.index("    DATA=") :].split("\n\n")[0]
    shell = re.sub(r"^    ", "", block, flags=re.MULTILINE)
    told = await first_line(tmp_path, "sh", "-c", shell, PATH=f"{double.parent}:{os.environ['PATH']}")
    password = nats_server.settings("watch").password.get_secret_value()
    assert told.strip() == (
        f"--server {nats_server.url} --inbox-prefix _IV --user watch --password {password} "
        "subscribe polymorph.kept.>"
    )
    assert nats_server.settings("watch").inbox_prefix == "_IV"
