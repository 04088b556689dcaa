"""Gate G0: words that no honest kernel needs. A tripwire only: what evades it meets the sandbox and the library's
inspection.
"""

import re

from polymorph.evaluator.domain.tokens import code_of
from polymorph.kernels.schema import Solution

_MOST_BYTES = 200_000
_HEADERS = frozenset(
    {
        "stddef.h", "stdint.h", "cstddef", "cstdint", "float.h", "limits.h", "immintrin.h", "x86intrin.h",
        "xmmintrin.h", "emmintrin.h", "arm_neon.h", "arm_bf16.h", "arm_acle.h", "polymorph_kernel.h",
    }
)  # fmt: skip
_WIRES = (
    (r"\b(?:__)?asm(?:__)?\b", "inline assembler: use intrinsics"),
    (r"\bsyscall\b|\bint\s*0x80\b", "a system call: a kernel makes none"),
    (r"#\s*pragma\s+omp|_Pragma|\bomp_\w+|\bpthread_\w+|\bstd::thread\b|\bclone3?\s*\(", "threads of its own: use context->parallel_for"),
    (r"#\s*pragma\s+GCC\s+(?:optimize|target|push_options)", "changes the compiler's options: name the tier in `isa`"),
    (r"#\s*pragma\b(?!\s+(?:once|omp|GCC\s+(?:unroll|ivdep|diagnostic|optimize|target|push_options))\b)", "a pragma: only once and GCC unroll, ivdep and diagnostic"),
    (r"__attribute__\s*\(\([^)]*\b_*(?:constructor|destructor|ifunc|section|alias|weak|cleanup)_*\b", "an attribute that runs or places code by itself"),
    (r"\[\[[^\]]*\b_*(?:constructor|destructor|ifunc|section|alias|weak|cleanup)_*\b", "an attribute that runs or places code by itself"),
    (r"\b_*(?:con|de)structor_*\b\s*(?:\(|\))", "code that runs when it is loaded"),
    (r"__builtin_(?:ia32_)?rdtscp?\b|\b_*rdtscp?\b|\b_rdpmc\b|\b__builtin_readcyclecounter\b|\bcntvct", "reads a clock: a kernel must not know the time"),
    (r"\bclock\w*\s*\(|\bgettimeofday\b|\btime\s*\(", "reads a clock: a kernel must not know the time"),
    (r"\b(?:fopen|fork|vfork|execv\w*|system|socket|connect|mmap|mprotect|dlopen|dlsym|getenv|environ|exit|abort|_exit|raise|kill)\s*\(", "calls the operating system: a kernel makes no such call"),
    (r"\b(?:malloc|calloc|realloc|free|alloca)\s*\(|\bnew\b\s*[\w(\[]|\bdelete\b", "allocates memory: use context->scratch"),
    (r"\b_mm_setcsr\b|\b_MM_SET_\w+|\bfesetround\b|\b__builtin_ia32_ldmxcsr\b", "changes the floating-point control word"),
    (r"\bthread_local\b|\b__thread\b", "thread-local state: a kernel keeps no state"),
    (r"\bhx_\w+|\bpm_context_\w*create", "names the evaluator's own code"),
    (r"\bvolatile\b", "volatile: there is nothing to wait for in a kernel"),
    (r"\bsetjmp\b|\blongjmp\b|__builtin_(?:return_address|frame_address|eh_return|longjmp|setjmp|trap)\b", "reaches for frames of its caller"),
    (r"\b__has_(?:include|include_next|embed)\b", "asks which files there are"),
    (r"\b__cpuid\w*|\b_xgetbv\b|\b__builtin_cpu_\w+", "asks what machine this is: context->isa tells"),
)  # fmt: skip
_INCLUDE = re.compile(r"^\s*#\s*(include\w*|embed|import)\b\s*(.*)$", re.MULTILINE)
_LITERAL_NAME = re.compile(r'(?:"([^"<>]+)"|<([^"<>]+)>)\s*')
_MUTABLE = re.compile(
    r"(?:^|[;{}])\s*static\s+(?!inline\b|const\b|constexpr\b|void\b|int32_t\s+\w+\s*\(|int64_t\s+\w+\s*\()[^;()]*[;=\[]",
    re.MULTILINE,
)


def tripped(solution: Solution) -> list[str]:
    """Every reason to refuse the sources, each with its file and line."""
    found: list[str] = []
    total = sum(len(source.content) for source in solution.sources)
    if total > _MOST_BYTES:
        found.append(f"{total} bytes of source: at most {_MOST_BYTES}")
    own = {source.path for source in solution.sources}
    for source in solution.sources:
        text, unread = code_of(source.content)
        found += [f"{source.path}:{line}: {why}" for line, why in unread[:5]]
        found += [f"{source.path}:{line}: {why}" for line, why in _scan(text)]
        found += [f"{source.path}:{line}: {why}" for line, why in _includes(text, own)]
        if "##" in text:
            found.append(f"{source.path}: pastes tokens (##): write the words out")
    return found


def _scan(text: str) -> list[tuple[int, str]]:
    hits = [(_line(text, match.start()), why) for wire, why in _WIRES for match in re.finditer(wire, text)]
    hits += [
        (_line(text, match.end()), "static data that can change: a kernel keeps no state between calls")
        for match in _MUTABLE.finditer(text)
    ]
    return sorted(set(hits))


def _includes(text: str, own: set[str]) -> list[tuple[int, str]]:
    hits = []
    for match in _INCLUDE.finditer(text):
        name = _LITERAL_NAME.fullmatch(match[2]) if match[1] == "include" else None
        # A name that a macro gives can be any file; so can one that the preprocessor looks up by itself.
        if name is None or not (name[1] in own or (name[1] or name[2]) in _HEADERS):
            why = f"includes {match[2].strip()}: only its own files, the ABI, integer types and intrinsics, by name"
            hits.append((_line(text, match.start()), why))
    return hits


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
