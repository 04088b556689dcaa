// A kernel for tests: y = x W^T with the weight packed as bfloat16 panels of 16 columns, exact or refused.
#include "polymorph_kernel.h"

#ifndef TIMES  // what every product is multiplied by: a wrong kernel
#define TIMES 1.0f
#endif

namespace {

constexpr int64_t kColumns = 16;
constexpr int64_t kRows = 8;
typedef float vec __attribute__((vector_size(64)));
typedef uint32_t ints __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

template <typename T>
struct Job {
  const T *x;
  const uint16_t *packed;
  T *y;
  const T *bias;
  int64_t m, n, k;
};

float wide(float value) { return value; }

float wide(uint16_t value) { return __builtin_bit_cast(float, static_cast<uint32_t>(value) << 16); }

void store(float *to, float value) { *to = value; }

void store(uint16_t *to, float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  *to = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <int R, typename T>
void block(const Job<T> &job, int64_t row, int64_t panel) {
  vec sums[R] = {};
  const uint16_t *w = job.packed + panel * job.k * kColumns;
  for (int64_t k = 0; k < job.k; ++k, w += kColumns) {
    shorts half;
    __builtin_memcpy(&half, w, sizeof(half));
    const vec column = (vec)(__builtin_convertvector(half, ints) << 16);
    for (int r = 0; r < R; ++r) sums[r] += TIMES * wide(job.x[(row + r) * job.k + k]) * column;
  }
  for (int r = 0; r < R; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t at = panel * kColumns + c;
      store(job.y + (row + r) * job.n + at, sums[r][c] + (job.bias != nullptr ? wide(job.bias[at]) : 0.0f));
    }
  }
}

template <typename T>
void body(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job<T> &job = *static_cast<const Job<T> *>(argument);
  for (int64_t panel = begin; panel < end; ++panel) {
    int64_t row = 0;
    for (; row + kRows <= job.m; row += kRows) block<kRows>(job, row, panel);
    for (; row + 4 <= job.m; row += 4) block<4>(job, row, panel);
    for (; row < job.m; ++row) block<1>(job, row, panel);
  }
}

template <typename T>
int32_t run(const pm_context *context, const pm_tensor *inputs, const pm_tensor *outputs) {
  Job<T> job{static_cast<const T *>(inputs[0].data),
             static_cast<const uint16_t *>(inputs[1].data),
             static_cast<T *>(outputs[0].data),
             static_cast<const T *>(inputs[2].data),
             inputs[0].sizes[0],
             outputs[0].sizes[1],
             inputs[0].sizes[1]};
  context->parallel_for(context, job.n / kColumns, 4, body<T>, &job);
  return 0;
}

}  // namespace

extern "C" int64_t pm_pack_bytes(const pm_tensor *weight) {
  return weight->sizes[0] % kColumns == 0 ? weight->sizes[0] * weight->sizes[1] * 2 : -1;
}

extern "C" int32_t pm_pack(const pm_context *, const pm_tensor *weight, void *packed) {
  const bool half = weight->dtype == PM_BF16;
  const uint32_t *from = static_cast<const uint32_t *>(weight->data);
  const uint16_t *halves = static_cast<const uint16_t *>(weight->data);
  uint16_t *to = static_cast<uint16_t *>(packed);
  const int64_t k = weight->sizes[1];
#ifdef PACK_HANGS
  for (;;) asm volatile("" ::: "memory");
#endif
#ifdef PACK_CRASHES
  *reinterpret_cast<volatile int32_t *>(16) = 1;
#endif
#ifdef REFUSES_FIRST  // the bits of one weight's first value: a kernel that one rank alone cannot serve
  if (from[0] == REFUSES_FIRST) return 7;
#endif
  for (int64_t row = 0; row < weight->sizes[0]; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const int64_t at = row * k + column;
      const uint32_t bits = half ? static_cast<uint32_t>(halves[at]) << 16 : from[at];
      if ((bits & 0xffffu) != 0) return 1;
      to[(row / kColumns * k + column) * kColumns + row % kColumns] = static_cast<uint16_t>(bits >> 16);
    }
  }
  return 0;
}

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *inputs, int32_t, const pm_tensor *outputs,
                          int32_t) {
#ifdef REFUSES_EXACTLY  // an M that no self-test tries
  if (inputs[0].sizes[0] == REFUSES_EXACTLY) return 7;
#endif
#ifdef REFUSES_ABOVE
  if (inputs[0].sizes[0] > REFUSES_ABOVE) return 7;
#endif
  return inputs[0].dtype == PM_BF16 ? run<uint16_t>(context, inputs, outputs) : run<float>(context, inputs, outputs);
}
