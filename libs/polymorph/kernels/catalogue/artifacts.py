"""Kernels of the catalogue as libraries on this machine: built once, named by their content."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymorph.config.folders import cache_folder
from polymorph.kernels.build import build, solution_isa
from polymorph.kernels.catalogue import solutions
from polymorph.kernels.inspect import inspect_library
from polymorph.kernels.isa import Isa, detect_isa
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.schema import Definition, Solution
from polymorph.kernels.toolchain import CommandRunner, Toolchain, detect_toolchain, run_command


@dataclass(frozen=True)
class Artifact:
    """A built kernel; `digest` is the sha256 of the library, `layout` the packing of its weights."""

    solution: Solution
    path: Path
    digest: str
    layout: str | None

    @property
    def label(self) -> str:
        """What tells this variant from the others of its definition."""
        return self.solution.name.removeprefix(f"{self.solution.definition}-")

    def binding(self, min_m: int = 1, max_m: int = 1 << 30, **feature: int) -> dict[str, Any]:
        """As `slots_engage` takes it."""
        return {
            "definition": self.solution.definition,
            "min_m": min_m,
            "max_m": max_m,
            "path": str(self.path),
            "artifact": self.digest,
            "layout": self.layout,
            **feature,
        }


def artifacts(
    definition: Definition,
    isa: Isa | None = None,
    folder: Path | None = None,
    runner: CommandRunner = run_command,
    most: int | None = None,
) -> tuple[Artifact, ...]:
    """The kernels that the catalogue has for an operation on a machine of this tier, the first `most` of them, built in the
    cache and inspected.

    Raises:
        BuildFailed: one does not compile.
        LibraryRefused: one breaks the rules for libraries.
    """
    tier = detect_isa() if isa is None else isa
    place = (folder or cache_folder()) / "catalogue"
    toolchain = detect_toolchain()
    return tuple(built(each, place, toolchain, runner) for each in solutions(definition, tier)[:most])


def built(solution: Solution, place: Path, toolchain: Toolchain, runner: CommandRunner) -> Artifact:
    """A solution as a library in the folder `place`, compiled and inspected where it is not there yet; raises likewise."""
    layout = layout_digest(solution)
    known = place / f"{solution.digest()}-{toolchain.digest}"
    if known.exists():
        digest = known.read_text()
        path = place / f"{digest}.so"
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            return Artifact(solution, path, digest, layout)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        made = build(solution, Path(folder), toolchain, runner)
        inspect_library(made.content(), packs=layout is not None, isa=solution_isa(solution))
        path = made.path.replace(place / f"{made.digest}.so")
        (Path(folder) / "known").write_text(made.digest)
        (Path(folder) / "known").replace(known)
    return Artifact(solution, path, made.digest, layout)
