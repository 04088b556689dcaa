"""What becomes of a message after its handler: the same rule on every bus."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

from polymorph.bus.errors import Fatal, Poison
from polymorph.bus.port import Consumption, Delivery, Handler
from polymorph.events.registry import Undecodable, message_of, open_envelope

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`done`: never again. `again`: after `delay_s`. `dead`: to the dead letters, with `reason`."""

    verdict: Literal["done", "again", "dead"]
    delay_s: float = 0.0
    reason: str = ""


def backoff(consumption: Consumption, attempt: int) -> float:
    """The delay after that attempt (from 1 on); the last one repeats."""
    steps = consumption.backoff_s or (1.0,)
    return steps[min(attempt, len(steps)) - 1]


async def attempt_message(
    body: bytes, *, attempt: int, sequence: int, consumption: Consumption, handler: Handler
) -> Outcome:
    """Decodes `body`, calls `handler`, and says what becomes of the message. `Fatal` passes through."""
    if attempt > consumption.max_attempts:
        return Outcome("dead", reason=f"gave up after {attempt - 1} attempts, none of which ended")
    try:
        envelope = open_envelope(body)
        delivery = Delivery(envelope, message_of(envelope), attempt, sequence)
    except Undecodable as error:
        return Outcome("dead", reason=str(error))
    try:
        await handler(delivery)
    except (Fatal, asyncio.CancelledError):
        raise
    except Poison as error:
        return Outcome("dead", reason=str(error) or "poison")
    except Exception as error:  # the consumer loop: any error of a handler is a failed attempt
        log.warning(
            "%s: attempt %d of %s failed: %r",
            consumption.durable,
            attempt,
            envelope.type,
            error,
            exc_info=True,
        )
        if attempt >= consumption.max_attempts:
            return Outcome(
                "dead", reason=f"gave up after {attempt} attempts: {type(error).__name__}: {error}"
            )
        return Outcome("again", delay_s=backoff(consumption, attempt))
    return Outcome("done")
