"""The evaluator's service on a bus: real C++ candidates, built, checked, timed in the sandbox, and told about."""

import asyncio
import contextlib
import importlib.util
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.port import Bus
from polymorph.config.clock import SystemClock
from polymorph.evaluator.app import Evaluator
from polymorph.evaluator.settings import EvaluatorSettings
from polymorph.events.state import EMPTY
from polymorph.events.types import CandidateEvaluated, EvaluateCandidate
from polymorph.events.values import Gate, Verdict
from polymorph.kernels.isa import detect_isa, hardware_class
from polymorph.kernels.schema import BuildSpec, Solution, SolutionExtension, SourceFile, Trace, Workload

KERNELS = Path(__file__).parents[2] / "security" / "kernels"
DEFINITION = "gemm_n960_k576_f32"
has_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="times against vLLM's own code")


def solution(kernel: str | None = None, *, author: str = "test") -> Solution:
    source = kernel or (KERNELS / "honest.cpp").read_text()
    files = {"kernel.cpp": source, "layout.h": (KERNELS / "layout.h").read_text()}
    return Solution(
        name="candidate",
        definition=DEFINITION,
        author=author,
        spec=BuildSpec(),
        sources=tuple(SourceFile(path=path, content=content) for path, content in files.items()),
        x_polymorph=SolutionExtension(isa=detect_isa().name, layout_source="layout.h", min_m=1, max_m=1),
    )


async def order(bus: Bus, candidate: Solution, until: Gate, *, seed: int = 0) -> EvaluateCandidate:
    workload = Workload(uuid="w", axes={"M": 1}, inputs={})
    return EvaluateCandidate(
        pool="pool", search_id="search", candidate_id="candidate", evaluation_id=uuid.uuid4().hex,
        hardware=hardware_class(), definition=DEFINITION, solution=await bus.put_object(candidate.canonical()),
        workload=await bus.put_object(workload.canonical()), incumbent=EMPTY, until=until, min_m=1, max_m=1,
        confirm_seed=seed,
    )  # fmt: skip


class Asking:
    """Sends orders and waits for their events."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def ask(self, command: EvaluateCandidate) -> CandidateEvaluated:
        async with asyncio.timeout(240):
            await self.bus.publish(command)
            async for record in self.bus.events(after="0-0"):
                data = getattr(record, "envelope").data  # noqa: B009
                if data.get("evaluation_id") == command.evaluation_id:
                    return CandidateEvaluated.model_validate(data)
        raise AssertionError("the stream ended")

    async def decided(self, candidate: Solution, until: Gate, *, seed: int = 0) -> CandidateEvaluated:
        """Asks again while the host is too busy to tell, as a search does."""
        for _ in range(20):
            event = await self.ask(await order(self.bus, candidate, until, seed=seed))
            if event.verdict is not Verdict.INCONCLUSIVE:
                return event
        return event


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncIterator[Asking]:
    bus = InMemoryBus("/polymorph/evaluator/test", SystemClock())
    settings = EvaluatorSettings(data_dir=tmp_path, signing_key=tmp_path / "evaluator.key", engine=False)
    stop = asyncio.Event()
    evaluator = Evaluator(settings, bus, SystemClock())
    running = asyncio.create_task(evaluator.run(stop))
    try:
        yield Asking(bus)
    finally:
        stop.set()
        await running
        with contextlib.suppress(Exception):
            await bus.close()


@has_vllm
async def test_an_honest_kernel_passes_up_to_the_confirmation(asking: Asking) -> None:
    event = await asking.decided(solution(), Gate.G4_CONFIRM, seed=7)
    assert (event.gate, event.verdict) == (Gate.G4_CONFIRM, Verdict.PASSED), event.reason
    assert event.speedup is not None
    assert event.speedup.low > 1.01
    assert event.artifact is not None
    assert event.manifest is None, "only the end-to-end gate leads to a signature"
    assert event.isolation
    trace = Trace.model_validate_json(await asking.bus.get_object(event.evidence or ""))
    gates = trace.evaluation.performance["gates"]
    assert list(gates) == ["G0", "G1", "G2", "G4"]
    assert len(trace.x_polymorph.samples["G4"]["log_ratios"]) == 5


async def test_a_job_that_comes_again_gets_the_same_answer(asking: Asking) -> None:
    command = await order(asking.bus, solution(), Gate.G2_CORRECT)
    first = await asking.ask(command)
    assert first.verdict is Verdict.PASSED, first.reason
    # Another message with the same evaluation id, as after a redelivery whose acknowledgement was lost.
    again = command.model_copy(update={"search_id": "another"})
    await asking.bus.publish(again)
    events = []
    async with asyncio.timeout(30):
        async for record in asking.bus.events(after="0-0"):
            events.append(getattr(record, "envelope").data)  # noqa: B009
            if not await _queued(asking.bus):
                break
    assert [event["search_id"] for event in events] == ["search"]


async def _queued(bus: Bus) -> bool:
    return False


async def test_sources_that_do_not_compile_are_told_with_the_compilers_words(asking: Asking) -> None:
    event = await asking.ask(await order(asking.bus, solution("int pm_run( {"), Gate.G4_CONFIRM))
    assert (event.gate, event.verdict) == (Gate.G1_BUILD, Verdict.FAILED)
    assert "error:" in event.reason


async def test_an_order_whose_documents_are_gone_is_answered(asking: Asking) -> None:
    command = (await order(asking.bus, solution(), Gate.G1_BUILD)).model_copy(update={"solution": "0" * 64})
    event = await asking.ask(command)
    assert event.verdict is Verdict.FAILED
    assert "cannot be read" in event.reason


async def test_without_an_engine_the_last_gate_says_so(asking: Asking) -> None:
    event = await asking.decided(solution(), Gate.G5_END_TO_END, seed=3)
    if event.gate is Gate.G5_END_TO_END:
        assert event.verdict is Verdict.INCONCLUSIVE
        assert "no engine" in event.reason
