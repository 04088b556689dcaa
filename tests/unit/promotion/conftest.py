"""A promoter with everything around it, in a simulated world."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from sqlmodel import select

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.compiler.adapters.reconciler import Reconciler
from polymorph.compiler.domain.promotion.policy import DIRECT, Policy
from polymorph.config.clock import Clock
from polymorph.events.state import DesiredState
from polymorph.events.values import KernelBinding, Numerics, Ratio
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.relay import OutboxRelay
from polymorph.ledger.tables import PromotionRow, StepRow
from polymorph.simulator.bus import FaultyBus, Misfortune
from polymorph.simulator.checker import violations
from polymorph.simulator.clock import SimulatedClock
from polymorph.simulator.database import SimulatedDatabase
from polymorph.simulator.faults import CrashAt, Crashed
from polymorph.simulator.journal import Journal

SOURCE = "/polymorph/compiler/test"


class PlainSigner:
    """Signs with a digest: what is tested here is what is signed and when, not the cryptography."""

    key_id = "test"

    def sign(self, content: bytes) -> str:
        return f"{len(content)}"


@dataclass
class Rig:
    """One compiler's promotion, over a bus and a database that outlive it."""

    misfortune: Misfortune
    policy: Policy = DIRECT
    clock: Clock = field(default_factory=SimulatedClock)
    journal: Journal = field(default_factory=Journal)

    def __post_init__(self) -> None:
        self.memory = InMemoryBus(SOURCE, self.clock, MemoryWorld())
        self.bus = FaultyBus(self.memory, self.misfortune, self.journal)
        self.database = SimulatedDatabase(self.misfortune.pause)
        self.ids = itertools.count(1)
        self.start()

    def start(self) -> None:
        """A process of the compiler starts: nothing of an earlier one's memory is left."""
        self.ledger = Ledger(self.database, self.clock, source=SOURCE)
        self.keys = PromotionKeys(self.bus, PlainSigner(), self.clock)
        self.change = Change(self.keys, self.ledger)
        self.promoter = Promoter(self.change, lambda: f"p{next(self.ids)}", policy=self.policy)
        self.controls = Controls(self.change, self.clock)
        self.reconciler = Reconciler(self.change, self.promoter, self.controls, self.clock)
        self.relay = OutboxRelay(self.bus, self.database, self.clock, idle_s=0.5)

    async def quiesce(self) -> list[str]:
        """Lets reconciler and relay finish, whatever crashes meanwhile, then says what is wrong."""
        while True:
            try:
                for _ in range(2):
                    await self.reconciler.reconcile()
                await self.relay.drain()
            except Crashed:
                self.start()
            else:
                return self.violations()

    def violations(self) -> list[str]:
        promotions = self.database.peek(lambda session: list(session.exec(select(PromotionRow))))
        return violations(self.journal, self.steps(), promotions)

    def steps(self) -> list[StepRow]:
        return self.database.peek(lambda session: list(session.exec(select(StepRow))))

    async def desired(self, pool: str) -> DesiredState:
        entry = await self.memory.kv_get("desired", pool)
        return DesiredState.model_validate_json(entry.value or b"")


@pytest.fixture
def rig() -> Callable[..., contextlib.AbstractAsyncContextManager[Rig]]:
    @contextlib.asynccontextmanager
    async def make(misfortune: Misfortune | None = None, **more: Policy) -> AsyncIterator[Rig]:
        made = Rig(misfortune or CrashAt(), **more)
        try:
            yield made
        finally:
            await made.database.close()

    return make


@pytest.fixture
def binding() -> Callable[..., KernelBinding]:
    def make(
        artifact: str = "a", definition: str = "linear-qkv", min_m: int = 1, max_m: int = 8, **more: Numerics
    ) -> KernelBinding:
        return KernelBinding(
            definition=definition,
            min_m=min_m,
            max_m=max_m,
            manifest=f"manifest-{artifact}",
            artifact=artifact,
            numerics=more.get("numerics", Numerics.REORDERED),
        )

    return make


@pytest.fixture
def faster() -> Ratio:
    return Ratio(point=1.2, low=1.1, high=1.3)
