"""Which bus a command speaks to, and the workers that are registered there."""

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pydantic import SecretStr, ValidationError

from polymorph.bus import topology
from polymorph.bus.credentials import Credentials
from polymorph.bus.errors import NotFound
from polymorph.bus.nats.bus import NatsBus
from polymorph.bus.port import Bus
from polymorph.config.clock import SystemClock
from polymorph.config.settings import NatsSettings
from polymorph.embedded import secrets
from polymorph.embedded.folder import DataFolder, StartRefused
from polymorph.events.state import WorkerRecord

PASSWORD_VARIABLE = "POLYMORPH_NATS_PASSWORD"  # noqa: S105 - the name of the variable
_CONNECT_S = 5.0
ANSWER_S = 20.0


@dataclass(frozen=True)
class Where:
    """The bus of a running data folder, or one that is named."""

    folder: DataFolder
    url: str | None = None
    user: str | None = None

    def settings(self) -> NatsSettings:
        """Raises `StartRefused` where nothing runs on the folder."""
        if self.url is not None:
            password = os.environ.get(PASSWORD_VARIABLE)
            return NatsSettings(
                url=self.url, user=self.user, password=SecretStr(password) if password else None
            )
        state = self.folder.read_state() if self.folder.locked() else None
        if state is None:
            raise StartRefused(f"nothing runs on {self.folder.root.absolute()}; name a server with --nats")
        try:
            credentials = Credentials.load(self.folder.keys / secrets.CREDENTIALS)
        except (OSError, ValueError) as error:
            raise StartRefused(f"the credentials in {self.folder.keys} cannot be read: {error}") from error
        return credentials.nats_settings("operator", state["nats"])


@contextlib.asynccontextmanager
async def connected(settings: NatsSettings, source: str) -> AsyncIterator[Bus]:
    """A bus for one command.

    Raises:
        BusError, OSError: it does not answer.
    """
    bus = await NatsBus.connect(settings, source, SystemClock(), timeout_s=ANSWER_S, wait_s=_CONNECT_S)
    try:
        yield bus
    finally:
        await bus.close()


async def registered(bus: Bus, pool: str | None) -> list[WorkerRecord]:
    """The live workers of a pool, or of all."""
    found = []
    for key in sorted(await bus.kv_keys(topology.WORKERS)):
        try:
            record = WorkerRecord.model_validate_json((await bus.kv_get(topology.WORKERS, key)).value or b"")
        except (NotFound, ValidationError):
            continue
        if pool in {None, record.pool}:
            found.append(record)
    return found
