"""From a solution's sources to a shared library, the same bytes every time."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polymorph.kernels.inspect import holds_forbidden_code
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
# The length of a jump may be the bytes of a system call by chance, in one kernel of some hundred. Other lengths follow.
_MOVES: tuple[tuple[str, ...], ...] = ((), ("-falign-labels=16",), ("-falign-labels=32",))
_TIER = {
    Isa.GENERIC: (),
    Isa.AVX2: ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    Isa.AVX512: ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    Isa.AVX512_BF16: ("-mavx512bf16",),
    Isa.NEON: (),
}
# Anything else in a name may mean something to a compiler, a linker or a file system: `@x.cc` is a file of options.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_LONGEST_NAME = 100
_MOST_SOURCES = 32
MOST_SOURCE_BYTES = 1 << 20
"""All sources of a solution together; a kernel has a few thousand."""

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
    units = [f"./{source.path}" for source in solution.sources if source.path.endswith((".cpp", ".cc"))]
    if not units:
        raise BuildFailed(f"solution {solution.name} has no .cpp source")
    # Contraction to FMA is what the incumbent's libraries do as well, and never loses precision against two roundings.
    flags = (*_COMPILE, "-ffp-contract=fast", *tier_flags(solution_isa(solution)))
    return [toolchain.compiler, *flags, "-I.", *units, "-o", LIBRARY, *_LINK]


def write_sources(sources: Sequence[SourceFile], folder: Path) -> None:
    """Writes the sources, the ABI header and the list of exports.

    Raises:
        BuildFailed: a name that is not plain, stands twice or takes the place of a file of ours; too many sources; or
            sources that cannot be written (a file that is a folder too, say).
    """
    ours = {ABI_HEADER.name: ABI_HEADER.read_text(), "exports.map": _EXPORTS}
    if len(sources) > _MOST_SOURCES:
        raise BuildFailed(f"{len(sources)} sources: at most {_MOST_SOURCES}")
    size = sum(len(source.content) for source in sources)
    if size > MOST_SOURCE_BYTES:
        raise BuildFailed(f"sources of {size} characters: at most {MOST_SOURCE_BYTES}")
    if len({source.path for source in sources}) < len(sources):
        raise BuildFailed("two sources have the same path")
    for source in sources:
        _check_name(source.path, {*ours, LIBRARY})
        target = folder / source.path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.content)
        except (OSError, ValueError) as error:
            raise BuildFailed(f"source {source.path!r} cannot be written: {error}") from error
    for name, content in ours.items():
        (folder / name).write_text(content)


def _check_name(path: str, reserved: set[str]) -> None:
    if len(path) > _LONGEST_NAME or not _NAME.fullmatch(path):
        raise BuildFailed(
            f"source path {path[: 2 * _LONGEST_NAME]!r} must lie inside the solution, in at most {_LONGEST_NAME} "
            f"letters, digits and _ . - /, each part beginning with a letter, a digit or _"
        )
    if path.split("/", maxsplit=1)[0] in reserved:
        raise BuildFailed(f"source path {path!r} is reserved")


def build(solution: Solution, folder: Path, toolchain: Toolchain, runner: CommandRunner) -> BuiltLibrary:
    """Compiles a solution in `folder` (made where absent) with `runner`, which may be a sandbox. Equal solutions give equal
    bytes.

    Raises:
        BuildFailed: the sources do not compile, or no library came out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_sources(solution.sources, folder)
    library = folder / LIBRARY
    command = compile_command(solution, toolchain)
    for moved in _MOVES:
        library.unlink(missing_ok=True)
        done = runner([*command, *moved], folder)
        log = (done.stdout + done.stderr)[:4000]
        if done.returncode != 0:
            raise BuildFailed(f"{solution.name}: the compiler ended with {done.returncode}: {log}")
        if not library.is_file() or library.is_symlink():
            raise BuildFailed(f"{solution.name}: the compiler left no {LIBRARY}: {log}")
        content = library.read_bytes()
        if not holds_forbidden_code(content):
            break  # where it stays, whoever inspects the library says so
    return BuiltLibrary(path=library, digest=hashlib.sha256(content).hexdigest(), log=log)
