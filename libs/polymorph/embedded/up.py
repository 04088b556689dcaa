"""`polymorph up`: one start of embedded mode, from checks to the last process down."""

import asyncio
from functools import partial
from pathlib import Path

from polymorph.bus.credentials import Credentials
from polymorph.bus.provision import provision
from polymorph.embedded import secrets
from polymorph.embedded.folder import DataFolder
from polymorph.embedded.mode import settled_mode, told
from polymorph.embedded.options import UpOptions
from polymorph.embedded.services import Services
from polymorph.embedded.supervisor import Supervisor

_MODE_S = 5.0  # the compiler puts a pool in the mode that was given within a pass or two


def up(options: UpOptions) -> None:
    """Runs until Ctrl-C or `polymorph down`.

    Raises:
        StartRefused: the start cannot work; nothing was started.
    """
    folder = DataFolder(options.data)
    # Before anything is made: a refused start leaves no folder behind.
    folder.refuse_if_held()
    options.check()
    folder.make()
    with folder.lock():
        credentials = secrets.ensure(folder)
        services = Services(options, folder, credentials)
        _greet(options, folder)
        stages = services.stages(lambda: _provision(credentials, services.nats_url, services.monitor_url))
        serves = partial(_serves, options, services, credentials)
        asyncio.run(Supervisor(folder, stages, services.facts(), serves).run())
        folder.state_file.unlink(missing_ok=True)


async def _provision(credentials: Credentials, url: str, monitor_url: str) -> None:
    """Idempotent: a second start, or a server that came back, finds its topology and changes nothing."""
    await provision(credentials.nats_settings("operator", url), monitor_url=monitor_url)


async def _serves(options: UpOptions, services: Services, credentials: Credentials) -> str:
    operator = credentials.nats_settings("operator", services.nats_url)
    mode = await settled_mode(operator, services.pool, options.mode, _MODE_S) if options.tune else None
    return (
        f"serves {options.served_name} on {options.url} ({told(mode, given=options.mode, tune=options.tune)})"
    )


def _greet(options: UpOptions, folder: DataFolder) -> None:
    print(f"starting; will serve {options.served_name} on {options.url} (mode: {options.told_mode})")
    print(
        f"logs in {_shown(folder.logs)}; Ctrl-C drains and stops; a first start compiles the model for some minutes"
    )


def _shown(path: Path) -> str:
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
