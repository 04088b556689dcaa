"""Each rule of kernels.inspect, with a library that breaks it."""

import platform
import subprocess
from pathlib import Path

import pytest

from polymorph.kernels.inspect import LibraryRefused, inspect_library

RUN = 'extern "C" int pm_run(void) { return 0; }\n'
PLAIN = ("-shared", "-fPIC", "-nostdlib", "-ffreestanding", "-Wl,--hash-style=sysv")


def library(folder: Path, source: str, *flags: str) -> bytes:
    (folder / "kernel.cpp").write_text(source)
    command = ["g++", *PLAIN, *flags, "kernel.cpp", "-o", "kernel.so"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "kernel.so").read_bytes()


def test_a_plain_library_passes(tmp_path: Path) -> None:
    inspect_library(library(tmp_path, RUN), packs=False)


def test_the_three_allowed_imports_pass(tmp_path: Path) -> None:
    source = (
        'extern "C" void *memcpy(void *, const void *, unsigned long);\n'
        'extern "C" int pm_run(char *a, char *b) { memcpy(a, b, 99); return 0; }\n'
    )
    inspect_library(library(tmp_path, source), packs=False)


@pytest.mark.parametrize(
    ("source", "flags", "reason"),
    [
        (
            'extern "C" int system(const char *);\nextern "C" int pm_run() { return system("x"); }',
            (),
            "imports system",
        ),
        (
            'extern "C" int pm_run() { return 0; }\nextern "C" void *malloc(unsigned long) { return 0; }',
            (),
            "exports malloc",
        ),
        (RUN + "int global;\nstruct S { S() { global = 1; } } s;", ("-Wl,-z,norelro",), "INIT_ARRAY"),
        (RUN + '__attribute__((destructor)) static void last() { asm volatile(""); }', (), "FINI_ARRAY"),
        (RUN + 'extern "C" void begin() { asm volatile(""); }', ("-Wl,-init=begin",), "INIT:"),
        (RUN, ("-Wl,--no-as-needed", "-lc"), "needs library libc.so.6"),
        (RUN, ("-Wl,-z,execstack",), "executable stack"),
        (RUN, ("-Wl,-rpath,/tmp",), "steers the loader"),
        (
            (
                'static int one() { return 1; }\nextern "C" { static int (*pick())() { return one; }\n'
                'int pm_run() __attribute__((ifunc("pick"))); }'
            ),
            (),
            "IFUNC",
        ),
        (
            RUN + "thread_local int kept;\nint *where() { return &kept; }",
            ("-fvisibility=hidden",),
            "thread-local",
        ),
        ('extern "C" int pm_walk() { return 0; }', (), "does not export pm_run"),
        ('extern "C" { int pm_run = 0; }', (), "no function"),
    ],
)
def test_a_violating_library_is_refused(
    tmp_path: Path, source: str, flags: tuple[str, ...], reason: str
) -> None:
    content = library(tmp_path, source, *flags)
    with pytest.raises(LibraryRefused, match=reason):
        inspect_library(content, packs=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="bytes of x86-64 code")
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("0x0f, 0x05", "syscall"),
        ("0xb8, 0x0f, 0x05, 0, 0", "syscall"),
        ("0x0f, 0x34", "sysenter"),
        ("0xcd, 0x80", "int 0x80"),
        ("0x0f, 0x31", "rdtsc"),
        ("0x0f, 0x33", "rdpmc"),
        ("0x0f, 0x01, 0xf9", "rdtscp"),
        ("0x0f, 0xc7, 0xf0", "rdrand"),
        ("0xf3, 0x48, 0x0f, 0xae, 0xd0", "wrfsbase"),
        ("0xf3, 0x0f, 0xae, 0xd8", "wrgsbase"),
    ],
)
def test_bytes_of_a_forbidden_instruction_are_refused_at_any_offset(
    tmp_path: Path, code: str, name: str
) -> None:
    source = f'extern "C" int pm_run() {{ asm volatile(".byte 0x90, {code}"); return 0; }}'
    with pytest.raises(LibraryRefused, match=f"bytes of .*{name}"):
        inspect_library(library(tmp_path, source), packs=False)


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the compiler's own code must be of another machine"
)
@pytest.mark.parametrize(
    ("word", "name"),
    [
        (0xD4000001, "svc"),
        (0xD53BE040, "cntvct"),
        (0xD53BE05F, "cntvct"),
        (0xD53BE020, "cntpct"),
        (0xD53BE0C1, "cntvct"),
        (0xD53BE0A0, "cntpct"),
        (0xD53B9D03, "pmccntr"),
        (0xD53B2400, "rndr"),
        (0xD53B2422, "rndr"),
        (0xD51BD040, "tpidr"),
    ],
)
def test_words_of_a_forbidden_aarch64_instruction_are_refused(tmp_path: Path, word: int, name: str) -> None:
    source = f'extern "C" int pm_run() {{ asm volatile(".balign 4; .long {word:#x}"); return 0; }}'
    with pytest.raises(LibraryRefused, match=f"bytes of .*{name}"):
        inspect_library(_as_aarch64(library(tmp_path, source)), packs=False)


def test_harmless_aarch64_words_pass(tmp_path: Path) -> None:
    """A read of tpidr (thread pointer), a fused multiply-add, a return."""
    source = 'extern "C" int pm_run() { asm volatile(".balign 4; .long 0xd53bd040, 0x4e22cc20, 0xd65f03c0"); return 0; }'
    inspect_library(_as_aarch64(library(tmp_path, source)), packs=False)


def _as_aarch64(content: bytes) -> bytes:
    return content[:18] + (183).to_bytes(2, "little") + content[20:]


def test_the_same_bytes_in_data_are_only_data(tmp_path: Path) -> None:
    data = '__attribute__((visibility("hidden"), used)) extern const unsigned char kept[] = {0x0f, 0x05};'
    content = library(tmp_path, RUN + data, "-Wl,-z,separate-code")
    assert b"\x0f\x05" in content
    inspect_library(content, packs=False)


def test_a_packing_kernel_must_export_its_packing(tmp_path: Path) -> None:
    with pytest.raises(LibraryRefused, match=r"does not export pm_pack; does not export pm_pack_bytes"):
        inspect_library(library(tmp_path, RUN), packs=True)


def test_an_executable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "main.cpp").write_text("int main() {}")
    subprocess.run(["g++", "-no-pie", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    with pytest.raises(LibraryRefused, match="not a shared library"):
        inspect_library((tmp_path / "main").read_bytes(), packs=False)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"MZ" * 100])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(LibraryRefused):
        inspect_library(content, packs=False)


def test_every_truncation_is_refused_not_crashed(tmp_path: Path) -> None:
    content = library(tmp_path, RUN)
    for length in range(0, 2048, 61):
        with pytest.raises(LibraryRefused):
            inspect_library(content[:length], packs=False)


def test_a_flipped_byte_never_crashes_the_reader(tmp_path: Path) -> None:
    content = library(tmp_path, RUN)
    for at in range(0, min(len(content), 4096), 3):
        changed = bytearray(content)
        changed[at] ^= 0xFF
        try:
            inspect_library(bytes(changed), packs=False)
        except LibraryRefused:
            continue
