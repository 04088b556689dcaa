// y[M, N] = x[M, K] weight[N, K]^T + bias[N], summed in float32; threads share out K as well as N, for few panels.
#include "layout.h"

namespace {

using namespace layout;

constexpr int LANES = $lanes;            // floats in a vector
constexpr int ROWS = $rows;              // rows of x in one register block, at most
constexpr int64_t PREFETCH = $prefetch;  // bytes of weight fetched ahead
constexpr int64_t SPLITS = $splits;      // parts of K, summed apart
constexpr int COLUMNS = PANEL / LANES;
constexpr int64_t PART = (STEPS + SPLITS - 1) / SPLITS;
constexpr int64_t WIDTH = PANELS * PANEL;
static_assert(sizeof(given) == 4, "rows of x are read as float32");
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct Job {
  const float *x, *bias;
  float *y;
  int64_t m, x_stride, y_stride;
  const element *weight;
  float *partial;  // [SPLITS][m][WIDTH]
};

inline void load(const float *w, vec *to) { to[0] = *reinterpret_cast<const vec *>(w); }
inline void load(const uint16_t *w, vec *to) {
  if constexpr (DEPTH == 2) {
    const words pair = *reinterpret_cast<const words *>(w);
    to[0] = (vec)(pair << 16);
    to[DEPTH - 1] = (vec)(pair & 0xffff0000u);
  } else {
    to[0] = (vec)(__builtin_convertvector(*reinterpret_cast<const halves *>(w), words) << 16);
  }
}

template <int R>
void block(const Job &job, int64_t split, int64_t p, int64_t m) {
  vec sum[R][COLUMNS] = {};
  const int64_t begin = split * PART, end = begin + PART < STEPS ? begin + PART : STEPS;
  const float *x = job.x + m * job.x_stride;
  auto step = [&](int64_t s, int values) __attribute__((always_inline)) {
    const element *w = job.weight + p * PANEL_ELEMENTS + s * PANEL * DEPTH;
    if constexpr (PREFETCH > 0) __builtin_prefetch(reinterpret_cast<const char *>(w) + PREFETCH);
    for (int c = 0; c < COLUMNS; c++) {
      vec value[DEPTH];
      load(w + c * LANES * DEPTH, value);
      for (int d = 0; d < DEPTH; d++)
        for (int r = 0; r < R; r++)
          if (d < values) sum[r][c] += value[d] * x[r * job.x_stride + s * DEPTH + d];
    }
  };
  const int64_t whole = end < K / DEPTH ? end : K / DEPTH;
  int64_t s = begin;
#pragma GCC unroll $unroll
  for (; s < whole; s++) step(s, DEPTH);
  for (; s < end; s++) step(s, int(K - s * DEPTH));
  for (int r = 0; r < R; r++)
    __builtin_memcpy(job.partial + (split * job.m + m + r) * WIDTH + p * PANEL, sum[r], sizeof sum[r]);
}

template <int R>
void choose(int rows, const Job &job, int64_t split, int64_t p, int64_t m) {
  if (rows == R)
    block<R>(job, split, p, m);
  else if constexpr (R > 1)
    choose<R - 1>(rows, job, split, p, m);
}

void multiply(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  const int64_t blocks = (job.m + ROWS - 1) / ROWS;
  for (int64_t task = begin; task < end; task++)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t from = job.m * b / blocks, to = job.m * (b + 1) / blocks;
      choose<ROWS>(int(to - from), job, task / PANELS, task % PANELS, from);
    }
}

void add(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t m = begin; m < end; m++)
    for (int64_t n = 0; n < N; n++) {
      float sum = job.bias ? job.bias[n] : 0.0f;
      for (int64_t split = 0; split < SPLITS; split++) sum += job.partial[(split * job.m + m) * WIDTH + n];
      job.y[m * job.y_stride + n] = sum;
    }
}

inline bool is_matrix(const pm_tensor &t, int64_t columns) {
  return t.ndim == 2 && t.dtype == PM_F32 && t.sizes[1] == columns && t.strides[1] == 1;
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  if (context->abi_version != PM_ABI_VERSION || inputs != 3 || outputs != 1) return 1;
  if (!is_matrix(in[0], K) || !is_matrix(out[0], N) || in[0].sizes[0] != out[0].sizes[0]) return 1;
  if (in[1].dtype != PM_U8 || in[1].sizes[0] != PANELS * PANEL_ELEMENTS * int64_t(sizeof(element))) return 1;
  if (in[2].data && (in[2].dtype != PM_F32 || in[2].sizes[0] != N || in[2].strides[0] != 1)) return 1;
  const int64_t m = in[0].sizes[0];
  if (SPLITS * m * WIDTH * 4 > context->scratch_bytes * context->threads) return 2;
  Job job{static_cast<const float *>(in[0].data), static_cast<const float *>(in[2].data),
          static_cast<float *>(out[0].data), m, in[0].strides[0], out[0].strides[0],
          static_cast<const element *>(in[1].data), static_cast<float *>(context->scratch)};
  context->parallel_for(context, SPLITS * PANELS, 1, multiply, &job);
  context->parallel_for(context, m, 1, add, &job);
  return 0;
}
