"""The evaluator's gates one by one, so that a candidate that one gate refuses can be shown to the next."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from polymorph.engine.launch import openmp_library
from polymorph.evaluator.adapters.sandbox.compiler import build_harness, confined
from polymorph.evaluator.adapters.sandbox.lane import Lane, Machine
from polymorph.evaluator.domain.operation import operation
from polymorph.evaluator.domain.outcome import Outcome
from polymorph.evaluator.gates.building import Builder
from polymorph.evaluator.gates.correctness import Correctness
from polymorph.evaluator.gates.findings import Design
from polymorph.evaluator.gates.host import FreeHost
from polymorph.evaluator.gates.micro import Micro
from polymorph.evaluator.gates.peaks import measure
from polymorph.evaluator.gates.subject import Subject
from polymorph.events.values import Gate
from polymorph.kernels.build import build
from polymorph.kernels.isa import Cpu
from polymorph.kernels.schema import BuildSpec, Solution, SolutionExtension, SourceFile
from polymorph.kernels.toolchain import detect_toolchain
from polymorph.sandbox import isolation
from polymorph.sandbox.isolation import Isolation

KERNELS = Path(__file__).parent / "kernels"
DEFINITION = "gemm_n272_k64_f32"
FUSED = "fused_add_rms_norm_h576_f32"


class Gates:
    """Candidates made from the honest kernel by replacing text, and the gates they meet."""

    def __init__(self, folder: Path, level: Isolation, lane: Lane) -> None:
        self.toolchain, self.lane = detect_toolchain(), lane
        folder.mkdir(exist_ok=True)
        self.builder = Builder(self.toolchain, confined(level), Cpu.read().isa, folder)

    def solution(
        self, *, hook: str = "", before: str = "", kernel: tuple[str, str] | None = None,
        layout: tuple[str, str] | None = None,
    ) -> Solution:  # fmt: skip
        """`hook` stands where the call begins, `before` ahead of pm_run; the pairs replace text in one file."""
        source = (KERNELS / "honest.cpp").read_text().replace("/*HOOK*/", hook)
        source = source.replace('extern "C" int32_t pm_run(', f'{before}\nextern "C" int32_t pm_run(')
        packing = (KERNELS / "layout.h").read_text()
        for change, text in ((kernel, source), (layout, packing)):
            if change is not None:
                assert change[0] in text
        source = source.replace(*kernel) if kernel else source
        packing = packing.replace(*layout) if layout else packing
        files = {"kernel.cpp": source, "layout.h": packing}
        return Solution(
            name="candidate", definition=DEFINITION, author="test", spec=BuildSpec(),
            sources=tuple(SourceFile(path=path, content=content) for path, content in files.items()),
            x_polymorph=SolutionExtension(isa=Cpu.read().isa.name, layout_source="layout.h"),
        )  # fmt: skip

    def norm(self, hook: str) -> Solution:
        """A correct kernel for FUSED, with `hook` where the call begins."""
        source = (KERNELS / "norm.cpp").read_text().replace("/*HOOK*/", hook)
        return Solution(
            name="norm", definition=FUSED, author="test", spec=BuildSpec(),
            sources=(SourceFile(path="kernel.cpp", content=source),),
            x_polymorph=SolutionExtension(isa=Cpu.read().isa.name),
        )  # fmt: skip

    def subject(self, solution: Solution, max_m: int) -> Subject:
        return Subject(solution, operation(solution.definition), 1, max_m, {max_m: 1.0})

    def library(self, solution: Solution) -> bytes:
        """Built as G1 builds, whatever the inspection would say."""
        folder = Path(tempfile.mkdtemp(dir=self.builder.folder)).absolute()
        return build(solution, folder, self.toolchain, self.builder.runner).content()

    def static(self, solution: Solution) -> Outcome:
        return self.builder.static(solution, DEFINITION)

    def build(self, solution: Solution) -> tuple[Outcome, bytes]:
        return self.builder.build(solution, packs=solution.x_polymorph.layout_source is not None)

    def correct(self, solution: Solution, *, max_m: int = 8, call_s: float = 20.0) -> Outcome:
        """G2, whatever the gates before said."""
        correctness = Correctness(self.lane, call_s=call_s)
        return correctness.examine(self.subject(solution, max_m), self.library(solution))

    def timed(self, solution: Solution, *, m: int = 8) -> Outcome:
        """G3 in a small design, whatever the gates before said."""
        micro = Micro(self.lane, lambda: measure(self.lane), Design(2, 2, 2), 1 << 20, FreeHost)
        return micro.measure(self.subject(solution, m), self.library(solution), Gate.G3_MICRO)


@pytest.fixture(scope="session")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    folder = tmp_path_factory.mktemp("gates")
    level, cpu = isolation.detect(), Cpu.read()
    if level < Isolation.FILTERED:
        pytest.skip(f"this kernel isolates by {level.name.lower()} only")
    harness = build_harness(detect_toolchain(), folder)
    machine = Machine(
        harness, cpu.isa.name, int(cpu.isa), tuple(range(min(2, cpu.cores))), level, openmp_library()
    )
    assert sys.executable
    with Lane(machine) as lane:
        yield Gates(folder / "builds", level, lane)
