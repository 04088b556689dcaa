"""From a solution's sources to a shared library, the same bytes every time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from polymorph.kernels.isa import Isa
from polymorph.kernels.schema import Solution, SourceFile
from polymorph.kernels.toolchain import CommandRunner, Toolchain

ABI_HEADER = Path(__file__).parent / "abi" / "polymorph_kernel.h"
LIBRARY = "kernel.so"

_COMPILE = (
    "-O3",
    "-std=c++17",
    "-ffreestanding",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fno-gnu-unique",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-semantic-interposition",
    "-fPIC",
    "-Wall",
)
_LINK = (
    "-shared",
    "-nostdlib",
    "-Wl,--build-id=none",
    "-Wl,--hash-style=sysv",
    "-Wl,-Bsymbolic",
    "-Wl,-z,noexecstack",
    "-Wl,-z,relro",
    "-Wl,-z,now",
    "-Wl,--version-script=exports.map",
    "-s",
)
_TIER = {
    Isa.GENERIC: (),
    Isa.AVX2: ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    Isa.AVX512: ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    Isa.AVX512_BF16: ("-mavx512bf16",),
    Isa.NEON: (),
}
_EXPORTS = "{ global: pm_run; pm_pack; pm_pack_bytes; local: *; };\n"


class BuildFailed(RuntimeError):
    """The sources do not compile; the text is the head of what the compiler said."""


@dataclass(frozen=True)
class BuiltLibrary:
    """A shared library and the sha256 of its bytes."""

    path: Path
    digest: str
    log: str

    def content(self) -> bytes:
        return self.path.read_bytes()


def tier_flags(isa: Isa) -> tuple[str, ...]:
    """The compiler flags of a tier and of those below it."""
    tiers = [tier for tier in _TIER if isa.runs(tier)]
    return tuple(flag for tier in tiers for flag in _TIER[tier])


def solution_isa(solution: Solution) -> Isa:
    """The tier that a solution names.

    Raises:
        ValueError: there is no such tier.
    """
    name = solution.x_polymorph.isa
    if name not in Isa.__members__:
        raise ValueError(f"solution {solution.name} needs ISA {name!r}: one of {', '.join(Isa.__members__)}")
    return Isa[name]


def compile_command(solution: Solution, toolchain: Toolchain) -> list[str]:
    """The command, relative to the folder that `write_sources` filled; equal solutions give equal commands."""
    units = [source.path for source in solution.sources if source.path.endswith((".cpp", ".cc"))]
    if not units:
        raise BuildFailed(f"solution {solution.name} has no .cpp source")
    # Contraction to FMA is what the incumbent's libraries do as well, and never loses precision against two roundings.
    flags = (*_COMPILE, "-ffp-contract=fast", *tier_flags(solution_isa(solution)))
    return [toolchain.compiler, *flags, "-I.", *units, "-o", LIBRARY, *_LINK]


def write_sources(sources: Sequence[SourceFile], folder: Path) -> None:
    """Writes the sources, the ABI header and the list of exports.

    Raises:
        BuildFailed: a path leaves the folder or takes the place of a file of ours.
    """
    ours = {ABI_HEADER.name: ABI_HEADER.read_text(), "exports.map": _EXPORTS}
    for source in sources:
        path = PurePosixPath(source.path)
        if path.is_absolute() or ".." in path.parts or source.path.startswith("-"):
            raise BuildFailed(f"source path {source.path!r} must lie inside the solution")
        if source.path in ours:
            raise BuildFailed(f"source path {source.path!r} is reserved")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.content)
    for name, content in ours.items():
        (folder / name).write_text(content)


def build(solution: Solution, folder: Path, toolchain: Toolchain, runner: CommandRunner) -> BuiltLibrary:
    """Compiles a solution in `folder` (made where absent) with `runner`, which may be a sandbox.

    Raises:
        BuildFailed: the sources do not compile, or no library came out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_sources(solution.sources, folder)
    library = folder / LIBRARY
    library.unlink(missing_ok=True)
    done = runner(compile_command(solution, toolchain), folder)
    log = (done.stdout + done.stderr)[:4000]
    if done.returncode != 0:
        raise BuildFailed(f"{solution.name}: the compiler ended with {done.returncode}: {log}")
    if not library.is_file() or library.is_symlink():
        raise BuildFailed(f"{solution.name}: the compiler left no {LIBRARY}: {log}")
    return BuiltLibrary(path=library, digest=hashlib.sha256(library.read_bytes()).hexdigest(), log=log)
