"""Durable pull consumers: pull, report progress, handle, and say what became of the message."""

import asyncio
import contextlib
import logging

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js import errors as js_errors

from polymorph.bus import topology
from polymorph.bus.errors import Fatal, Unavailable
from polymorph.bus.nats.connection import Cancellation, Connection
from polymorph.bus.nats.letters import DeadLetters
from polymorph.bus.nats.tracing import continued
from polymorph.bus.outcome import Outcome, attempt_message, backoff
from polymorph.bus.port import Consumption, Handler
from polymorph.bus.pullers import run_pullers

log = logging.getLogger(__name__)

PULL_S = 2.0
ACK_S = 2.0
REBIND_WAIT_S = 0.25


class Consumer:
    """One process's part in a durable consumer."""

    def __init__(
        self, connection: Connection, letters: DeadLetters, consumption: Consumption, handler: Handler
    ) -> None:
        self._connection = connection
        self._letters = letters
        self._consumption = consumption
        self._handler = handler
        self._stream = topology.stream_of(consumption.subject)

    async def run(self) -> None:
        """Runs until cancelled; the first `Fatal` of a puller ends all."""
        await run_pullers(self._consumption.max_in_flight, self._pull)

    async def _pull(self) -> None:
        cancellation = Cancellation()
        while True:
            self._connection.check()
            try:
                await self._bound_pull(cancellation)
            except (nats.errors.Error, Unavailable, TimeoutError, OSError) as error:
                log.info("%s: pulls anew after %r", self._consumption.durable, error)
                await asyncio.sleep(REBIND_WAIT_S)

    async def _bound_pull(self, cancellation: Cancellation) -> None:
        await self._ensure_durable()
        jetstream = self._connection.jetstream
        durable = self._consumption.durable
        pulled = await jetstream.pull_subscribe_bind(durable, stream=self._stream)
        try:
            while True:
                cancellation.heed()
                msg = await _next(pulled)
                if msg is not None:
                    await self._take(msg)
                self._connection.check()
        finally:
            if not self._connection.client.is_closed:
                await pulled.unsubscribe()

    async def _ensure_durable(self) -> None:
        """Creates the durable or updates it; a pull ignores the configuration of one that exists."""
        wanted = api.ConsumerConfig(
            durable_name=self._consumption.durable,
            filter_subject=self._consumption.subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=self._consumption.ack_wait_s,
            # Attempts are counted here: a message beyond the last must reach the dead letters, not stay behind.
            max_deliver=-1,
        )
        jetstream = self._connection.jetstream
        try:
            held = (await jetstream.consumer_info(self._stream, self._consumption.durable)).config
        except js_errors.NotFoundError:
            held = None
        keys = ("filter_subject", "ack_policy", "ack_wait", "max_deliver")
        if held is None or any(getattr(held, key) != getattr(wanted, key) for key in keys):
            await jetstream.add_consumer(self._stream, wanted)

    async def _take(self, msg: Msg) -> None:
        hold = _Hold(self._connection, msg, self._consumption.ack_wait_s)
        attempt = msg.metadata.num_delivered
        try:
            with continued(msg.headers):
                outcome = await attempt_message(
                    msg.data,
                    attempt=attempt,
                    sequence=msg.metadata.sequence.stream,
                    consumption=self._consumption,
                    handler=self._handler,
                )
            if outcome.verdict == "dead":
                await self._letters.add(msg, durable=self._consumption.durable, reason=outcome.reason)
        except Unavailable:
            outcome = Outcome("again", delay_s=backoff(self._consumption, attempt))
        except (asyncio.CancelledError, Fatal):
            hold.end()
            await hold.give_back()
            raise
        hold.end()
        await hold.settle(outcome)


class _Hold:
    """A message while it is ours: progress is reported, and once it lapsed nothing is said about it any more."""

    def __init__(self, connection: Connection, msg: Msg, ack_wait_s: float) -> None:
        self._connection = connection
        self._msg = msg
        self._ack_wait_s = ack_wait_s
        self._loop = asyncio.get_running_loop()
        self._reported = self._loop.time()
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            if self._lapsed() or not self._connection.connected:
                continue
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._msg.in_progress()
                self._reported = self._loop.time()

    def _lapsed(self) -> bool:
        return self._loop.time() - self._reported >= self._ack_wait_s

    def end(self) -> None:
        self._beating.cancel()

    async def give_back(self) -> None:
        """Lets another process have it at once."""
        if not self._lapsed():
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._msg.nak()

    async def settle(self, outcome: Outcome) -> None:
        """Tells the server, unless the message may be somebody else's by now: a late word would take it from them."""
        if self._lapsed():
            log.warning("%s: held past its time, so no word about it", self._msg.subject)
            return
        try:
            if outcome.verdict == "done":
                await self._msg.ack_sync(timeout=ACK_S)
            elif outcome.verdict == "again":
                await self._msg.nak(delay=outcome.delay_s)
            else:
                await self._msg.term()
        except (nats.errors.Error, TimeoutError, OSError) as error:
            log.info("%s: comes again, its %s was not heard: %r", self._msg.subject, outcome.verdict, error)


async def _next(pulled: JetStreamContext.PullSubscription) -> Msg | None:
    try:
        return (await pulled.fetch(1, timeout=PULL_S))[0]
    except (nats.errors.TimeoutError, TimeoutError):
        return None
