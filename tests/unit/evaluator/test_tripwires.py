import pytest

from polymorph.evaluator.domain.tripwires import tripped
from polymorph.kernels.schema import BuildSpec, Solution, SourceFile


def reasons(content: str, path: str = "kernel.cpp") -> str:
    solution = Solution(
        name="s",
        definition="d",
        author="t",
        spec=BuildSpec(),
        sources=(SourceFile(path=path, content=content), SourceFile(path="layout.h", content="")),
    )
    return "; ".join(tripped(solution))


@pytest.mark.parametrize(
    "text",
    [
        '#include "polymorph_kernel.h"',
        '#include "layout.h"\n#include <stdint.h>\n#include <immintrin.h>',
        "static inline float f(float x) { return x; }",
        "static const float table[4] = {1, 2, 3, 4};",
        "static constexpr int width = 8;",
        "template <int ROWS> static void block(int row) {}",
        "// asm, fork() and rdtsc are only named in a comment\nint x;",
        "struct call { const float *x; };  /* time(0) */",
    ],
)
def test_honest_sources_pass(text: str) -> None:
    assert reasons(text) == ""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('__asm__("nop");', "inline assembler"),
        ('a\\\nsm("nop");', "inline assembler"),
        ('as/**/m; asm/**/("nop");', "inline assembler"),
        ("unsigned long t = __rdtsc();", "reads a clock"),
        ("#pragma omp parallel", "threads of its own"),
        ('#pragma GCC optimize("fast-math")', "compiler's options"),
        ('__attribute__((ifunc("pick"))) void f();', "runs or places code"),
        ("[[gnu::constructor]] void f() {}", "runs or places code"),
        ("#include <stdio.h>", "includes 'stdio.h'"),
        ("#include HEADER", "includes 'HEADER'"),
        ('#  include "../secret.h"', "includes '../secret.h'"),
        ("#define JOIN(a, b) a##b", "pastes tokens"),
        ("static float cache[16];", "no state"),
        ("void f() { static int calls = 0; }", "no state"),
        ("thread_local int x;", "no state"),
        ("int *p = new int[4];", "allocates memory"),
        ("_mm_setcsr(0);", "control word"),
        ("__builtin_return_address(0);", "frames"),
        ('__builtin_cpu_supports("avx2");', "context->isa"),
        ("hx_batch();", "evaluator's own code"),
    ],
)
def test_a_wire_trips_with_what_to_do_instead(text: str, word: str) -> None:
    assert word in reasons(text)


def test_a_reason_names_file_and_line() -> None:
    assert reasons('int a;\n/* two\nlines */\n__asm__("nop");').startswith("kernel.cpp:4:")


def test_too_much_source_is_refused() -> None:
    assert "at most" in reasons("//" + "x" * 300_000)
