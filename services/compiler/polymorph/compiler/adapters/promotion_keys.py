"""The keys of key-value that promotion reads and writes: desired states, quarantine, freezes, pauses."""

import datetime as dt
import logging
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import ValidationError

from polymorph.bus import topology
from polymorph.bus.errors import Conflict, NotFound
from polymorph.bus.port import Bus
from polymorph.compiler.domain.promotion.guards import EVERY_POOL, Guards
from polymorph.config.clock import Clock
from polymorph.events.state import DesiredState, Freeze, PromoterSignature, Quarantine
from polymorph.events.values import Value

V = TypeVar("V", bound=Value)
_log = logging.getLogger(__name__)
_ALWAYS = dt.datetime.min.replace(tzinfo=dt.UTC)


class UnreadableKey(ValueError):
    """A key holds what this release cannot read."""


def read(bucket: str, key: str, value: bytes, kind: type[V]) -> V:
    """The value of a key. Raises `UnreadableKey`."""
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        wanted = ", ".join(name for name, field in kind.model_fields.items() if field.is_required())
        raise UnreadableKey(
            f"key {bucket}/{key} holds {value[:80]!r}: JSON of a {kind.__name__} with {wanted} would have been right"
        ) from error


class Signer(Protocol):
    """The promoter's private key."""

    @property
    def key_id(self) -> str: ...

    def sign(self, content: bytes) -> str: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """What key-value shows of a pool, with the revision that a compare-and-set names (None: the key is absent)."""

    desired: DesiredState
    kv_revision: int | None

    @property
    def generation(self) -> int:
        return self.desired.generation


class PromotionKeys:
    """Reads and writes of one moment; nothing is remembered."""

    def __init__(self, bus: Bus, signer: Signer, clock: Clock) -> None:
        self._bus = bus
        self._signer = signer
        self._clock = clock
        self._complaints: set[str] = set()

    async def shown(self, pool: str) -> Shown | None:
        """The desired state of `pool`; None where there is none. Raises `UnreadableKey`."""
        try:
            entry = await self._bus.kv_get(topology.DESIRED, pool)
        except NotFound:
            return None
        if entry.value is None:
            return None
        return Shown(read(topology.DESIRED, pool, entry.value, DesiredState), entry.revision)

    async def commit(self, desired: DesiredState, kv_revision: int | None) -> None:
        """The compare-and-set: signs `desired` and shows it. Raises `Conflict` where somebody was faster."""
        signed = self._signed(desired).model_dump_json().encode()
        if kv_revision is None:
            await self._bus.kv_create(topology.DESIRED, desired.pool, signed)
        else:
            await self._bus.kv_update(topology.DESIRED, desired.pool, signed, kv_revision)

    async def touch(self, shown: Shown) -> bool:
        """Writes the same state again, so that every compare-and-set under way loses. Whether nobody was faster."""
        if shown.kv_revision is None:
            return False
        body = shown.desired.model_dump_json().encode()
        try:
            await self._bus.kv_update(topology.DESIRED, shown.desired.pool, body, shown.kv_revision)
        except Conflict:
            return False
        return True

    async def guards(self, pool: str) -> Guards:
        """What holds for `pool`. A key that cannot be read counts as what its name says: somebody wanted to stop us."""
        keys = (pool, EVERY_POOL)
        return Guards.of(
            pool,
            self._clock.now(),
            freezes={key: found for key in keys if (found := await self._window(topology.FREEZE, key))},
            pauses={key: found for key in keys if (found := await self._window(topology.PAUSE, key))},
            quarantines=await self._quarantines(),
        )

    async def pools(self) -> list[str]:
        return sorted(await self._bus.kv_keys(topology.DESIRED))

    async def put(self, bucket: str, key: str, value: Value) -> None:
        await self._bus.kv_put(bucket, key, value.model_dump_json().encode())

    async def drop(self, bucket: str, key: str) -> None:
        await self._bus.kv_delete(bucket, key)

    async def _quarantines(self) -> list[Quarantine]:
        found = [await self._quarantine(key) for key in await self._bus.kv_keys(topology.QUARANTINE)]
        return [entry for entry in found if entry is not None]

    async def _quarantine(self, artifact: str) -> Quarantine | None:
        try:
            return await self._get(topology.QUARANTINE, artifact, Quarantine)
        except UnreadableKey as error:
            self._complain(error)
            return Quarantine(artifact=artifact, reason=str(error), since=_ALWAYS)

    async def _window(self, bucket: str, key: str) -> Freeze | None:
        try:
            return await self._get(bucket, key, Freeze)
        except UnreadableKey as error:
            self._complain(error)
            return Freeze(reason=str(error), since=_ALWAYS)

    def _complain(self, error: UnreadableKey) -> None:
        """Once: guards are read with every pass."""
        if str(error) not in self._complaints:
            self._complaints.add(str(error))
            _log.error("%s; until it is, it holds", error)

    async def _get(self, bucket: str, key: str, kind: type[V]) -> V | None:
        try:
            entry = await self._bus.kv_get(bucket, key)
        except NotFound:
            return None
        return None if entry.value is None else read(bucket, key, entry.value, kind)

    def _signed(self, desired: DesiredState) -> DesiredState:
        signature = PromoterSignature(
            key_id=self._signer.key_id, signature=self._signer.sign(desired.signed_content())
        )
        return desired.model_copy(update={"signature": signature})
