"""The evaluator's service on a bus: real C++ candidates, built, checked, timed in the sandbox, and told about."""

import importlib.util

import pytest
import torch
from safetensors.torch import save

from polymorph.bus import topology
from polymorph.bus.port import StreamRecord
from polymorph.events.values import Gate, Verdict
from polymorph.kernels.schema import Trace, Workload

pytestmark = [pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]
has_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="times against vLLM's own code"
)


@has_vllm
async def test_an_honest_kernel_passes_up_to_the_confirmation(asking) -> None:
    event = await asking.decided(asking.solution(), Gate.G4_CONFIRM, seed=7)
    assert (event.gate, event.verdict) == (Gate.G4_CONFIRM, Verdict.PASSED), event.reason
    assert event.speedup is not None
    assert event.speedup.low > 1.01
    assert event.artifact is not None
    assert event.manifest is None, "only the end-to-end gate leads to a signature"
    assert event.isolation
    assert event.cpu_s > 0
    trace = Trace.model_validate_json(await asking.bus.get_object(event.evidence or ""))
    assert list(trace.evaluation.performance["gates"]) == ["G0", "G1", "G2", "G4"]
    assert len(trace.x_polymorph.samples["G4"]["log_ratios"]) == 5


async def test_a_job_that_comes_again_gets_the_same_answer(asking) -> None:
    command = await asking.order(asking.solution(), Gate.G2_CORRECT)
    first = await asking.ask(command)
    assert first.verdict is Verdict.PASSED, first.reason
    # Another message with the same evaluation id, as where an acknowledgement was lost; then one to wait for.
    await asking.bus.publish(command.model_copy(update={"search_id": "another"}))
    await asking.ask(await asking.order(asking.solution(), Gate.G0_STATIC))
    told = []
    async for record in asking.bus.events(after="0-0"):
        assert isinstance(record, StreamRecord)
        told.append(record.envelope.data)
        if record.envelope.data["gate"] == "G0":
            break
    assert [data["search_id"] for data in told if data["evaluation_id"] == command.evaluation_id] == [
        "search"
    ]


async def test_sources_that_do_not_compile_are_told_with_the_compilers_words(asking) -> None:
    event = await asking.ask(await asking.order(asking.solution("int pm_run( {"), Gate.G4_CONFIRM))
    assert (event.gate, event.verdict) == (Gate.G1_BUILD, Verdict.FAILED)
    assert "error:" in event.reason


async def test_an_order_whose_documents_are_gone_is_answered(asking) -> None:
    command = await asking.order(asking.solution(), Gate.G1_BUILD)
    event = await asking.ask(command.model_copy(update={"solution": "0" * 64}))
    assert event.verdict is Verdict.FAILED
    assert "cannot be read" in event.reason


async def test_an_operation_without_a_reference_is_refused(asking) -> None:
    candidate = asking.solution(definition="softmax_h64_f32")
    event = await asking.ask(await asking.order(candidate, Gate.G4_CONFIRM))
    assert event.verdict is Verdict.FAILED
    assert "softmax_h64_f32" in event.reason


@has_vllm
async def test_what_workers_captured_is_among_the_cases(asking) -> None:
    """K of the definition is 576; a file that is not of it is left out, and said so."""
    good = await asking.captured_for_pool(save({"x": torch.randn(5, 576) * 30}))
    bad = await asking.captured_for_pool(save({"x": torch.randn(5, 64)}))
    event = await asking.ask(await asking.order(asking.solution(), Gate.G2_CORRECT))
    assert event.verdict is Verdict.PASSED, event.reason
    trace = Trace.model_validate_json(await asking.bus.get_object(event.evidence or ""))
    assert "captured-0" in trace.evaluation.correctness["cases"]
    assert "captured-1" not in trace.evaluation.correctness["cases"]
    assert trace.x_polymorph.inputs == (good,)
    assert "takes [M, 576]" in trace.x_polymorph.guards["inputs_left_out"][bad]


async def test_a_workload_whose_own_inputs_are_bad_blames_no_candidate(asking) -> None:
    command = await asking.order(asking.solution(), Gate.G2_CORRECT)
    path = await asking.bus.put_object(b"no tensors", store=topology.CAPTURES)
    named = Workload.model_validate(
        {
            "uuid": "w", "axes": {"M": 1}, "inputs": {},
            "x_polymorph": {"privacy": "captured", "captures": [{"m": 1, "path": path}]},
        }
    )  # fmt: skip
    document = await asking.bus.put_object(named.canonical())
    event = await asking.ask(command.model_copy(update={"workload": document}))
    assert (event.gate, event.verdict) == (Gate.G0_STATIC, Verdict.INCONCLUSIVE)
    assert "no safetensors file" in event.reason


@has_vllm
async def test_without_an_engine_the_last_gate_says_so(asking) -> None:
    event = await asking.decided(asking.solution(), Gate.G5_END_TO_END, seed=3)
    assert (event.gate, event.verdict) == (Gate.G5_END_TO_END, Verdict.INCONCLUSIVE), event.reason
    assert "no engine" in event.reason
    assert event.manifest is None
