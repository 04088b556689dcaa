"""Where captured workloads stand, until they expire: who measures finds them by pool and definition."""

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.port import Bus
from polymorph.events.state import CapturedWorkload


async def put(bus: Bus, captured: CapturedWorkload) -> None:
    await bus.kv_put(topology.WORKLOADS, captured.key(), captured.model_dump_json().encode())


async def standing(
    bus: Bus, *, pool: str | None = None, definition: str | None = None
) -> list[CapturedWorkload]:
    """What was captured, of a pool and a definition or of all, the latest first.

    Raises:
        Unavailable: the bus does not answer.
    """
    found = []
    for key in await bus.kv_keys(topology.WORKLOADS):
        held_pool, _, rest = key.partition(".")
        if pool not in {None, held_pool} or definition not in {None, rest.partition(".")[0]}:
            continue
        try:
            entry = await bus.kv_get(topology.WORKLOADS, key)
            found.append(CapturedWorkload.model_validate_json(entry.value or b""))
        except (NotFound, ValidationError):
            continue  # gone meanwhile, or of another release
    return sorted(found, key=lambda each: each.captured_at, reverse=True)
