// A kernel for tests: y = x W^T with the weight packed as bfloat16 panels of 16 columns, exact or refused.
#include "polymorph_kernel.h"

namespace {

constexpr int64_t kColumns = 16;
constexpr int64_t kRows = 8;
typedef float vec __attribute__((vector_size(64)));
typedef uint32_t ints __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

struct Job {
  const float *x;
  const uint16_t *packed;
  float *y;
  const float *bias;
  int64_t m, n, k;
};

template <int R>
void block(const Job &job, int64_t row, int64_t panel) {
  vec sums[R] = {};
  const uint16_t *w = job.packed + panel * job.k * kColumns;
  for (int64_t k = 0; k < job.k; ++k, w += kColumns) {
    shorts half;
    __builtin_memcpy(&half, w, sizeof(half));
    const ints wide = __builtin_convertvector(half, ints) << 16;
    const vec column = (vec)wide;
    for (int r = 0; r < R; ++r) sums[r] += job.x[(row + r) * job.k + k] * column;
  }
  for (int r = 0; r < R; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t at = panel * kColumns + c;
      job.y[(row + r) * job.n + at] = sums[r][c] + (job.bias != nullptr ? job.bias[at] : 0.0f);
    }
  }
}

void body(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t panel = begin; panel < end; ++panel) {
    int64_t row = 0;
    for (; row + kRows <= job.m; row += kRows) block<kRows>(job, row, panel);
    for (; row + 4 <= job.m; row += 4) block<4>(job, row, panel);
    for (; row < job.m; ++row) block<1>(job, row, panel);
  }
}

}  // namespace

extern "C" int64_t pm_pack_bytes(const pm_tensor *weight) {
  return weight->sizes[0] % kColumns == 0 && weight->dtype == PM_F32 ? weight->sizes[0] * weight->sizes[1] * 2 : -1;
}

extern "C" int32_t pm_pack(const pm_context *, const pm_tensor *weight, void *packed) {
  const uint32_t *from = static_cast<const uint32_t *>(weight->data);
  uint16_t *to = static_cast<uint16_t *>(packed);
  const int64_t k = weight->sizes[1];
#ifdef REFUSES_FIRST  // the bits of one weight's first value: a kernel that one rank alone cannot serve
  if (from[0] == REFUSES_FIRST) return 7;
#endif
  for (int64_t row = 0; row < weight->sizes[0]; ++row) {
    for (int64_t column = 0; column < k; ++column) {
      const uint32_t bits = from[row * k + column];
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
  Job job{static_cast<const float *>(inputs[0].data),
          static_cast<const uint16_t *>(inputs[1].data),
          static_cast<float *>(outputs[0].data),
          static_cast<const float *>(inputs[2].data),
          inputs[0].sizes[0],
          outputs[0].sizes[1],
          inputs[0].sizes[1]};
  context->parallel_for(context, job.n / kColumns, 4, body, &job);
  return 0;
}
