"""The mode that a pool has: read where the loop itself reads it, in the desired state."""

import asyncio
import time
from typing import Literal

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.credentials import Credentials
from polymorph.bus.errors import BusError, NotFound
from polymorph.bus.nats.bus import NatsBus
from polymorph.config.clock import SystemClock
from polymorph.config.settings import NatsSettings
from polymorph.embedded import secrets
from polymorph.embedded.folder import DataFolder
from polymorph.events.state import DesiredState, Mode

READ_S = 1.0
_AGAIN_S = 0.2


# The compiler gives a pool its state at its first traffic: until then it has no mode, only one that it will start in.
New = Literal["new"]


def told(mode: Mode | New | None, *, given: str | None = None, tune: bool = True) -> str:
    """For a line that people read. None is a mode that could not be read, `given` what the start was asked for."""
    if isinstance(mode, Mode):
        return f"mode {mode}"
    if not tune:
        return "no mode, as nothing tunes"
    if mode is None:
        return "mode not known yet"
    return f"mode {given} from the first request on" if given else "mode is set at the first request"


async def read_mode(settings: NatsSettings, pool: str, within_s: float = READ_S) -> Mode | New | None:
    """The pool's mode; "new" where it has no desired state yet, None where nobody answers in time."""
    try:
        async with asyncio.timeout(within_s):
            bus = await NatsBus.connect(
                settings, "polymorph", SystemClock(), timeout_s=within_s, wait_s=within_s
            )
            try:
                entry = await bus.kv_get(topology.DESIRED, pool)
            finally:
                await bus.close()
        return "new" if entry.value is None else DesiredState.model_validate_json(entry.value).mode
    except NotFound:
        return "new"
    except (BusError, OSError, TimeoutError, ValidationError):
        return None


async def settled_mode(
    settings: NatsSettings, pool: str, wanted: str | None, within_s: float
) -> Mode | New | None:
    """The mode once it is the one that was asked for; after `within_s`, or for a new pool, whatever it is."""
    deadline = time.monotonic() + within_s
    while True:
        mode = await read_mode(settings, pool)
        settled = mode == "new" or (mode is not None and wanted in {None, mode})
        if settled or time.monotonic() > deadline:
            return mode
        await asyncio.sleep(_AGAIN_S)


def mode_of(folder: DataFolder, url: str, pool: str) -> Mode | New | None:
    """Reads the mode with the folder's own credentials; None where they cannot be read either."""
    try:
        credentials = Credentials.load(folder.keys / secrets.CREDENTIALS)
    except (OSError, ValueError):
        return None
    return asyncio.run(read_mode(credentials.nats_settings("operator", url), pool))
