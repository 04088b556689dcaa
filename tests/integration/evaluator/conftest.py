"""An evaluator on a bus in memory, with real sandboxes, and candidates in C++."""

import asyncio
import datetime as dt
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from polymorph.bus import topology
from polymorph.bus.memory import InMemoryBus
from polymorph.bus.port import Bus, StreamRecord
from polymorph.config.clock import SystemClock
from polymorph.evaluator.app import Evaluator
from polymorph.evaluator.settings import EvaluatorSettings
from polymorph.events.state import EMPTY, CapturedWorkload
from polymorph.events.types import CandidateEvaluated, EvaluateCandidate
from polymorph.events.values import Gate, KernelBinding, Revision, Verdict
from polymorph.kernels.isa import Cpu, detect_isa, hardware_class
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.schema import BuildSpec, Manifest, Solution, SolutionExtension, SourceFile, Workload
from polymorph.kernels.signing import Signer, sign_manifest
from polymorph.workloads import shelf

KERNELS = Path(__file__).parents[2] / "security" / "kernels"


class Asking:
    """Sends orders and waits for their events."""

    definition = "gemm_n960_k576_f32"
    key = Path()

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    def solution(self, kernel: str | None = None, *, definition: str | None = None) -> Solution:
        source = kernel or (KERNELS / "honest.cpp").read_text()
        files = {"kernel.cpp": source, "layout.h": (KERNELS / "layout.h").read_text()}
        return Solution(
            name="candidate",
            definition=definition or self.definition,
            author="test",
            spec=BuildSpec(),
            sources=tuple(SourceFile(path=path, content=content) for path, content in files.items()),
            x_polymorph=SolutionExtension(isa=detect_isa().name, layout_source="layout.h"),
        )

    async def order(
        self, candidate: Solution, until: Gate, *, seed: int = 0, m: int = 1, incumbent: Revision = EMPTY
    ) -> EvaluateCandidate:
        workload = Workload(uuid="w", axes={"M": m}, inputs={})
        return EvaluateCandidate(
            pool="pool",
            search_id="search",
            candidate_id="candidate",
            evaluation_id=uuid.uuid4().hex,
            hardware=hardware_class(),
            definition=candidate.definition,
            solution=await self.bus.put_object(candidate.canonical()),
            workload=await self.bus.put_object(workload.canonical()),
            incumbent=incumbent,
            until=until,
            min_m=m,
            max_m=m,
            confirm_seed=seed,
        )

    async def incumbent(self, candidate: Solution, signer: Signer) -> Revision:
        """A revision that runs `candidate`, as if it had been promoted at M = 1."""
        built = await self.ask(await self.order(candidate, Gate.G1_BUILD))
        assert built.artifact is not None, built.reason
        manifest = Manifest(
            artifact=built.artifact,
            definition=candidate.definition,
            definition_digest="",
            solution=candidate.digest(),
            hardware=Cpu.read().fingerprint,
            isa=candidate.x_polymorph.isa,
            toolchain="",
            layout=layout_digest(candidate),
            numerics=candidate.x_polymorph.numerics,
            min_m=1,
            max_m=1,
            evidence="",
        )
        digest = await self.bus.put_object(sign_manifest(manifest, signer).canonical())
        binding = KernelBinding(
            definition=candidate.definition,
            min_m=1,
            max_m=1,
            manifest=digest,
            artifact=built.artifact,
            numerics=manifest.numerics,
        )
        return Revision(revision="slow", kernels=(binding,))

    async def captured_for_pool(self, content: bytes) -> str:
        """Inputs of one call that stand for the pool, as `polymorph capture` leaves them; their workload's digest."""
        path = await self.bus.put_object(content, store=topology.CAPTURES)
        extension = {"privacy": "captured", "captures": [{"m": 5, "path": path}]}
        workload = Workload.model_validate(
            {"uuid": path, "axes": {"M": 5}, "inputs": {}, "x_polymorph": extension}
        )
        digest = await self.bus.put_object(workload.canonical(), store=topology.CAPTURES)
        now = dt.datetime.now(dt.UTC)
        entry = CapturedWorkload(
            pool="pool", definition=self.definition, workload=digest, worker_id="w", model="m", m=(5,), signature="8",
            size=len(content), weight=1.0, captured_at=now, expires_at=now + dt.timedelta(days=1),
        )  # fmt: skip
        await shelf.put(self.bus, entry)
        return digest

    async def ask(self, command: EvaluateCandidate) -> CandidateEvaluated:
        await self.bus.publish(command)
        async with asyncio.timeout(400):
            async for record in self.bus.events(after="0-0"):
                if isinstance(record, StreamRecord):
                    data = record.envelope.data
                    if data.get("evaluation_id") == command.evaluation_id:
                        return CandidateEvaluated.model_validate(data)
        raise AssertionError("the stream of events ended")

    async def decided(
        self, candidate: Solution, until: Gate, *, seed: int = 0, incumbent: Revision = EMPTY
    ) -> CandidateEvaluated:
        """Asks again while the host is too busy to tell, as a search does."""
        until_s = asyncio.get_running_loop().time() + 300
        while True:
            event = await self.ask(await self.order(candidate, until, seed=seed, incumbent=incumbent))
            late = asyncio.get_running_loop().time() > until_s
            if event.verdict is not Verdict.INCONCLUSIVE or "no engine" in event.reason or late:
                return event


@pytest.fixture(scope="module")
def started() -> Callable[..., "object"]:
    """Starts an evaluator in a task; the call returned ends it."""

    async def start(settings: EvaluatorSettings, bus: Bus) -> Callable[[], "object"]:
        stop = asyncio.Event()
        evaluator = Evaluator(settings, bus, SystemClock())
        running = asyncio.create_task(evaluator.run(stop))

        async def end() -> None:
            stop.set()
            await running

        return end

    return start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asking(tmp_path_factory: pytest.TempPathFactory, started) -> AsyncIterator[Asking]:
    folder = tmp_path_factory.mktemp("evaluator")
    bus = InMemoryBus("/polymorph/evaluator/test", SystemClock())
    settings = EvaluatorSettings(data_dir=folder, signing_key=folder / "evaluator.key", engine=False)
    end = await started(settings, bus)
    yield Asking(bus)
    await end()
    await bus.close()


MODEL = Path(__file__).parents[3] / "models" / "tiny-dense"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asking_with_engine(tmp_path_factory: pytest.TempPathFactory, started) -> AsyncIterator[Asking]:
    """The same with an engine of its own on the committed small model."""
    folder = tmp_path_factory.mktemp("evaluator")
    bus = InMemoryBus("/polymorph/evaluator/test", SystemClock())
    settings = EvaluatorSettings(
        data_dir=folder, signing_key=folder / "evaluator.key", model=MODEL, engine_max_model_len=256,
        engine_dtype="float32",
    )  # fmt: skip
    end = await started(settings, bus)
    asking = Asking(bus)
    asking.key = folder / "evaluator.key"
    yield asking
    await end()
    await bus.close()


@pytest.fixture
def asking_on() -> type[Asking]:
    """Candidates and orders for a bus of the test's own."""
    return Asking
