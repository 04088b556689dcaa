"""`polymorph up`: one start of embedded mode, from checks to the last process down."""

import asyncio
from pathlib import Path

from polymorph.bus.credentials import Credentials
from polymorph.bus.provision import provision
from polymorph.embedded import secrets
from polymorph.embedded.folder import DataFolder
from polymorph.embedded.options import UpOptions
from polymorph.embedded.services import Services
from polymorph.embedded.supervisor import Supervisor


def up(options: UpOptions) -> None:
    """Runs until Ctrl-C or `polymorph down`.

    Raises:
        StartRefused: the start cannot work; nothing was started.
    """
    folder = DataFolder(options.data)
    folder.make()
    with folder.lock():
        options.check()
        credentials = secrets.ensure(folder)
        services = Services(options, folder, credentials)
        _greet(options, folder)
        stages = services.stages(lambda: _provision(credentials, services.nats_url, services.monitor_url))
        asyncio.run(Supervisor(folder, stages, services.facts()).run())
        folder.state_file.unlink(missing_ok=True)


async def _provision(credentials: Credentials, url: str, monitor_url: str) -> None:
    """Idempotent: a second start, or a server that came back, finds its topology and changes nothing."""
    await provision(credentials.nats_settings("operator", url), monitor_url=monitor_url)


def _greet(options: UpOptions, folder: DataFolder) -> None:
    print(
        f"Polymorph serves {options.served_name} on http://127.0.0.1:{options.port}/v1 (mode: {options.told_mode})"
    )
    print(
        f"logs in {_shown(folder.logs)}; Ctrl-C drains and stops; a first start compiles the model for some minutes"
    )


def _shown(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
