"""Documents that are too large for what they claim to be: the evaluator answers by their size, and reads none."""

import json
from pathlib import Path
from typing import Any

import pytest

from polymorph.bus.memory import InMemoryBus
from polymorph.bus.memory_world import MemoryWorld
from polymorph.config.clock import SystemClock
from polymorph.evaluator.adapters.records import Records
from polymorph.evaluator.handlers import Evaluating, Identity
from polymorph.events.types import EvaluateCandidate
from polymorph.events.values import Gate, KernelBinding, Numerics, Revision, Verdict
from polymorph.kernels.build import BuildFailed, write_sources
from polymorph.kernels.schema import SourceFile, Workload
from polymorph.kernels.signing import Signer


class Huge(bytes):
    """An object of a gigabyte: whoever does more than look at its size has read it."""

    def __len__(self) -> int:
        return 1 << 30


class NoPipeline:
    def run(self, job: Any) -> None:
        raise AssertionError("it was evaluated")


@pytest.mark.parametrize("huge", ["solution", "workload", "library", "manifest"])
async def test_a_gigabyte_is_answered_by_its_size(tmp_path: Path, huge: str) -> None:
    world = MemoryWorld()
    bus = InMemoryBus("/polymorph/evaluator/test", SystemClock(), world)
    identity = Identity("hw", "hw-1", "gxx", "none")
    signer = Signer.generate(tmp_path / "key")
    evaluating = Evaluating(bus, NoPipeline(), signer, Records(tmp_path), identity)  # type: ignore[arg-type]
    names = {}
    for name in ("solution", "workload", "library", "manifest"):
        names[name] = await bus.put_object(name.encode())
    solution = {"name": "s", "definition": "gemm_n16_k16_f32", "author": "a", "spec": {}, "sources": []}
    workload = Workload(uuid="w", axes={"M": 1}, inputs={})
    for name, content in (("solution", json.dumps(solution).encode()), ("workload", workload.canonical())):
        names[name] = await bus.put_object(content)
    world.objects["artifacts"][names[huge]] = Huge()
    binding = KernelBinding(
        definition="gemm_n16_k16_f32", min_m=1, max_m=1, manifest=names["manifest"], artifact=names["library"],
        numerics=Numerics.REORDERED,
    )  # fmt: skip
    order = EvaluateCandidate(
        pool="p", search_id="s", candidate_id="c", evaluation_id="e", hardware="hw", definition="gemm_n16_k16_f32",
        solution=names["solution"], workload=names["workload"], incumbent=Revision(revision="r", kernels=(binding,)),
        until=Gate.G1_BUILD, min_m=1, max_m=1,
    )  # fmt: skip
    event = await evaluating._evaluate(order)
    assert (event.gate, event.verdict) == (Gate.G0_STATIC, Verdict.FAILED)
    assert f"a {huge} has at most" in event.reason
    assert "has 1073741824 bytes" in event.reason


def test_sources_are_written_up_to_a_megabyte(tmp_path: Path) -> None:
    half = "x" * (1 << 19)
    sources = [SourceFile(path=f"{n}.cpp", content=half) for n in range(2)]
    write_sources(sources, tmp_path)
    with pytest.raises(BuildFailed, match="sources of 1048577 characters: at most 1048576"):
        write_sources([*sources, SourceFile(path="more.h", content="x")], tmp_path)
