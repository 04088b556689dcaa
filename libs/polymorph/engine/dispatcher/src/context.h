// The pm_context that kernels get: parallel_for over the OpenMP runtime that torch uses, and scratch memory.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "polymorph_kernel.h"

namespace polymorph {

constexpr int64_t kScratchBytes = 1 << 20;
constexpr int64_t kAlignment = 64;

inline int32_t isa_tier() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? PM_ISA_AVX512_BF16 : PM_ISA_AVX512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return PM_ISA_AVX2;
  return PM_ISA_GENERIC;
#elif defined(__aarch64__)
  return PM_ISA_NEON;
#else
  return PM_ISA_GENERIC;
#endif
}

inline void parallel_for(const pm_context *context, int64_t count, int64_t grain, pm_body body, void *argument) {
  grain = std::max<int64_t>(grain, 1);
  const int64_t blocks = (count + grain - 1) / grain;
  const int64_t ranges = std::min<int64_t>(blocks, context->threads);
  if (ranges <= 1) {
    if (count > 0) body(argument, 0, count, 0);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(ranges))
  {
    // A runtime may hand out fewer threads than asked for: divide by what came, so that no range is left out.
    const int64_t team = omp_get_num_threads();
    const int64_t thread = omp_get_thread_num();
    const int64_t begin = std::min(count, blocks * thread / team * grain);
    const int64_t end = std::min(count, blocks * (thread + 1) / team * grain);
    if (begin < end) body(argument, begin, end, static_cast<int32_t>(thread));
  }
}

// Made on the first call, in the thread that runs the model: vLLM has bound its OpenMP threads by then.
inline const pm_context *context() {
  static const pm_context instance = [] {
    pm_context made{};
    made.abi_version = PM_ABI_VERSION;
    made.isa = isa_tier();
    made.threads = std::max(1, omp_get_max_threads());
    made.scratch_bytes = kScratchBytes;
    made.scratch = std::aligned_alloc(kAlignment, static_cast<size_t>(kScratchBytes * made.threads));
    if (made.scratch == nullptr) throw std::bad_alloc();
    made.parallel_for = parallel_for;
    return made;
  }();
  return &instance;
}

}  // namespace polymorph
