"""Two workers without memory for a second engine take turns: one always serves, and nothing is lost."""

import asyncio
import contextlib
import itertools
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import StreamRecord
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock
from polymorph.embedded.folder import free_port
from polymorph.events.state import DesiredState, Mode, PromoterSignature, WorkerRecord
from polymorph.events.values import EngineSettings, Revision
from polymorph.kernels.signing import Role, Signer, Trust

pytestmark = [pytest.mark.engine, pytest.mark.real, pytest.mark.slow]
POOL, WORKERS, TOKENS = "rolling", ("w1", "w2"), 40


async def _records(bus: NatsBus) -> dict[str, WorkerRecord]:
    found = {}
    for worker in WORKERS:
        with contextlib.suppress(NotFound):
            entry = await bus.kv_get(topology.WORKERS, worker)
            found[worker] = WorkerRecord.model_validate_json(entry.value or b"")
    return found


async def _ready(bus: NatsBus, count: int) -> list[WorkerRecord]:
    async with asyncio.timeout(300):
        while True:
            ready = [record for record in (await _records(bus)).values() if record.state == "ready"]
            if len(ready) >= count:
                return ready
            await asyncio.sleep(0.2)


class Client:
    """Sends each request to a worker that the registry calls ready, as a router does."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._turn = itertools.count()
        self.ends = asyncio.Event()
        self.done = 0
        self.fewest = len(WORKERS)

    async def lane(self) -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            while not self.ends.is_set():
                ready = await _ready(self._bus, 1)
                self.fewest = min(self.fewest, len(ready))
                await self._stream(client, ready[next(self._turn) % len(ready)].url)

    async def _stream(self, client: httpx.AsyncClient, url: str) -> None:
        body = {
            "model": "tiny-dense",
            "prompt": "x",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        last = ""
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                last = line or last
        assert last == "data: [DONE]"
        self.done += 1


async def _loaded(bus: NatsBus) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(400):
        async for record in bus.events(subjects="polymorph.evt.worker.>", after="0-0"):
            if isinstance(record, StreamRecord):
                assert "reason" not in record.envelope.data, record.envelope.data
                found[record.envelope.data["worker_id"]] = dict(record.envelope.data)
            if set(found) == set(WORKERS):
                return found
    raise AssertionError("the stream ended")


async def _desire(bus: NatsBus, promoter: Signer, **settings: Any) -> None:
    revision = Revision(revision="s1", engine=EngineSettings(**settings))
    state = DesiredState(pool=POOL, generation=1, mode=Mode.CANARY, stable=revision)
    signature = PromoterSignature(key_id=promoter.key_id, signature=promoter.sign(state.signed_content()))
    signed = state.model_copy(update={"signature": signature})
    await bus.kv_put(topology.DESIRED, POOL, signed.model_dump_json().encode())


@pytest.mark.timeout(900)
async def test_workers_restart_in_turn(tmp_path: Path, start: Any) -> None:
    nats = NatsServer(tmp_path / "nats", port=free_port(), monitor_port=free_port())
    promoter = Signer.generate(tmp_path / "p.pem")
    trust = Trust()
    trust.add(promoter.public, Role.PROMOTER)
    trust.save(tmp_path / "trust.json")
    await nats.start()
    await provision(nats.settings("operator"), monitor_url=nats.monitor_url)
    bus = await NatsBus.connect(nats.settings("compiler"), "/polymorph/test/0", SystemClock())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for worker in WORKERS:
            extra = {
                "WORKER_ID": worker,
                "POOL": POOL,
                "SPARE_GIB": "100000",
                "DATA_DIR": str(tmp_path / worker),
            }
            processes.append(start(tmp_path, nats, free_port(), **extra))
        await _ready(bus, 2)
        client = Client(bus)
        lanes = [asyncio.create_task(client.lane()) for _ in range(3)]
        await _desire(bus, promoter, block_size=64)
        events = await _loaded(bus)
        client.ends.set()
        await asyncio.gather(*lanes)
        assert {event["way"] for event in events.values()} == {"rolling"}
        assert {event["settings"]["block_size"] for event in events.values()} == {64}
        assert client.fewest == 1
        assert client.done > 3
        assert {record.state for record in (await _records(bus)).values()} == {"ready"}
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            await asyncio.to_thread(process.wait, 100)
        await bus.close()
        await nats.kill()
