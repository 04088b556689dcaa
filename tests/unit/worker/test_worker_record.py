"""What a worker says of itself in the registry, from its first engine to its end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.config.clock import SystemClock
from polymorph.events.state import WorkerRecord
from polymorph.worker import app
from polymorph.worker import registry as registry_module
from polymorph.worker.app import Worker
from polymorph.worker.registry import Registry
from polymorph.worker.seat import Seat
from polymorph.worker.settings import WorkerSettings


class House:
    """A worker whose engines are doubles; its registry tells a bus in memory, with a heartbeat that never comes."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        settings = WorkerSettings(model=folder, worker_id="w1", pool="p", data_dir=folder / "data")
        self.worker = Worker(settings, SystemClock())
        self.bus = InMemoryBus("/polymorph/test/0", SystemClock(), MemoryWorld())
        registry = Registry(self.worker._record, SystemClock())
        self.worker._seats.on_change = registry.news
        self.keeping = asyncio.create_task(registry.keep(self.bus))

    def seat(self) -> None:
        engine: Any = SimpleNamespace(kv_capacity_tokens=64, features=())
        self.worker._seats.seat(Seat(engine, None, None, None, definitions=("gemm",)))  # type: ignore[arg-type]

    async def told(self, state: str) -> WorkerRecord:
        async with asyncio.timeout(10):
            while True:
                try:
                    value = (await self.bus.kv_get(topology.WORKERS, "w1")).value or b""
                except NotFound:
                    value = b""
                if value and (record := WorkerRecord.model_validate_json(value)).state == state:
                    return record
                await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(registry_module, "HEARTBEAT_S", 3600.0)
    made = House(tmp_path)
    yield made
    made.keeping.cancel()
    await asyncio.gather(made.keeping, return_exceptions=True)
    await made.bus.close()


async def test_a_worker_whose_engine_died_is_not_ready_until_the_next_one_serves(house: House) -> None:
    assert not (await house.told("starting")).holds
    house.worker._state = "ready"
    house.seat()
    record = await house.told("ready")
    assert (record.holds, record.slots, record.kv_capacity_tokens) == (False, ("gemm",), 64)
    house.worker._seats.vacate()  # what recovery does first
    assert (await house.told("starting")).holds
    house.seat()
    assert not (await house.told("ready")).holds


async def test_one_that_restarts_in_its_turn_holds_and_one_that_ends_does_not(house: House) -> None:
    house.worker._state = "draining"
    house.seat()
    assert (await house.told("draining")).holds
    house.worker._ending = True
    house.seat()
    async with asyncio.timeout(10):
        while (await house.told("draining")).holds:
            await asyncio.sleep(0.005)


async def test_a_worker_drains_though_its_last_words_fail(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unforeseen() -> WorkerRecord:
        raise KeyError("nobody foresaw it")

    async def close(bus: object) -> None:
        unforeseen()

    monkeypatch.setattr(app, "HEARTBEAT_S", 0.0)
    leasing: Any = SimpleNamespace(close=close)
    await house.worker._drain(house.bus, Registry(unforeseen, SystemClock()), leasing)
    assert caplog.text.count("failed as nobody had foreseen") == 2
