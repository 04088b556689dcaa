"""The keys of key-value that promotion reads and writes: desired states, quarantine, freezes, pauses."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

from polymorph.bus import topology
from polymorph.bus.errors import Conflict, NotFound
from polymorph.bus.port import Bus
from polymorph.compiler.domain.promotion.guards import EVERY_POOL, Guards
from polymorph.config.clock import Clock
from polymorph.events.state import DesiredState, Freeze, PromoterSignature, Quarantine
from polymorph.events.values import Value

V = TypeVar("V", bound=Value)


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

    async def shown(self, pool: str) -> Shown | None:
        """The desired state of `pool`; None where there is none."""
        try:
            entry = await self._bus.kv_get(topology.DESIRED, pool)
        except NotFound:
            return None
        if entry.value is None:
            return None
        return Shown(DesiredState.model_validate_json(entry.value), entry.revision)

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
        keys = (pool, EVERY_POOL)
        return Guards.of(
            pool,
            self._clock.now(),
            freezes={key: found for key in keys if (found := await self._get(topology.FREEZE, key, Freeze))},
            pauses={key: found for key in keys if (found := await self._get(topology.PAUSE, key, Freeze))},
            quarantines=await self._quarantines(),
        )

    async def pools(self) -> list[str]:
        return sorted(await self._bus.kv_keys(topology.DESIRED))

    async def put(self, bucket: str, key: str, value: Value) -> None:
        await self._bus.kv_put(bucket, key, value.model_dump_json().encode())

    async def drop(self, bucket: str, key: str) -> None:
        await self._bus.kv_delete(bucket, key)

    async def _quarantines(self) -> list[Quarantine]:
        found = [
            await self._get(topology.QUARANTINE, key, Quarantine)
            for key in await self._bus.kv_keys(topology.QUARANTINE)
        ]
        return [entry for entry in found if entry is not None]

    async def _get(self, bucket: str, key: str, kind: type[V]) -> V | None:
        try:
            entry = await self._bus.kv_get(bucket, key)
        except NotFound:
            return None
        return None if entry.value is None else kind.model_validate_json(entry.value)

    def _signed(self, desired: DesiredState) -> DesiredState:
        signature = PromoterSignature(
            key_id=self._signer.key_id, signature=self._signer.sign(desired.signed_content())
        )
        return desired.model_copy(update={"signature": signature})
