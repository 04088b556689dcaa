"""The relay: outbox rows become messages on the bus."""

import logging

from polymorph.bus.errors import Poison, Retryable
from polymorph.bus.port import Bus
from polymorph.config.clock import Clock
from polymorph.ledger import messages
from polymorph.ledger.database import Database
from polymorph.ledger.tables import OutboxRow

_log = logging.getLogger(__name__)


class OutboxRelay:
    """Publishes in order and marks what was acknowledged.

    A crash between the two publishes again: under the same deterministic id, which the stream and every inbox know.
    A row that cannot be published is left out until the next start, whose release may know its type.
    """

    BATCH = 64

    def __init__(
        self, bus: Bus, database: Database, clock: Clock, *, idle_s: float = 0.2, retry_s: float = 1.0
    ) -> None:
        self._bus = bus
        self._database = database
        self._clock = clock
        self._idle_s = idle_s
        self._retry_s = retry_s
        self._parked: set[int] = set()

    async def drain(self) -> int:
        """Publishes everything that is pending; returns how many. Raises what `Bus.publish` raises but `Poison`."""
        count = 0
        while rows := await self._pending():
            for row in rows:
                try:
                    await self._bus.publish(messages.decode(row.type, row.data))
                except (Poison, messages.UnknownMessage) as error:
                    _log.error("outbox row %s is left out until the next start: %s", row.message_id, error)
                    self._parked.add(row.sequence or 0)
                    continue
                await self._mark(row.sequence or 0)
                count += 1
        return count

    async def _pending(self) -> list[OutboxRow]:
        return await self._database.read(
            lambda session: messages.pending(session, self.BATCH, parked=self._parked)
        )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            pause = self._idle_s
            try:
                await self.drain()
            except Retryable as error:
                _log.warning("outbox waits for the bus: %s", error)
                pause = self._retry_s
            await self._clock.sleep(pause)

    async def _mark(self, sequence: int) -> None:
        now = self._clock.now()
        await self._database.write(lambda session: messages.mark_published(session, sequence, now))
