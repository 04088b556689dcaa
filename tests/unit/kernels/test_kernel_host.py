"""The host's thread pool and contexts, and the loader, with a kernel that records what it is given."""

import ctypes
from pathlib import Path

import pytest

from polymorph.kernels.build import build
from polymorph.kernels.host.pool import SCRATCH_BYTES, HostUnavailable, KernelHost
from polymorph.kernels.isa import Isa
from polymorph.kernels.load import Buffer, DtypeCode, Kernel, KernelUnusable, Tensor, contiguous
from polymorph.kernels.schema import BuildSpec, Solution, SourceFile
from polymorph.kernels.toolchain import Completed, detect_toolchain, run_command

# Input 0: {count, grain}, int64. Output 0: for each iteration the thread that ran it. Output 1: {isa, threads,
# scratch alignment, scratch bytes, calls of the body}.
RECORDER = """
#include "polymorph_kernel.h"
struct Job { int64_t *ran; int64_t calls; };
static void body(void *argument, int64_t begin, int64_t end, int32_t thread) {
  Job *job = static_cast<Job *>(argument);
  __atomic_fetch_add(&job->calls, 1, __ATOMIC_RELAXED);
  for (int64_t i = begin; i < end; i++) job->ran[i] = thread;
}
extern "C" int32_t pm_run(const pm_context *c, const pm_tensor *in, int32_t n, const pm_tensor *out, int32_t) {
  if (n != 1 || c->abi_version != PM_ABI_VERSION) return 1;
  const int64_t *asked = static_cast<const int64_t *>(in[0].data);
  Job job{static_cast<int64_t *>(out[0].data), 0};
  c->parallel_for(c, asked[0], asked[1], body, &job);
  int64_t *told = static_cast<int64_t *>(out[1].data);
  told[0] = c->isa;
  told[1] = c->threads;
  told[2] = reinterpret_cast<intptr_t>(c->scratch) % 64;
  told[3] = c->scratch_bytes;
  told[4] = job.calls;
  static_cast<char *>(c->scratch)[c->scratch_bytes * c->threads - 1] = 1;
  return 0;
}
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("recorder")
    solution = Solution(
        name="recorder",
        definition="none",
        author="test",
        spec=BuildSpec(),
        sources=(SourceFile(path="kernel.cpp", content=RECORDER),),
    )
    content = build(solution, folder, detect_toolchain(), run_command).content()
    return Kernel.from_content(content, folder)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> KernelHost:
    return KernelHost.build(tmp_path_factory.mktemp("host"))


def record(recorder: Kernel, context: int, count: int, grain: int) -> tuple[list[int], list[int]]:
    asked, ran, told = (
        (ctypes.c_int64 * 2)(count, grain),
        (ctypes.c_int64 * 256)(*[-1] * 256),
        (ctypes.c_int64 * 5)(),
    )
    tensors = [Tensor.at(ctypes.addressof(m), (len(m),), DtypeCode.int64) for m in (asked, ran, told)]
    assert recorder.run(context, tensors[:1], tensors[1:]) == 0
    return list(ran), list(told)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("count", "grain"), [(1, 1), (7, 1), (64, 8), (65, 8), (5, 8), (100, 33), (256, 0)])
def test_ranges_are_whole_grains_and_cover_all(
    recorder: Kernel, host: KernelHost, threads: int, count: int, grain: int
) -> None:
    with host.context(threads) as context:
        ran, told = record(recorder, context, count, grain)
    assert ran[count:] == [-1] * (256 - count)
    assert ran[:count] == sorted(ran[:count]), "contiguous, in the order of the threads"
    assert set(ran[:count]) <= set(range(threads))
    for i in range(1, count):
        assert ran[i] == ran[i - 1] or i % max(grain, 1) == 0
    assert told[4] == len(set(ran[:count]))


def test_two_threads_share_the_work(recorder: Kernel, host: KernelHost) -> None:
    with host.context(2) as context:
        ran, _ = record(recorder, context, 64, 1)
    assert ran[:64] == [0] * 32 + [1] * 32


def test_no_iterations_call_nothing(recorder: Kernel, host: KernelHost) -> None:
    with host.context(2) as context:
        assert record(recorder, context, 0, 1)[1][4] == 0


def test_a_context_tells_its_tier_threads_and_scratch(recorder: Kernel, host: KernelHost) -> None:
    with host.context(3, isa=Isa.AVX512) as context:
        _, told = record(recorder, context, 1, 1)
    assert told[:4] == [Isa.AVX512, 3, 0, SCRATCH_BYTES]


def test_a_context_has_threads_and_scratch(host: KernelHost) -> None:
    with pytest.raises(ValueError, match="0 threads"), host.context(0):
        pass
    with pytest.raises(ValueError, match="1024 bytes"), host.context(1, scratch_bytes=1024):
        pass


def test_the_host_is_built_once(tmp_path: Path) -> None:
    KernelHost.build(tmp_path)

    def refuse(*_: object) -> Completed:
        pytest.fail("it was built already")

    KernelHost.build(tmp_path, runner=refuse)


def test_a_host_that_does_not_compile_says_so(tmp_path: Path) -> None:
    with pytest.raises(HostUnavailable, match="no such thing"):
        KernelHost.build(tmp_path, runner=lambda *_: Completed(1, "", "no such thing"))


def test_a_library_without_pm_run_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(KernelUnusable, match="does not load"):
        Kernel.from_content(b"not a library", tmp_path)


def test_a_kernel_that_does_not_pack_says_so(recorder: Kernel) -> None:
    assert not recorder.packs
    with pytest.raises(KernelUnusable, match="exports no pm_pack"):
        recorder.pack_bytes(Tensor.absent())


def test_strides_are_row_major_unless_given() -> None:
    assert contiguous((2, 3, 4)) == (12, 4, 1)
    assert list(Tensor.at(0, (2, 3), DtypeCode.float32).strides)[:2] == [3, 1]
    assert list(Tensor.at(0, (2, 3), DtypeCode.float32, (7, 1)).strides)[:2] == [7, 1]
    with pytest.raises(ValueError, match="5 dimensions"):
        Tensor.at(0, (1,) * 5, DtypeCode.float32)


def test_buffers_are_aligned_and_filled() -> None:
    buffer = Buffer(100, fill=0xAB)
    assert buffer.address % 64 == 0
    assert buffer.content() == b"\xab" * 100
