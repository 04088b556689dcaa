// The caller's side of the ABI for processes without an engine: a pool of threads and a pm_context.
#include "polymorph_kernel.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

namespace {

void parallel_for(const pm_context *context, int64_t count, int64_t grain, pm_body body, void *argument) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t blocks = (count + grain - 1) / grain;
  const int threads = static_cast<int>(std::min<int64_t>(blocks, context->threads));
  if (threads <= 1) {
    body(argument, 0, count, 0);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t begin = blocks * thread / team * grain;
    const int64_t end = std::min(blocks * (thread + 1) / team * grain, count);
    if (begin < end) body(argument, begin, end, static_cast<int32_t>(thread));
  }
}

}  // namespace

extern "C" {

pm_context *pm_host_open(int32_t isa, int32_t threads, int64_t scratch_bytes) {
  auto *context = static_cast<pm_context *>(std::calloc(1, sizeof(pm_context)));
  if (context == nullptr) return nullptr;
  context->abi_version = PM_ABI_VERSION;
  context->isa = isa;
  context->threads = threads;
  context->scratch_bytes = (scratch_bytes + 63) / 64 * 64;
  context->scratch = std::aligned_alloc(64, context->scratch_bytes * threads);
  context->parallel_for = parallel_for;
  if (context->scratch == nullptr) {
    std::free(context);
    return nullptr;
  }
  return context;
}

void pm_host_close(pm_context *context) {
  std::free(context->scratch);
  std::free(context);
}

}  // extern "C"
