// A kernel for tests that serves well until its call FAULT_AT, and then takes the engine down or, with HANGS, never ends.
#define pm_run __attribute__((visibility("hidden"))) healthy_run
#include "../../unit/engine/packed_gemm.cpp"
#undef pm_run

namespace {
int64_t calls = 0;
}

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *inputs, int32_t given, const pm_tensor *outputs,
                          int32_t wanted) {
  if (++calls >= FAULT_AT) {
#ifdef HANGS
    for (;;) asm volatile("" ::: "memory");
#else
    *reinterpret_cast<volatile int32_t *>(16) = 1;
#endif
  }
  return healthy_run(context, inputs, given, outputs, wanted);
}
