"""What a kernel's library may contain, read from its ELF image before anything loads it.

Only what the dynamic loader itself reads is trusted: program headers and the dynamic section, never section headers.
"""

import re
from collections.abc import Iterable

from polymorph.kernels.elf import (
    EM_AARCH64,
    EM_X86_64,
    PF_W,
    PF_X,
    PT_GNU_STACK,
    PT_INTERP,
    PT_LOAD,
    PT_TLS,
    Dynamic,
    Image,
    MalformedElf,
    Symbol,
)
from polymorph.kernels.isa import Isa

ALLOWED_IMPORTS = frozenset({"memcpy", "memset", "memmove"})
ALLOWED_EXPORTS = frozenset({"pm_run", "pm_pack", "pm_pack_bytes"})

_RUNS_AT_LOAD = (
    Dynamic.INIT,
    Dynamic.FINI,
    Dynamic.INIT_ARRAY,
    Dynamic.FINI_ARRAY,
    Dynamic.PREINIT_ARRAY,
)
_LOADER_PATHS = (
    Dynamic.RPATH,
    Dynamic.RUNPATH,
    Dynamic.AUDIT,
    Dynamic.DEPAUDIT,
    Dynamic.AUXILIARY,
    Dynamic.FILTER,
)
# Found at any offset, since a jump into a constant runs its bytes. Aligned words only on AArch64, but as cheap to refuse.
_FORBIDDEN_CODE = {
    EM_X86_64: {
        "syscall": rb"\x0f\x05",
        "sysenter": rb"\x0f\x34",
        "int 0x80": rb"\xcd\x80",
        "rdtsc": rb"\x0f\x31",
        "rdpmc": rb"\x0f\x33",
        "rdtscp": rb"\x0f\x01\xf9",
        "rdrand or rdseed": rb"\x0f\xc7[\xf0-\xff]",
        "wrfsbase or wrgsbase": rb"\xf3[\x40-\x4f]?\x0f\xae[\xd0-\xdf]",
    },
    # Little-endian words; the lowest five bits of a move from or to a system register name the other register.
    EM_AARCH64: {
        "svc": rb"[\x01\x21\x41\x61\x81\xa1\xc1\xe1][\x00-\xff][\x00-\x1f]\xd4",
        "a read of cntpct or cntvct": rb"[\x20-\x5f\xa0-\xdf]\xe0\x3b\xd5",
        "a read of pmccntr": rb"[\x00-\x1f]\x9d\x3b\xd5",
        "a read of rndr": rb"[\x00-\x3f]\x24\x3b\xd5",
        "a write of tpidr": rb"[\x40-\x5f]\xd0\x1b\xd5",
    },
}
_STT_FUNC = 2
_STT_GNU_IFUNC = 10
_IRELATIVE = {EM_X86_64: 37, EM_AARCH64: 1032}


class LibraryRefused(ValueError):
    """A library that a worker must not load, with every reason found."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("library refused: " + "; ".join(self.reasons))


def inspect_library(content: bytes, *, packs: bool, isa: Isa = Isa.GENERIC) -> None:
    """Returns where the library keeps the rules; `packs` tells whether it must export pm_pack and pm_pack_bytes.

    Raises:
        LibraryRefused: it does not keep them, or it is no well-formed shared library.
    """
    try:
        image = Image(content)
        reasons = [
            *_machine(image, isa),
            *_segments(image),
            *_code(image),
            *_dynamic(image),
            *_relocations(image),
            *_symbols(image.symbols(), packs=packs),
        ]
    except MalformedElf as error:
        raise LibraryRefused([str(error)]) from error
    if reasons:
        raise LibraryRefused(reasons)


def holds_forbidden_code(content: bytes) -> bool:
    """Whether its code has bytes that a kernel may not have, wherever they come from; False for what is no library."""
    try:
        return any(True for _ in _code(Image(content)))
    except MalformedElf:
        return False


def _machine(image: Image, isa: Isa) -> Iterable[str]:
    wanted = {EM_AARCH64} if isa is Isa.NEON else {EM_X86_64}
    if isa is Isa.GENERIC:
        wanted = {EM_X86_64, EM_AARCH64}
    if image.machine not in wanted:
        yield f"machine {image.machine} does not fit ISA {isa.name}"


def _segments(image: Image) -> Iterable[str]:
    stacks = [segment for segment in image.segments if segment.type == PT_GNU_STACK]
    if not stacks:
        yield "no PT_GNU_STACK: the loader would make the stack executable"
    if any(stack.flags & PF_X for stack in stacks):
        yield "executable stack"
    for segment in image.segments:
        if segment.type == PT_LOAD and segment.flags & PF_W and segment.flags & PF_X:
            yield "a segment that is writable and executable"
        if segment.type == PT_INTERP:
            yield "a program interpreter: it is an executable"
        if segment.type == PT_TLS:
            yield "thread-local storage: a kernel keeps no state"


def _code(image: Image) -> Iterable[str]:
    for code in image.executable():
        for name, pattern in _FORBIDDEN_CODE.get(image.machine, {}).items():
            found = re.search(pattern, code, re.DOTALL)
            if found:
                yield (
                    f"bytes of {name} at {found.start():#x} of its code: a kernel needs none; where they came by chance, "
                    f"in a constant or an offset, change the constant or the order of the code"
                )


def _dynamic(image: Image) -> Iterable[str]:
    for library in image.needed():
        yield f"needs library {library}: a kernel needs none"
    for tag in _RUNS_AT_LOAD:
        if tag in image.dynamic:
            yield f"{tag.name}: code that runs when it is loaded or unloaded"
    for tag in _LOADER_PATHS:
        if tag in image.dynamic:
            yield f"{tag.name}: it steers the loader"
    if Dynamic.TEXTREL in image.dynamic:
        yield "TEXTREL: relocations in code"


def _relocations(image: Image) -> Iterable[str]:
    for relocation in image.relocations():
        if relocation.type == _IRELATIVE.get(image.machine):
            yield "IFUNC: a relocation that runs code when it is loaded"
        if relocation.symbol >= len(image.symbols()):
            yield f"a relocation against symbol {relocation.symbol}, beyond the symbol table"


def _symbols(symbols: tuple[Symbol, ...], *, packs: bool) -> Iterable[str]:
    exported = {symbol.name: symbol for symbol in symbols if symbol.name and symbol.defined}
    for symbol in symbols:
        if symbol.type == _STT_GNU_IFUNC:
            yield f"IFUNC {symbol.name}: a symbol that runs code when it is bound"
        if symbol.name and not symbol.defined and symbol.name not in ALLOWED_IMPORTS:
            yield f"imports {symbol.name}: only {', '.join(sorted(ALLOWED_IMPORTS))} are allowed"
        if symbol.name and symbol.defined and symbol.name not in ALLOWED_EXPORTS:
            yield f"exports {symbol.name}: only {', '.join(sorted(ALLOWED_EXPORTS))} are allowed"
    for name in sorted(ALLOWED_EXPORTS if packs else {"pm_run"}):
        if name not in exported:
            yield f"does not export {name}"
        elif exported[name].type != _STT_FUNC:
            yield f"exports {name}, which is no function"
