"""SIGKILL under a promoter, again and again: record, key-value and stream agree afterwards."""

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from sqlmodel import select

from polymorph.bus.port import Gap
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change
from polymorph.compiler.adapters.promotion_controls import Controls
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.compiler.adapters.reconciler import Reconciler
from polymorph.config.clock import SystemClock
from polymorph.events.state import DesiredState, Mode
from polymorph.events.types import PromotionAdvanced, PromotionCompleted
from polymorph.kernels.signing import Signer
from polymorph.ledger.database import SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.migrations import upgrade
from polymorph.ledger.relay import OutboxRelay
from polymorph.ledger.tables import PromotionRow, StepRow
from polymorph.simulator.checker import violations
from polymorph.simulator.journal import Journal

pytestmark = pytest.mark.real

POOL = "pool-1"
SOURCE = "/polymorph/compiler/0"

PROGRAM = """
import asyncio, sys
from pathlib import Path
from polymorph.bus.nats import NatsBus
from polymorph.compiler.adapters.promoter import Promoter
from polymorph.compiler.adapters.promotion_change import Change
from polymorph.compiler.adapters.promotion_keys import PromotionKeys
from polymorph.config.clock import SystemClock
from polymorph.config.settings import NatsSettings
from polymorph.events.values import KernelBinding, Ratio
from polymorph.kernels.signing import Signer
from polymorph.ledger.database import SqlDatabase
from polymorph.ledger.ledger import Ledger
from polymorph.ledger.relay import OutboxRelay

async def main(settings, url, key, life):
    clock = SystemClock()
    bus = await NatsBus.connect(NatsSettings.model_validate_json(settings), "SOURCE", clock)
    database = SqlDatabase(url)
    ledger = Ledger(database, clock, source="SOURCE")
    promoter = Promoter(Change(PromotionKeys(bus, Signer.load(Path(key)), clock), ledger), str)
    relay = OutboxRelay(bus, database, clock)
    print("ready", flush=True)
    for number in range(1000):
        name = f"{life}-{number}"
        binding = KernelBinding(
            definition="linear", min_m=1, max_m=8, manifest=name, artifact=name, numerics="bitwise"
        )
        speedup = Ratio(point=1.2, low=1.1, high=1.3)
        await promoter.promote(
            "pool-1", bindings=(binding,), reason="faster", speedup=speedup, promotion_id=name
        )
        await relay.drain()

asyncio.run(main(*sys.argv[1:]))
""".replace("SOURCE", SOURCE)


def plain(settings) -> str:
    """The settings with their password, for a program of the test's own."""
    document = settings.model_dump(mode="json")
    if settings.password is not None:
        document["password"] = settings.password.get_secret_value()
    return json.dumps(document)


async def one_life(settings: str, url: str, key: Path, life: int, seconds: float) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, settings, url, str(key), str(life), stdout=asyncio.subprocess.PIPE
    )
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
    await asyncio.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL


async def test_a_promoter_that_is_killed_leaves_nothing_lost_and_nothing_made_up(
    nats_server, bus_factory, tmp_path
):
    clock, url, key = SystemClock(), f"sqlite+aiosqlite:///{tmp_path}/ledger.db", tmp_path / "promoter.pem"
    await upgrade(url)
    bus = await bus_factory("compiler", SOURCE)
    database = SqlDatabase(url)
    ledger = Ledger(database, clock, source=SOURCE)
    change = Change(PromotionKeys(bus, Signer.generate(key), clock), ledger)
    promoter = Promoter(change, str)
    await promoter.ensure_pool(POOL, Mode.CANARY)
    journal, watching = Journal(), asyncio.Event()

    async def watch() -> None:
        async for entry in bus.kv_watch("desired"):
            journal.shown.append(DesiredState.model_validate_json(entry.value))
            watching.set()

    watcher = asyncio.create_task(watch())
    await watching.wait()
    rng = random.Random(5)
    for life in range(4):
        await one_life(plain(nats_server.settings("compiler")), url, key, life, 0.3 + 0.4 * rng.random())
    await Reconciler(change, promoter, Controls(change, clock), clock).reconcile()
    await OutboxRelay(bus, database, clock).drain()

    last = (await change.shown(POOL)).desired
    async with asyncio.timeout(10):
        while journal.shown[-1].generation < last.generation:
            await asyncio.sleep(0.05)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    steps = await database.read(lambda session: list(session.exec(select(StepRow))))
    rows = await database.read(lambda session: list(session.exec(select(PromotionRow))))
    journal.told = await told(bus, last.generation)
    assert last.generation >= 4
    assert {row.promotion_id.split("-")[0] for row in rows} == {"0", "1", "2", "3"}
    assert violations(journal, steps, rows) == []
    await database.close()


async def told(bus, last_generation):
    """Every promotion event of the stream up to the completion of `last_generation`."""
    kinds = {kind.type_name(): kind for kind in (PromotionAdvanced, PromotionCompleted)}
    found = []
    stream = bus.events(after="0-0")
    async with asyncio.timeout(20):
        while not (
            found and isinstance(found[-1], PromotionCompleted) and found[-1].generation == last_generation
        ):
            record = await anext(stream)
            if not isinstance(record, Gap) and record.envelope.type in kinds:
                found.append(kinds[record.envelope.type].model_validate(record.envelope.data))
    return found
