"""The end-to-end gate in a real vLLM, on the committed small model."""

import importlib.util
import os
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load

from polymorph.events.values import Gate, Verdict
from polymorph.kernels.isa import Cpu
from polymorph.kernels.schema import SignedManifest, Trace, Workload
from polymorph.kernels.signing import Role, Signer, Trust, verify_manifest

HEAD = "gemm_n3072_k256_f32"  # the small model's output layer

pytestmark = [
    pytest.mark.alone,
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="starts vLLM"),
]


async def test_a_winner_is_replayed_in_a_warm_engine_and_signed(asking_with_engine) -> None:
    asking = asking_with_engine
    honest = asking.solution(definition=HEAD)
    source = honest.sources[0].content
    call = "context->parallel_for(context, (c.n + PANEL - 1) / PANEL, 1, body, &c);"
    slow = asking.solution(source.replace(call, f"for (int i = 0; i < 40; ++i) {call}"), definition=HEAD)
    incumbent = await asking.incumbent(slow, Signer.load(asking.key))

    event = await asking.decided(honest, Gate.G5_END_TO_END, seed=5, incumbent=incumbent)

    assert (event.gate, event.verdict) == (Gate.G5_END_TO_END, Verdict.PASSED), event.reason
    assert event.speedup is not None
    assert event.speedup.low > 1.005
    assert event.greedy_agreement == 1.0, "the two kernels give the same bits"
    assert event.greedy_agreement_incumbent is not None
    trust = Trust()
    trust.add(Signer.load(asking.key).public, Role.EVALUATOR)
    signed = SignedManifest.model_validate_json(await asking.bus.get_object(event.manifest or ""))
    manifest = verify_manifest(signed, trust)
    assert (manifest.artifact, manifest.definition) == (event.artifact, HEAD)
    assert (manifest.min_m, manifest.max_m) == (1, 1)
    assert manifest.hardware == Cpu.read().fingerprint
    assert manifest.evidence == event.evidence
    trace = Trace.model_validate_json(await asking.bus.get_object(event.evidence or ""))
    replayed = trace.evaluation.performance["gates"]["G5"]["evidence"]
    assert replayed["served_calls"] > 0
    assert trace.x_polymorph.samples["G4"]["incumbent"] == "incumbent"
    assert any(case.startswith("own-engine") for case in trace.evaluation.correctness["cases"])
    await _says_whose_inputs_they_are(asking, trace)
    _computes_on_cores_of_its_own()


async def _says_whose_inputs_they_are(asking, trace: Trace) -> None:
    (digest,) = trace.x_polymorph.inputs
    workload = Workload.model_validate_json(await asking.bus.get_object(digest))
    assert workload.x_polymorph.privacy == "own-engine"
    assert (workload.x_polymorph.model_extra or {})["texts"]["output_tokens"] > 0
    for file in workload.x_polymorph.captures:
        assert file.m == 1, "decode steps of one sequence"
        assert load(await asking.bus.get_object(file.path))["x"].shape == (1, 256)


def _computes_on_cores_of_its_own() -> None:
    """Threads that float share a core for whole steps, and half of every measurement is waiting."""
    cores = sorted(os.sched_getaffinity(0))
    engines = [p for p in psutil.Process().children(recursive=True) if _is_engine(p)]
    assert engines
    busiest = sorted(_threads(engines[0].pid))[-len(cores) :]
    assert sorted(allowed for _, allowed in busiest) == [[core] for core in cores]


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "polymorph.evaluator.adapters.engine_child" in process.cmdline()
    except psutil.Error:
        return False


def _threads(pid: int) -> list[tuple[int, list[int]]]:
    """Nanoseconds that each thread ran, with the cores that it may use."""
    return [
        (int((task / "schedstat").read_text().split()[0]), sorted(os.sched_getaffinity(int(task.name))))
        for task in Path(f"/proc/{pid}/task").iterdir()
    ]


async def test_what_is_no_faster_end_to_end_is_not_signed(asking_with_engine) -> None:
    asking = asking_with_engine
    honest = asking.solution(definition=HEAD)
    incumbent = await asking.incumbent(honest, Signer.load(asking.key))
    event = await asking.decided(honest, Gate.G5_END_TO_END, seed=6, incumbent=incumbent)
    assert event.verdict is Verdict.FAILED
    assert event.manifest is None
