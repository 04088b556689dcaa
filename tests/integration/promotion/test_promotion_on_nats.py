"""Promotion as it runs: nats-server, SQLite in a file, Ed25519, two compilers on one pool."""

import asyncio
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from polymorph.bus.errors import Unavailable
from polymorph.bus.port import Bus, Gap
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change, UnknownPool
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.compiler.adapters.reconciler import Reconciler
from polymorph.compiler.domain.promotion.phases import Phase
from polymorph.config.clock import SystemClock
from polymorph.events.state import DesiredState, Mode
from polymorph.events.types import PromotionCompleted
from polymorph.events.values import KernelBinding, Numerics, Ratio
from polymorph.kernels.signing import Role, Signer, Trust
from polymorph.ledger.database import SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.migrations import upgrade
from polymorph.ledger.relay import OutboxRelay

pytestmark = pytest.mark.real

POOL = "pool-1"
SOURCE = "/polymorph/compiler/0"
FASTER = Ratio(point=1.2, low=1.1, high=1.3)


def binding(artifact: str) -> KernelBinding:
    return KernelBinding(
        definition="linear-qkv",
        min_m=1,
        max_m=8,
        manifest=f"m-{artifact}",
        artifact=artifact,
        numerics=Numerics.REORDERED,
    )


@dataclass
class Compiler:
    """What one compiler process holds."""

    bus: Bus
    database: SqlDatabase
    signer: Signer

    def __post_init__(self) -> None:
        clock = SystemClock()
        self.ledger = Ledger(self.database, clock, source=SOURCE)
        self.keys = PromotionKeys(self.bus, self.signer, clock)
        change = Change(self.keys, self.ledger)
        self.promoter = Promoter(change, lambda: uuid.uuid4().hex)
        self.controls = Controls(change, clock)
        self.reconciler = Reconciler(change, self.promoter, self.controls, clock)
        self.relay = OutboxRelay(self.bus, self.database, clock)

    async def shown(self) -> DesiredState:
        found = await self.keys.shown(POOL)
        assert found is not None
        return found.desired


@pytest.fixture
async def compilers(bus_factory, tmp_path: Path):
    """Two on the same database and server, as two replicas would be."""
    url = f"sqlite+aiosqlite:///{tmp_path}/ledger.db"
    await upgrade(url)
    signer = Signer.generate(tmp_path / "promoter.pem")
    made = [
        Compiler(await bus_factory("compiler", SOURCE, timeout_s=2.0), SqlDatabase(url), signer)
        for _ in range(2)
    ]
    yield made
    for compiler in made:
        await compiler.database.close()


async def completed(bus: Bus) -> list[PromotionCompleted]:
    """The completions that the stream holds by now."""
    found: list[PromotionCompleted] = []
    stream = bus.events(subjects=PromotionCompleted.wildcard(), after="0-0")
    while True:
        try:
            record = await asyncio.wait_for(anext(stream), 1.0)
        except TimeoutError:
            return found
        if not isinstance(record, Gap):
            found.append(PromotionCompleted.model_validate(record.envelope.data))


async def promote(compiler: Compiler, artifact: str):
    return await compiler.promoter.promote(
        POOL, bindings=(binding(artifact),), reason="faster", speedup=FASTER, promotion_id=artifact
    )


async def test_of_two_promoters_one_wins_and_workers_can_check_who_signed(compilers, tmp_path):
    first, second = compilers
    await first.promoter.ensure_pool(POOL, Mode.CANARY)
    for round_number in range(5):
        names = [f"{side}{round_number}" for side in "ab"]
        results = await asyncio.gather(*(promote(c, n) for c, n in zip(compilers, names, strict=True)))
        shown = await second.shown()
        winners = [name for name, result in zip(names, results, strict=True) if result.promoted]
        rows = {name: (await first.ledger.promotion(name)).phase for name in names}
        assert shown.stable.kernels[0].artifact in winners
        for name, result in zip(names, results, strict=True):
            assert result.promoted is (rows[name] == Phase.CONFIRMED)
            assert result.promoted or result.outcome == "superseded"
    await first.relay.drain()
    await second.relay.drain()
    told = await completed(first.bus)
    confirmed = await first.ledger.promotions(POOL, frozenset({Phase.CONFIRMED.value}))
    assert sorted(event.promotion_id for event in told) == sorted(row.promotion_id for row in confirmed)
    bases = [(await first.ledger.step(POOL, event.generation)).base_generation for event in told]
    assert len(set(bases)) == len(bases)
    trust = Trust()
    trust.add(first.signer.public, Role.PROMOTER)
    trust.verify(
        shown.signature.key_id, shown.signed_content(), shown.signature.signature, role=Role.PROMOTER
    )


async def test_a_server_that_dies_under_a_promotion_leaves_one_truth(compilers, nats_server):
    first, second = compilers
    await first.promoter.ensure_pool(POOL, Mode.CANARY)
    await nats_server.kill()
    with pytest.raises(Unavailable):
        await promote(first, "a")
    await nats_server.start()
    async with asyncio.timeout(20):
        while not await second.bus.ready():
            await asyncio.sleep(0.1)
    result = await promote(second, "a")
    assert result.promoted
    again = await promote(first, "a")
    assert again.promoted
    assert again.desired.generation == result.desired.generation
    await second.relay.drain()
    assert [event.promotion_id for event in await completed(second.bus)] == ["a"]


async def test_a_pool_that_key_value_lost_is_restored_under_a_new_generation(compilers):
    first, second = compilers
    await first.promoter.ensure_pool(POOL, Mode.CANARY)
    before = (await promote(first, "a")).desired
    await first.bus.kv_delete("desired", POOL)
    with pytest.raises(UnknownPool, match="reconcile"):
        await second.promoter.ensure_pool(POOL, Mode.CANARY)
    await second.reconciler.reconcile()
    after = await first.shown()
    assert after.generation > before.generation
    assert after.stable == before.stable
    assert (await promote(first, "b")).promoted


async def test_an_operator_freezes_quarantines_and_rolls_back(compilers):
    first, second = compilers
    await first.promoter.ensure_pool(POOL, Mode.CANARY)
    await promote(first, "a")
    await second.controls.freeze("release night", pool=POOL)
    held = await promote(first, "b")
    assert (held.outcome, held.phase) == ("held", Phase.HELD)
    await first.reconciler.reconcile()
    assert (await first.shown()).stable.kernels[0].artifact == "a"
    await second.controls.thaw(POOL)
    await first.reconciler.reconcile()
    assert (await first.shown()).stable.kernels[0].artifact == "b"
    back = await second.promoter.roll_back(POOL, "a person said so", operator=True)
    assert back.outcome == "changed"
    assert back.desired.stable.kernels[0].artifact == "a"
    [purged] = await second.controls.quarantine("a", "it crashed a worker")
    assert purged.desired.stable.kernels == ()
    refused = await first.promoter.promote(
        POOL, bindings=(binding("a"),), reason="again", speedup=FASTER, promotion_id="a2"
    )
    assert (refused.outcome, refused.phase) == ("aborted", Phase.ABORTED)
