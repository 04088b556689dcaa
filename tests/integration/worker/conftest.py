"""One real worker for all tests of this folder: nats-server, vLLM on a small model, keys, a kernel."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from polymorph.bus import topology
from polymorph.bus.nats import NatsBus
from polymorph.bus.port import StreamRecord
from polymorph.bus.provision import provision
from polymorph.bus.server import NatsServer
from polymorph.config.clock import SystemClock
from polymorph.events.state import DesiredState, Mode, PromoterSignature, WorkerRecord
from polymorph.events.values import EngineSettings, KernelBinding, Revision
from polymorph.kernels.signing import Role, Signer, Trust

sys.path.insert(0, str(Path(__file__).parent))
from making import SOURCE, built, signed

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "models" / "tiny-dense"
POOL = "tiny"
WORKER = "w1"
START_S = 300.0


def _run(work: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


@dataclass
class House:
    """The worker's surroundings; `process` is the worker."""

    folder: Path
    nats: NatsServer
    port: int
    evaluator: Signer
    promoter: Signer
    process: subprocess.Popen[bytes]
    generation: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text(errors="replace")

    def build(self, *defines: str, source: Path = SOURCE) -> bytes:
        return built(self.folder, *defines, source=source)

    async def sign(self, bus: NatsBus, library: bytes, definition: str, **changes: Any) -> KernelBinding:
        """Puts a kernel and its signed manifest into the object store; `changes` are to the manifest."""
        signer = changes.pop("signer", self.evaluator)
        return await signed(bus, library, definition, signer, **changes)

    async def desire(
        self, bus: NatsBus, *kernels: KernelBinding, signer: Signer | None = None
    ) -> DesiredState:
        """Makes `kernels` the stable revision of the next generation."""
        name = "empty" if not kernels else f"r{self.generation + 1}"
        return await self.desire_revision(bus, Revision(revision=name, kernels=kernels), signer)

    async def desire_settings(self, bus: NatsBus, **settings: Any) -> DesiredState:
        name = f"s{self.generation + 1}"
        return await self.desire_revision(bus, Revision(revision=name, engine=EngineSettings(**settings)))

    async def desire_revision(
        self, bus: NatsBus, revision: Revision, signer: Signer | None = None
    ) -> DesiredState:
        self.generation += 1
        signer = signer or self.promoter
        state = DesiredState(pool=POOL, generation=self.generation, mode=Mode.CANARY, stable=revision)
        signature = PromoterSignature(key_id=signer.key_id, signature=signer.sign(state.signed_content()))
        state = state.model_copy(update={"signature": signature})
        await bus.kv_put(topology.DESIRED, POOL, state.model_dump_json().encode())
        return state

    async def answer(self, bus: NatsBus, generation: int, seconds: float = 120) -> dict[str, Any]:
        """What the worker published about a generation."""
        async with asyncio.timeout(seconds):
            async for record in bus.events(subjects="polymorph.evt.worker.>", after="0-0"):
                if isinstance(record, StreamRecord) and record.envelope.data.get("generation") == generation:
                    return {"type": record.envelope.type.split(".")[3], **record.envelope.data}
        raise AssertionError("the stream ended")

    async def engaged(self) -> list[str]:
        """Artifacts that the slots run, by the engine itself and not by what the worker believes."""
        return [binding["artifact"] for binding in (await self._asked("slots_describe"))["engaged"]]

    async def served(self) -> dict[str, int]:
        """Calls by artifact, as the engine counts them."""
        counted = (await self._asked("slots_read"))["artifacts"]
        return {artifact: counts["served"]["calls"] for artifact, counts in counted.items()}

    async def _asked(self, method: str) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.post(f"{self.url}/collective_rpc", json={"method": method})
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()["results"][0]
        return told

    async def record(self, bus: NatsBus) -> WorkerRecord:
        entry = await bus.kv_get(topology.WORKERS, WORKER)
        return WorkerRecord.model_validate_json(entry.value or b"")


def start_worker(folder: Path, nats: NatsServer, port: int, **extra: str) -> subprocess.Popen[bytes]:
    settings = nats.settings("worker")
    assert settings.password is not None
    variables = {
        "WORKER_ID": WORKER,
        "PORT": str(port),
        "MODEL": str(MODEL),
        "SERVED_MODEL_NAME": "tiny-dense",
        "POOL": POOL,
        "DTYPE": "float32",  # the same definitions, and tokens that no rounding ties, whatever the processor
        "MAX_MODEL_LEN": "512",
        "MAX_NUM_SEQS": "8",
        "ENFORCE_EAGER": "1",
        "SLOTS": "linear,rms_norm,silu_and_mul,rotary,attention,sampling",
        "TRUST_FILE": str(folder / "trust.json"),
        "DATA_DIR": str(folder / "data"),
        "DRAIN_TIMEOUT_S": "30",
        "HOLD_TIMEOUT_S": "400",  # a change of numerics waits a tenth of it for streams: noisy cores
        "HANG_TIMEOUT_S": "8",
        "NATS__URL": settings.url,
        "NATS__USER": settings.user or "",
        "NATS__PASSWORD": settings.password.get_secret_value(),
        "NATS__INBOX_PREFIX": settings.inbox_prefix,
    } | extra
    environment = {**os.environ, **{f"POLYMORPH_WORKER_{name}": value for name, value in variables.items()}}
    environment.pop("LD_PRELOAD", None)  # vLLM sets it where a test has loaded it in this process
    environment["VLLM_SERVER_DEV_MODE"] = (
        "1"  # its HTTP server passes on calls to the engine: `House.engaged`
    )
    with (folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "polymorph.worker"], env=environment, stdout=log, stderr=log, cwd=folder
        )


@pytest.fixture(scope="package")
def start() -> Callable[..., subprocess.Popen[bytes]]:
    """For a test that needs a worker of its own."""
    return start_worker


def wait_until_served(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"the worker does not serve:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("worker")
    port, nats_port, monitor = _free_ports(3)
    nats = NatsServer(folder / "nats", port=nats_port, monitor_port=monitor)
    evaluator, promoter = Signer.generate(folder / "e.pem"), Signer.generate(folder / "p.pem")
    trust = Trust()
    trust.add(evaluator.public, Role.EVALUATOR)
    trust.add(promoter.public, Role.PROMOTER)
    trust.save(folder / "trust.json")

    async def begin() -> None:
        await nats.start()
        await provision(nats.settings("operator"), monitor_url=nats.monitor_url)

    _run(begin())
    process = start_worker(folder, nats, port)
    try:
        wait_until_served(process, f"http://127.0.0.1:{port}", folder / "worker.log")
        yield House(folder, nats, port, evaluator, promoter, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
        _run(nats.kill())


@pytest_asyncio.fixture
async def bus(house: House) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(house.nats.settings("compiler"), "/polymorph/test/0", SystemClock())
    yield made
    await made.close()


@pytest.fixture
def definition() -> str:
    """The largest layer of the small model that repeats."""
    config = json.loads((MODEL / "config.json").read_text())
    return f"gemm_n{2 * config['intermediate_size']}_k{config['hidden_size']}_f32"
