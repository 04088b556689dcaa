"""Candidates that try to win without being right and fast: each is refused, with a reason that names what it did."""

import platform
import re
from pathlib import Path

import pytest

from polymorph.engine import dispatcher
from polymorph.events.values import Gate, Verdict
from polymorph.kernels.host.pool import SCRATCH_BYTES
from polymorph.kernels.schema import SourceFile, TraceStatus

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="makes system calls in x86-64 assembler")

SYSCALL = """
static inline long enter(long number, long a, long b, long c) {
  long result;
  register long r10 __asm__("r10") = 0;
  __asm__ __volatile__("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
                       : "rcx", "r11", "memory");
  return result;
}
"""
SYSTEM_CALLS = {
    "network": "enter(41, 2, 1, 0);",
    "reads /etc/passwd": 'enter(2, (long)"/etc/passwd", 0, 0);',
    "fork": "enter(57, 0, 0, 0);",
    "thread that works after the return": "enter(56, 0x10f00, 0, 0);",
    "executes": 'enter(59, (long)"/bin/sh", 0, 0);',
    "kills the evaluator": "enter(62, 1, 9, 0);",
    "traces": "enter(101, 16, 1, 0);",
    "reads another process": "enter(310, 1, 0, 0);",
    "keeps a file": 'enter(85, (long)"/tmp/kept", 0777, 0);',
    "asks the clock": "enter(201, 0, 0, 0);",
}


def test_the_honest_kernel_passes(gates) -> None:
    honest = gates.solution()
    assert gates.static(honest).passed, gates.static(honest).reason
    outcome = gates.correct(honest, max_m=33)
    assert outcome.passed, outcome.reason


@x86
@pytest.mark.parametrize("what", SYSTEM_CALLS)
def test_a_system_call_is_refused_on_reading_and_ends_the_process(gates, what: str) -> None:
    hack = gates.solution(before=SYSCALL, hook=SYSTEM_CALLS[what])
    read = gates.static(hack)
    assert (read.verdict, read.status) == (Verdict.FAILED, TraceStatus.REWARD_HACK)
    assert "inline assembler" in read.reason
    outcome = gates.correct(hack)
    assert (outcome.gate, outcome.verdict) == (Gate.G2_CORRECT, Verdict.FAILED)
    assert "made a system call" in outcome.reason


@x86
def test_an_exit_is_no_success(gates) -> None:
    outcome = gates.correct(gates.solution(before=SYSCALL, hook="enter(231, 0, 0, 0);"))
    assert outcome.verdict is Verdict.FAILED
    assert "ended the process (exit code 0)" in outcome.reason


@x86
def test_an_answer_that_the_candidate_wrote_itself_is_no_answer(gates) -> None:
    forge = """
    const char text[] = "\\x0c\\0\\0\\0{\\"ok\\":true }";
    for (long fd = 3; fd < 40; ++fd) enter(1, fd, (long)text, 16);
    """
    outcome = gates.correct(gates.solution(before=SYSCALL, hook=forge))
    assert outcome.verdict is Verdict.FAILED
    assert outcome.status is TraceStatus.REWARD_HACK
    assert "does not belong to the question" in outcome.reason


@pytest.mark.parametrize(
    "write",
    [
        "const_cast<float *>(c.x)[0] = 0;",
        "const_cast<uint16_t *>(c.w)[0] = 0;",
    ],
)
def test_inputs_and_packed_weights_cannot_be_written(gates, write: str) -> None:
    outcome = gates.correct(gates.solution(hook=write))
    assert outcome.verdict is Verdict.FAILED
    assert "touched memory that is not its own" in outcome.reason


@pytest.mark.parametrize(
    "access",
    [
        "c.y[c.m * c.n] = 1;",
        "c.y[-1] = 1;",
        "c.y[0] = c.x[(c.m - 1) * c.xs + c.k];",
        "c.y[0] = c.x[-1];",
        "c.y[0] = widen(c.w[(c.n + PANEL - 1) / PANEL * PANEL * c.k]);",
    ],
)
def test_an_access_beside_a_tensor_is_seen(gates, access: str) -> None:
    outcome = gates.correct(gates.solution(hook=access))
    assert outcome.verdict is Verdict.FAILED
    assert "not its own" in outcome.reason or "wrote beside its output" in outcome.reason


def test_an_endless_loop_ends(gates) -> None:
    endless = gates.solution(hook="for (long i = 0; i >= 0; i = (i + 1) & 0xffff) c.y[0] += 1;")
    outcome = gates.correct(endless, call_s=1.0)
    assert outcome.verdict is Verdict.FAILED
    assert "did not return within 1 s" in outcome.reason


def test_code_that_runs_at_load_is_refused_twice(gates) -> None:
    hack = gates.solution(
        before="char mark[8]; __attribute__((constructor)) static void early() { mark[0] = 1; }"
    )
    assert "runs or places code by itself" in gates.static(hack).reason
    outcome, library = gates.build(hack)
    assert (outcome.verdict, library) == (Verdict.FAILED, b"")
    assert "INIT_ARRAY" in outcome.reason


@pytest.mark.parametrize(
    ("before", "hook", "static_word", "import_word"),
    [
        ('extern "C" char *getenv(const char *);', 'if (getenv("CI")) return 0;', "operating system", "getenv"),
        ('extern "C" int clock_gettime(int, void *);', "long t[2]; clock_gettime(1, t);", "clock", "clock_gettime"),
        ('extern "C" void *dlsym(void *, const char *);', 'dlsym(0, "time");', "operating system", "dlsym"),
        ('extern "C" void *malloc(unsigned long);', "c.bias = (float *)malloc(4);", "allocates", "malloc"),
        (
            'extern "C" int pthread_create(void *, void *, void *(*)(void *), void *);',
            "pthread_create(0, 0, 0, 0);", "threads of its own", "pthread_create",
        ),
    ],
)  # fmt: skip
def test_what_the_platform_offers_is_out_of_reach(gates, before, hook, static_word, import_word) -> None:
    hack = gates.solution(before=before, hook=hook)
    assert static_word in gates.static(hack).reason
    outcome, _ = gates.build(hack)
    assert outcome.verdict is Verdict.FAILED
    assert import_word in outcome.reason


def test_no_state_survives_a_call(gates) -> None:
    cache = gates.solution(
        before="float kept[4096]; const void *seen;",
        hook="if (seen == c.x) { for (int i = 0; i < c.n; ++i) c.y[i] = kept[i]; return 0; } seen = c.x;",
    )
    outcome, _ = gates.build(cache)
    assert outcome.verdict is Verdict.FAILED
    assert "keeps no state between calls" in outcome.reason
    hidden = gates.solution(before="static float kept[4096];", hook="kept[0] += 1; c.y[0] = kept[0];")
    assert "keeps no state between calls" in gates.static(hidden).reason


def test_the_compiler_reads_no_file_of_the_host(gates) -> None:
    peek = gates.solution(before='#include "/etc/passwd"')
    assert 'includes "/etc/passwd"' in gates.static(peek).reason
    outcome, _ = gates.build(peek)
    assert outcome.status is TraceStatus.COMPILE_ERROR
    assert "root:" not in outcome.reason


@pytest.mark.parametrize(
    "cheat",
    [
        "for (int64_t i = 0; i < c.m * c.ys; ++i) c.y[i] = 0; return 0;",
        "return 0;",
        "if (c.m != 1) { for (int64_t r = 0; r < c.m; ++r) for (int64_t i = 0; i < c.n; ++i) c.y[r * c.ys + i] = 0; return 0; }",
        "c.n -= 16;",
        "c.k -= 1;",
        "if (c.x[0] == 0) return 0;",
    ],
)
def test_wrong_outputs_are_wrong(gates, cheat: str) -> None:
    outcome = gates.correct(gates.solution(hook=cheat))
    assert (outcome.gate, outcome.verdict) == (Gate.G2_CORRECT, Verdict.FAILED)
    assert outcome.status in (TraceStatus.INCORRECT_NUMERICAL, TraceStatus.RUNTIME_ERROR)


def test_what_scratch_held_before_does_not_matter_to_an_honest_kernel(gates) -> None:
    hook = (
        "c.y[0] = 0; const unsigned char *s = (unsigned char *)context->scratch; if (s[7] == 0x3c) c.k -= 1;"
    )
    outcome = gates.correct(gates.solution(hook=hook))
    assert outcome.verdict is Verdict.FAILED
    assert "two runs on equal inputs" in outcome.reason


def test_an_honest_norm_is_right_in_place_too(gates) -> None:
    outcome = gates.correct(gates.norm(""))
    assert outcome.passed, outcome.reason


@pytest.mark.parametrize(
    ("hook", "output"),
    [
        ("for (int64_t i = 0; i < m * h; ++i) y[i] = 0;", "y"),
        ("if (sum == residual) carried = 2;", "residual_out"),
    ],
)
def test_outputs_in_the_memory_of_inputs_are_tried(gates, hook: str, output: str) -> None:
    """The first clears its output before it reads; the second looks where it was called."""
    outcome = gates.correct(gates.norm(hook))
    assert (outcome.gate, outcome.verdict) == (Gate.G2_CORRECT, Verdict.FAILED)
    assert outcome.status is TraceStatus.INCORRECT_NUMERICAL
    assert f"in place: {output} gets other bits" in outcome.reason


def test_less_precision_is_noticed_at_a_single_weight(gates) -> None:
    outcome = gates.correct(gates.solution(layout=("if (bits & 0xffff) return 1;", "")))
    assert outcome.verdict is Verdict.FAILED
    assert "packed with less precision" in outcome.reason


def test_less_precision_in_the_sum_is_noticed(gates) -> None:
    rounding = (
        "uint32_t b; __builtin_memcpy(&b, &x, 4); b &= 0xffff0000u; float t; __builtin_memcpy(&t, &b, 4);"
    )
    change = ("sum[r][0] += low * x;", f"{rounding} sum[r][0] += low * t;")
    outcome = gates.correct(gates.solution(kernel=change))
    assert outcome.verdict is Verdict.FAILED
    assert "units" in outcome.reason


@x86
def test_a_changed_control_word_is_seen(gates) -> None:
    flush = 'unsigned word = 0x9fc0; __asm__ __volatile__("ldmxcsr %0" : : "m"(word));'
    outcome = gates.correct(gates.solution(hook=flush))
    assert outcome.status is TraceStatus.REWARD_HACK
    assert "control word" in outcome.reason


def test_right_when_checked_and_skipped_when_timed_is_caught(gates) -> None:
    """Scratch holds rubbish in the checked calls and nothing of the kind in the timed ones: a way to tell them apart."""
    hook = "const unsigned char *s = (unsigned char *)context->scratch; if (s[9] != 0xff && s[9] != 0x3c) c.n = 16;"
    hack = gates.solution(hook=hook)
    assert gates.correct(hack).passed
    outcome = gates.timed(hack)
    assert (outcome.gate, outcome.status) == (Gate.G3_MICRO, TraceStatus.REWARD_HACK)
    assert "had not written its whole output" in outcome.reason


def test_wrong_numbers_when_timed_are_caught(gates) -> None:
    hook = "const unsigned char *s = (unsigned char *)context->scratch; if (s[9] != 0xff && s[9] != 0x3c) c.k = 1;"
    hack = gates.solution(hook=hook)
    assert gates.correct(hack).passed
    outcome = gates.timed(hack)
    assert outcome.status is TraceStatus.REWARD_HACK
    assert "wrong when it was timed" in outcome.reason


def test_a_kernel_that_refuses_only_when_timed_gets_a_verdict(gates) -> None:
    hook = "const unsigned char *s = (unsigned char *)context->scratch; if (s[9] != 0xff && s[9] != 0x3c) return 7;"
    hack = gates.solution(hook=hook)
    assert gates.correct(hack).passed
    outcome = gates.timed(hack)
    assert (outcome.gate, outcome.status) == (Gate.G3_MICRO, TraceStatus.REWARD_HACK)
    assert "returned 7" in outcome.reason


@pytest.mark.parametrize(
    ("hook", "output"),
    [("if (!checked) factor = 1.01f;", "y"), ("if (!checked) carried = 1.01f;", "residual_out")],
)
def test_every_output_of_a_norm_is_checked_when_timed(gates, hook: str, output: str) -> None:
    hack = gates.norm(hook)
    assert gates.correct(hack).passed, gates.correct(hack).reason
    outcome = gates.timed(hack, m=64)
    assert (outcome.gate, outcome.status) == (Gate.G3_MICRO, TraceStatus.REWARD_HACK), outcome.reason
    assert f"{output} was right when it was checked" in outcome.reason


def test_a_second_output_that_is_not_written_when_timed_is_seen(gates) -> None:
    outcome = gates.timed(gates.norm("if (!checked) sum = y;"), m=64)
    assert outcome.status is TraceStatus.REWARD_HACK, outcome.reason
    assert "had not written its whole output" in outcome.reason


@pytest.mark.parametrize("m", [64, 8192])
def test_an_honest_norm_is_timed_at_any_m(gates, m: int) -> None:
    outcome = gates.timed(gates.norm(""), m=m)
    assert outcome.status is not TraceStatus.REWARD_HACK, outcome.reason
    assert outcome.status is not TraceStatus.RUNTIME_ERROR, outcome.reason


def test_a_packing_keeps_no_pointer_to_the_weight(gates) -> None:
    """An engine packs from a tensor that is freed at once."""
    keep = "*reinterpret_cast<const float **>(packed) = static_cast<const float *>(weight->data); return 0;"
    layout = ("const int64_t n = weight->sizes[0]", f"{keep}\n  const int64_t n = weight->sizes[0]")
    read = """
    const float *from = *reinterpret_cast<const float *const *>(c.w);
    for (int64_t r = 0; r < c.m; ++r)
      for (int64_t j = 0; j < c.n; ++j) {
        float lanes[8] = {};
        for (int64_t i = 0; i < c.k; ++i) lanes[i % 8] += c.x[r * c.xs + i] * from[j * c.k + i];
        float value = 0;
        for (float lane : lanes) value += lane;
        c.y[r * c.ys + j] = c.bias ? value + c.bias[j] : value;
      }
    return 0;
    """
    hack = gates.solution(hook=read, layout=layout)
    for outcome in (gates.correct(hack), gates.timed(hack)):
        assert outcome.verdict is Verdict.FAILED
        assert "touched memory that is not its own" in outcome.reason


@x86
def test_code_in_a_constant_is_refused(gates) -> None:
    """What a jump into the middle of an instruction would run: `mov eax, 39; syscall; ret`."""
    hack = gates.solution(
        before="__attribute__((noinline, used)) static long gadget(long a) { return a ^ (long)0xc3050f00000027b8ull; }",
        hook="if (gadget(c.k) == 1) return 1;",
    )
    assert gates.static(hack).passed
    outcome, library = gates.build(hack)
    assert (outcome.status, library) == (TraceStatus.REWARD_HACK, b"")
    assert "bytes of syscall" in outcome.reason
    assert "change the constant" in outcome.reason


def test_a_solution_that_cannot_be_written_gets_a_verdict(gates) -> None:
    honest = gates.solution()
    for paths in (("",), ("a", "a/b.h"), ("a\0b.cc",), ("a" * 300 + ".cc",), ("@x.cc",), ("kernel.so/x.h",)):
        extra = tuple(SourceFile(path=path, content="x") for path in paths)
        outcome, library = gates.build(honest.model_copy(update={"sources": honest.sources + extra}))
        assert (outcome.status, library) == (TraceStatus.COMPILE_ERROR, b""), paths
        assert "source" in outcome.reason


def test_a_layout_source_that_is_not_there_is_refused_at_once(gates) -> None:
    honest = gates.solution()
    extension = honest.x_polymorph.model_copy(update={"layout_source": "gone.h"})
    assert "gone.h" in gates.static(honest.model_copy(update={"x_polymorph": extension})).reason


def test_scratch_is_as_large_here_as_in_an_engine(gates) -> None:
    """A kernel that tells the evaluator from an engine can be right in one and wrong in the other."""
    engine = (Path(dispatcher.__file__).parent / "src" / "context.h").read_text()
    found = re.search(r"kScratchBytes = (\d+) << (\d+);", engine)
    assert found is not None
    assert int(found[1]) << int(found[2]) == SCRATCH_BYTES
    outcome = gates.correct(gates.solution(hook=f"if (context->scratch_bytes != {SCRATCH_BYTES}) return 1;"))
    assert outcome.passed, outcome.reason
