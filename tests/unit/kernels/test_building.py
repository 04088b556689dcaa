"""Building solutions: deterministic, fenced in, and through the runner that is given."""

import platform
from collections.abc import Sequence
from pathlib import Path

import pytest

from polymorph.kernels.build import BuildFailed, build, compile_command, tier_flags, write_sources
from polymorph.kernels.inspect import inspect_library
from polymorph.kernels.isa import Isa
from polymorph.kernels.layout import layout_digest
from polymorph.kernels.schema import Solution, SolutionExtension, SourceFile
from polymorph.kernels.toolchain import Completed, NoCompiler, detect_toolchain, run_command

SOURCE = (
    '#include "polymorph_kernel.h"\n'
    'extern "C" int32_t pm_run(const pm_context *, const pm_tensor *, int32_t, const pm_tensor *, int32_t) {\n'
    "  return 0;\n}\n"
)


def solution(*sources: SourceFile, **extension: object) -> Solution:
    return Solution(
        name="s",
        definition="gemm_n8_k8_f32",
        author="test",
        spec={},
        sources=sources or (SourceFile(path="kernel.cpp", content=SOURCE),),
        x_polymorph=SolutionExtension.model_validate(extension),
    )


def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    toolchain = detect_toolchain()
    first = build(solution(), tmp_path / "a", toolchain, run_command)
    second = build(solution(), tmp_path / "elsewhere" / "b", toolchain, run_command)
    assert first.content() == second.content()
    assert first.digest == second.digest
    inspect_library(first.content(), packs=False)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/x.cpp",
        "../x.cpp",
        "a/../../x.cpp",
        "-x.cpp",
        "@x.cc",
        "",
        ".",
        "a//b.cc",
        "a/",
        "a b.cc",
        "a\0.cc",
        "x" * 101,
        "é.cc",
        "a\n",
    ],
)
def test_a_source_stays_inside_its_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(BuildFailed, match="inside the solution"):
        build(solution(SourceFile(path=path, content=SOURCE)), tmp_path, detect_toolchain(), run_command)


def test_sources_are_few_and_have_paths_of_their_own(tmp_path: Path) -> None:
    many = [SourceFile(path=f"{index}.cc", content="") for index in range(33)]
    twice = [SourceFile(path="kernel.cpp", content=SOURCE)] * 2
    both = [SourceFile(path="a", content=""), SourceFile(path="a/b.h", content="")]
    for sources, why in ((many, "at most 32"), (twice, "the same path"), (both, "cannot be written")):
        with pytest.raises(BuildFailed, match=why):
            build(solution(*sources), tmp_path, detect_toolchain(), run_command)


def test_a_source_is_named_as_a_file_to_the_compiler() -> None:
    assert "./kernel.cpp" in compile_command(solution(), detect_toolchain())


def test_the_abi_header_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="reserved"):
        build(
            solution(SourceFile(path="polymorph_kernel.h", content="")),
            tmp_path,
            detect_toolchain(),
            run_command,
        )


def test_the_compiler_is_quoted_where_it_refuses(tmp_path: Path) -> None:
    broken = solution(SourceFile(path="kernel.cpp", content="int pm_run( {"))
    with pytest.raises(BuildFailed, match="error"):
        build(broken, tmp_path, detect_toolchain(), run_command)


def test_the_runner_that_is_given_runs_the_compiler(tmp_path: Path) -> None:
    seen: list[tuple[Sequence[str], Path]] = []

    def refuse(command: Sequence[str], folder: Path) -> Completed:
        seen.append((command, folder))
        return Completed(0)

    toolchain = detect_toolchain()
    with pytest.raises(BuildFailed, match=r"left no kernel\.so"):
        build(solution(), tmp_path, toolchain, refuse)
    assert seen == [(compile_command(solution(), toolchain), tmp_path)]


def test_a_tier_has_the_flags_of_those_below_it() -> None:
    assert tier_flags(Isa.GENERIC) == ()
    assert set(tier_flags(Isa.AVX2)) < set(tier_flags(Isa.AVX512_BF16))
    assert "-mavx512bf16" not in tier_flags(Isa.AVX512)
    assert tier_flags(Isa.NEON) == ()


def test_an_unknown_tier_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SSE9"):
        build(solution(isa="SSE9"), tmp_path, detect_toolchain(), run_command)


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(NoCompiler, match="no-such-compiler is not on PATH"):
        detect_toolchain("no-such-compiler")


def test_the_layout_is_decided_by_its_source_alone() -> None:
    layout = SourceFile(path="layout.h", content="// columns")
    one = solution(SourceFile(path="kernel.cpp", content="// a"), layout, layout_source="layout.h")
    two = solution(SourceFile(path="kernel.cpp", content="// b"), layout, layout_source="layout.h")
    other = solution(SourceFile(path="layout.h", content="// rows"), layout_source="layout.h")
    assert layout_digest(one) == layout_digest(two) != layout_digest(other)
    assert layout_digest(solution()) is None
    with pytest.raises(ValueError, match=r"gone\.h"):
        layout_digest(solution(layout_source="gone.h"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_a_jump_whose_length_is_a_system_call_by_chance_gets_another_length(tmp_path: Path) -> None:
    def jumping(over: int) -> Solution:
        content = SOURCE.replace(
            "  return 0;", f'  static volatile int v; if (v) asm volatile(".skip {over}, 0x90"); return v;'
        )
        return solution(SourceFile(path="kernel.cpp", content=content))

    toolchain = detect_toolchain()
    for over in range(0x050F, 0x050F - 64, -1):
        folder = tmp_path / str(over)
        folder.mkdir()
        write_sources(jumping(over).sources, folder)
        run_command(compile_command(jumping(over), toolchain), folder)
        if b"\x0f\x05" in (folder / "kernel.so").read_bytes():
            break
    else:
        pytest.fail("no jump had that length")
    built = build(jumping(over), tmp_path / "built", toolchain, run_command)
    inspect_library(built.content(), packs=False)
    assert built.digest == build(jumping(over), tmp_path / "again", toolchain, run_command).digest
