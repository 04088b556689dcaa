// The evaluator's own code in a candidate's process: parallel_for over OpenMP as in a worker, scratch between guard
// pages, and loops that call the candidate with nothing between two calls. It holds no timer and no verdict.
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "polymorph_kernel.h"

namespace {

constexpr int kMaxInputs = 16;

void parallel_for(const pm_context *context, int64_t count, int64_t grain, pm_body body, void *argument) {
  if (count <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t blocks = (count + grain - 1) / grain;
  const int64_t threads = blocks < context->threads ? blocks : context->threads;
  if (threads <= 1) {
    body(argument, 0, count, 0);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    const int64_t thread = omp_get_thread_num();
    const int64_t begin = blocks * thread / threads * grain;
    int64_t end = blocks * (thread + 1) / threads * grain;
    if (end > count) end = count;
    if (begin < end) body(argument, begin, end, static_cast<int32_t>(thread));
  }
}

unsigned control_word() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3fu;  // the sticky exception flags are not control
#else
  return 0;
#endif
}

}  // namespace

extern "C" {

// Starts the pool and binds its threads, one to each processor in `cpus`.
int hx_warm(int threads, const int *cpus) {
  int bad = 0;
  omp_set_dynamic(0);
  omp_set_num_threads(threads);
#pragma omp parallel num_threads(threads) reduction(+ : bad)
  {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[omp_get_thread_num()], &set);
    bad += sched_setaffinity(0, sizeof(set), &set) != 0;
  }
  return bad;
}

pm_context *hx_context(int threads, int isa, int64_t scratch_bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t size = (threads * scratch_bytes + page - 1) / page * page;
  char *base = static_cast<char *>(
      mmap(nullptr, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (base == MAP_FAILED || mprotect(base + page, size, PROT_READ | PROT_WRITE) != 0) return nullptr;
  pm_context *context = static_cast<pm_context *>(calloc(1, sizeof(pm_context)));
  if (context == nullptr) return nullptr;
  context->abi_version = PM_ABI_VERSION;
  context->isa = isa;
  context->threads = threads;
  context->scratch_bytes = scratch_bytes;
  context->scratch = base + page;
  context->parallel_for = parallel_for;
  return context;
}

// One call with other rubbish in scratch each time. -1001: the call changed rounding or flushing of denormals.
int hx_call(pm_run_fn run, const pm_context *context, const pm_tensor *inputs, int n_inputs, const pm_tensor *outputs,
            int n_outputs, int rubbish) {
  memset(context->scratch, rubbish, static_cast<size_t>(context->threads * context->scratch_bytes));
  const unsigned before = control_word();
  const int rc = run(context, inputs, n_inputs, outputs, n_outputs);
  return control_word() == before ? rc : -1001;
}

// `count` calls: call j takes slot j of inputs and outputs, and copy (start + j) % copies of the packed weight where
// `packed` names its place among the inputs (-1: none).
int hx_batch(pm_run_fn run, const pm_context *context, const pm_tensor *inputs, int n_inputs, const pm_tensor *outputs,
             int n_outputs, const pm_tensor *copies, int n_copies, int packed, int start, int count) {
  if (n_inputs > kMaxInputs) return -1002;
  pm_tensor arguments[kMaxInputs];
  for (int j = 0; j < count; ++j) {
    memcpy(arguments, inputs + j * n_inputs, sizeof(pm_tensor) * n_inputs);
    if (packed >= 0) arguments[packed] = copies[(start + j) % n_copies];
    const int rc = run(context, arguments, n_inputs, outputs + j * n_outputs, n_outputs);
    if (rc != 0) return rc;
  }
  return 0;
}

// Reads `bytes` with all threads: what memory gives at most.
double hx_read(const float *data, int64_t bytes, int threads) {
  const int64_t count = bytes / 4;
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (int64_t block = 0; block < count / 1024; ++block) {
    float lanes[32] = {0};
    const float *p = data + block * 1024;
    for (int i = 0; i < 1024; i += 32)
      for (int lane = 0; lane < 32; ++lane) lanes[lane] += p[i + lane];
    for (int lane = 0; lane < 32; ++lane) sum += lanes[lane];
  }
  return sum;
}

// `rounds` x 10 vectors of fused multiply-adds a thread: what arithmetic gives at most. Returns multiply-adds done.
double hx_multiply_add(int64_t rounds, int threads, float factor) {
#if defined(__AVX512F__)
  constexpr int kLanes = 16;
#elif defined(__AVX__)
  constexpr int kLanes = 8;
#else
  constexpr int kLanes = 4;
#endif
  typedef float lanes __attribute__((vector_size(kLanes * 4)));
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    lanes a[10];
    for (int i = 0; i < 10; ++i) a[i] = lanes{} + static_cast<float>(i);
    const lanes f = lanes{} + factor;
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 10
      for (int i = 0; i < 10; ++i) a[i] = a[i] * f + f;
    }
    for (int i = 0; i < 10; ++i) total += a[i][0];
  }
  return total == 12345.0f ? 0 : static_cast<double>(rounds) * 10 * kLanes * threads;
}
}
