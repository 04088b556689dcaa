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
        "extern \"C\" int32_t f();\nchar c = '\"', d = '\\'';  // it's \u00d7",
        "#pragma once\n#pragma GCC unroll 8\nfloat f = 1.5e+3f; int a[2]; a[0] = 0x1e+1;",
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
        ("#include <stdio.h>", "includes <stdio.h>"),
        ("#include HEADER", "includes HEADER"),
        ('#define X "/usr/include/stdio.h"\n#include X', "includes X"),
        ('#  include "../secret.h"', 'includes "../secret.h"'),
        ("#include <layout.h>", "includes <layout.h>"),
        ("%:include <stdio.h>", "includes <stdio.h>"),
        ("#/*\n*/include <stdio.h>", "includes <stdio.h>"),
        ("#include_next <stdint.h>", "includes <stdint.h>"),
        ("#if __has_include(</*>)\nasm();  // */\n#endif", "which files there are"),
        ('const char a[] = "/*"; __asm__("nop"); const char b[] = "*/";', "inline assembler"),
        ('const char a[] = "\\"/*"; __asm__("nop"); const char b[] = "*/";', "inline assembler"),
        ("char a = '\"'; __asm__(\"nop\"); char b = '\"';", "inline assembler"),
        ('const char *a = "//"; __asm__("nop");', "inline assembler"),
        ('const char *a = R"(/*)"; asm(); const char *b = R"(*/)";', "a raw string"),
        ('const char *a = u8R"(/*)";', "a raw string"),
        ("// what??/\nasm();", "a trigraph"),
        ("??=include <stdio.h>", "a trigraph"),
        ('a\\ \nsm("nop");', "inline assembler"),
        ("int \\u0061sm;", "a backslash outside"),
        ("#if 0\ndon't /*\n#endif\nasm(); // */", "a quote without its partner"),
        ("#define Z 1'\"'/*\"\nasm(); // */", "a quote in a number"),
        ("int a; /* asm()", "a comment without an end"),
        ("int a;\rasm();", "a control character"),
        ("int b\u00e9;", "beyond ASCII"),
        ("#define JOIN(a, b) a %:%: b", "pastes tokens"),
        ('#pragma push_macro("x")', "a pragma"),
        ("__attribute__((__constructor__)) void f();", "runs or places code"),
        ("<:<:using gnu: constructor:>:> void f();", "runs or places code"),
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
