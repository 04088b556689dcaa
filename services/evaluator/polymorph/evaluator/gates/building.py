"""Gates G0 and G1: read the sources, build them in the sandbox, read what came out."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymorph.evaluator.domain.outcome import Outcome, failed, passed
from polymorph.evaluator.domain.tripwires import tripped
from polymorph.events.values import Gate
from polymorph.kernels.build import BuildFailed, build, solution_isa
from polymorph.kernels.inspect import LibraryRefused, inspect_library
from polymorph.kernels.isa import Isa
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.schema import Solution, TraceStatus
from polymorph.kernels.state import state
from polymorph.kernels.toolchain import CommandRunner, Toolchain


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds candidates with one toolchain, in a sandbox."""

    toolchain: Toolchain
    runner: CommandRunner
    isa: Isa
    folder: Path

    def static(self, solution: Solution, definition: str) -> Outcome:
        """G0."""
        reasons = tripped(solution)
        if solution.definition != definition:
            reasons.append(f"the solution is for {solution.definition}, {definition} was asked for")
        try:
            layout_digest(solution)  # a name of no source would fail only where the manifest is signed
            if not self.isa.runs(solution_isa(solution)):
                reasons.append(f"needs ISA {solution.x_polymorph.isa}, this machine is {self.isa.name}")
        except ValueError as error:
            reasons.append(str(error))
        if reasons:
            text = "refused on reading: " + "; ".join(reasons[:5])
            return failed(Gate.G0_STATIC, TraceStatus.REWARD_HACK, text, reasons=reasons)
        return passed(Gate.G0_STATIC, "nothing in the sources that a kernel may not do")

    def build(self, solution: Solution, *, packs: bool) -> tuple[Outcome, bytes]:
        """G1."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            try:
                built = build(solution, Path(temporary).absolute() / "sources", self.toolchain, self.runner)
                content = built.content()
            except BuildFailed as error:
                return failed(Gate.G1_BUILD, TraceStatus.COMPILE_ERROR, str(error)[:1500]), b""
        try:
            inspect_library(content, packs=packs, isa=solution_isa(solution))
            reasons = state(content)
        except LibraryRefused as error:
            reasons = list(error.reasons)
        if reasons:
            text = "the library was refused: " + "; ".join(reasons[:5])
            return failed(Gate.G1_BUILD, TraceStatus.REWARD_HACK, text, reasons=reasons), b""
        evidence: dict[str, Any] = {
            "artifact": built.digest,
            "bytes": len(content),
            "toolchain": self.toolchain.digest,
        }
        return passed(Gate.G1_BUILD, "builds, and the library holds code alone", **evidence), content
