"""Promoters that race on the real databases: the checker must find nothing."""

import asyncio
import itertools
import random

from sqlmodel import select

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.compiler.adapters.reconciler import Reconciler
from polymorph.config.clock import SystemClock
from polymorph.events.state import Mode
from polymorph.events.values import KernelBinding, Numerics, Ratio
from polymorph.ledger.database import SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.relay import OutboxRelay
from polymorph.ledger.tables import PromotionRow, StepRow
from polymorph.simulator.bus import FaultyBus
from polymorph.simulator.checker import violations
from polymorph.simulator.faults import FaultPlan, Faults
from polymorph.simulator.journal import Journal

SOURCE = "/polymorph/compiler/test"
POOL = "pool-1"
SLOW = FaultPlan(delay_s=0.01, crash_rate=0.0, duplicate_rate=0.2)


class PlainSigner:
    key_id = "test"

    def sign(self, content: bytes) -> str:
        return f"{len(content)}"


class Replica:
    """One compiler process, with a database connection of its own."""

    def __init__(self, bus, url):
        clock = SystemClock()
        self.database = SqlDatabase(url)
        ledger = Ledger(self.database, clock, source=SOURCE)
        change = Change(PromotionKeys(bus, PlainSigner(), clock), ledger)
        self.promoter = Promoter(change, lambda: "unused")
        controls = Controls(change, clock)
        self.reconciler = Reconciler(change, self.promoter, controls, clock)
        self.relay = OutboxRelay(bus, self.database, clock)

    async def promote(self, name):
        binding = KernelBinding(
            definition=f"linear-{len(name) % 2}",
            min_m=1,
            max_m=8,
            manifest=name,
            artifact=name,
            numerics=Numerics.BITWISE,
        )
        return await self.promoter.promote(
            POOL,
            bindings=(binding,),
            reason="faster",
            speedup=Ratio(point=1.2, low=1.1, high=1.3),
            promotion_id=name,
        )


async def test_of_promoters_that_race_one_wins_each_round(database_url, database):
    journal = Journal()
    faults = Faults(random.Random(1), SystemClock(), SLOW)
    bus = FaultyBus(InMemoryBus(SOURCE, SystemClock(), MemoryWorld()), faults, journal)
    replicas = [Replica(bus, database_url) for _ in range(3)]
    await replicas[0].promoter.ensure_pool(POOL, Mode.CANARY)
    names = itertools.count()
    for _ in range(6):
        # The first two race with winners of their own, the last takes up the first one's: a redelivery.
        own, other = f"p{next(names)}", f"p{next(names)}"
        results = await asyncio.gather(
            replicas[0].promote(own),
            replicas[1].promote(other),
            replicas[2].promote(own),
            replicas[2].reconciler.reconcile(),
        )
        assert "changed" in {result.outcome for result in results[:3]}
    for replica in replicas:
        await replica.reconciler.reconcile()
    await asyncio.gather(*(replica.relay.drain() for replica in replicas))
    steps = await database.read(lambda session: list(session.exec(select(StepRow))))
    promotions = await database.read(lambda session: list(session.exec(select(PromotionRow))))
    assert violations(journal, steps, promotions) == []
    assert len(promotions) == 12
    for replica in replicas:
        await replica.database.close()
