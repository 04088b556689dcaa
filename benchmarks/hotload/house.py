"""One real worker with its surroundings: nats-server, keys of an evaluator and a promoter, an object store."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from benchmarks.demo.stack import Process

from polymorph.bus import topology
from polymorph.bus.errors import NotFound
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import StreamRecord
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock
from polymorph.embedded.folder import free_port
from polymorph.events.state import DesiredState, Mode, PromoterSignature, WorkerRecord
from polymorph.events.values import KernelBinding, Revision
from polymorph.kernels.signing import Role, Signer, Trust

POOL = "bench"
WORKER = "bench-0"
_START_S = 900.0
_LOADED_S = 300.0
_COUNTED_S = 60.0


class Failed(RuntimeError):
    """The worker did not do what was asked of it."""


@dataclass
class House:
    """What a benchmark needs to promote kernels to a worker and to read back what became of it."""

    folder: Path
    port: int
    bus: NatsBus
    evaluator: Signer
    promoter: Signer
    worker: Process
    generation: int = 0
    _answers: dict[int, asyncio.Future[dict[str, object]]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def promote(self, kernels: tuple[KernelBinding, ...]) -> dict[str, object]:
        """Makes `kernels` the pool's stable revision and waits until the worker has read it back.

        Returns:
            The body of the worker's `worker.loaded`.

        Raises:
            Failed: the worker refused, or said nothing.
        """
        self.generation += 1
        generation = self.generation
        answer: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._answers[generation] = answer
        state = DesiredState(
            pool=POOL,
            generation=generation,
            mode=Mode.CANARY,
            stable=Revision(revision=f"g{generation}", kernels=kernels),
        )
        signature = PromoterSignature(
            key_id=self.promoter.key_id, signature=self.promoter.sign(state.signed_content())
        )
        signed = state.model_copy(update={"signature": signature})
        await self.bus.kv_put(topology.DESIRED, POOL, signed.model_dump_json().encode())
        try:
            async with asyncio.timeout(_LOADED_S):
                told = await answer
        except TimeoutError as error:
            raise Failed(
                f"the worker has not told of generation {generation}: {_last_words(self.worker)}"
            ) from error
        if "reason" in told:
            raise Failed(f"refused: {told['reason']}")
        return told

    async def listen(self) -> None:
        """Runs until cancelled: hears what the worker tells."""
        async for record in self.bus.events(subjects="polymorph.evt.worker.>", after="0-0"):
            if isinstance(record, StreamRecord):
                data = dict(record.envelope.data)
                answer = self._answers.pop(int(str(data.get("generation", -1))), None)
                if answer is not None:
                    answer.set_result(data)

    async def called(self, most_m: int) -> list[str]:
        """The definitions that the traffic of now calls with as many tokens, as the worker counts them.

        Raises:
            Failed: none is called.
        """
        before = await self._calls(most_m)
        with suppress(TimeoutError):
            async with asyncio.timeout(_COUNTED_S):
                while True:
                    now = await self._calls(most_m)
                    found = [name for name, calls in now.items() if calls > before.get(name, 0)]
                    if found:
                        return found
                    await asyncio.sleep(0.5)
        raise Failed(f"the worker counts no call of {most_m} tokens: {_last_words(self.worker)}")

    async def _calls(self, m: int) -> dict[str, int]:
        try:
            entry = await self.bus.kv_get(topology.WORKERS, WORKER)
        except NotFound:
            return {}
        record = WorkerRecord.model_validate_json(entry.value or b"")
        return {hit.definition: hit.calls.get(str(m), 0) for hit in record.hits}


@asynccontextmanager
async def house(folder: Path, model: Path, slots: tuple[str, ...], streams: int) -> AsyncIterator[House]:
    """A worker that serves `model`, compiled, with these slots; everything ends with the block."""
    nats = NatsServer(folder / "nats", port=free_port(), monitor_port=free_port())
    evaluator, promoter = Signer.generate(folder / "e.pem"), Signer.generate(folder / "p.pem")
    trust = Trust()
    trust.add(evaluator.public, Role.EVALUATOR)
    trust.add(promoter.public, Role.PROMOTER)
    trust.save(folder / "trust.json")
    await nats.start()
    try:
        await provision(nats.settings("operator"), monitor_url=nats.monitor_url)
        bus = await NatsBus.connect(nats.settings("compiler"), "/polymorph/bench/0", SystemClock())
        port = free_port()
        worker = _worker(folder, model, slots, nats, port, streams)
        await worker.start()
        try:
            await _until_ready(worker, port)
            home = House(folder, port, bus, evaluator, promoter, worker)
            listening = asyncio.create_task(home.listen())
            try:
                yield home
            finally:
                listening.cancel()
        finally:
            await worker.stop()
            await bus.close()
    finally:
        await nats.kill()


def _worker(
    folder: Path, model: Path, slots: tuple[str, ...], nats: NatsServer, port: int, streams: int
) -> Process:
    access = nats.settings("worker")
    settings = {
        "WORKER_ID": WORKER,
        "PORT": str(port),
        "MODEL": str(model),
        "SERVED_MODEL_NAME": "bench",
        "POOL": POOL,
        "MAX_MODEL_LEN": "1024",
        "MAX_NUM_SEQS": str(max(8, streams)),
        "SLOTS": ",".join(slots),
        "TRUST_FILE": str(folder / "trust.json"),
        "DATA_DIR": str(folder / "data"),
        "NATS__URL": access.url,
        "NATS__USER": access.user or "",
        "NATS__PASSWORD": access.password.get_secret_value() if access.password else "",
        "NATS__INBOX_PREFIX": access.inbox_prefix,
    }
    environment = {**os.environ, **{f"POLYMORPH_WORKER_{name}": value for name, value in settings.items()}}
    return Process("worker", [sys.executable, "-m", "polymorph.worker"], environment, folder / "worker.log")


async def _until_ready(worker: Process, port: int) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(_START_S):
        while worker.ended() is None:
            with suppress(aiohttp.ClientError, OSError):
                async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(1)
    raise Failed(f"the worker does not start: {_last_words(worker)}")


def _last_words(worker: Process) -> str:
    return worker.log.read_text(errors="replace")[-1500:]
