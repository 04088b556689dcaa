// y[M, N] = x[M, K] weight[N, K]^T + bias[N] by bfloat16 dot products, summed in float32; the weight comes packed.
#include "layout.h"

#include <immintrin.h>

namespace {

using namespace layout;

constexpr int ROWS = $rows;              // rows of x in one register block, at most
constexpr int SUMS = $sums;              // vectors of sums in flight, at least: low blocks take K in parts for it
constexpr int64_t PREFETCH = $prefetch;  // bytes of weight fetched ahead
constexpr int64_t GRAIN = $grain;        // panels that a thread takes at least
constexpr int64_t CHUNK = $chunk;        // rows of x that stay in the cache beside a panel
constexpr int COLUMNS = PANEL / 16;
constexpr int chains(int rows) { return rows * COLUMNS < SUMS ? SUMS / (rows * COLUMNS) : 1; }
constexpr int64_t PAIRS = K / 2;

struct Job {
  const uint16_t *x, *bias;
  uint16_t *y;
  int64_t m, x_stride, y_stride;
  const uint16_t *weight;
};

inline float widen(uint16_t value) { return __builtin_bit_cast(float, uint32_t(value) << 16); }
inline uint16_t narrow(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <int R>
__attribute__((always_inline)) inline void step(const uint16_t *x, int64_t stride, const uint16_t *w, bool whole,
                                                __m512 (&sum)[R][COLUMNS]) {
  if constexpr (PREFETCH > 0)
    for (int64_t line = 0; line < PANEL * 4; line += 64)
      __builtin_prefetch(reinterpret_cast<const char *>(w) + PREFETCH + line);
  __m512bh value[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) value[c] = (__m512bh)_mm512_loadu_si512(w + c * 32);
  for (int r = 0; r < R; r++) {
    uint32_t pair = x[r * stride];
    if (whole) __builtin_memcpy(&pair, x + r * stride, 4);
    const __m512bh factor = (__m512bh)_mm512_set1_epi32(int(pair));
    for (int c = 0; c < COLUMNS; c++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], factor, value[c]);
  }
}

template <int R>
void block(const Job &job, const uint16_t *w, int64_t m, int64_t n) {
  constexpr int CHAINS = chains(R);
  __m512 part[CHAINS][R][COLUMNS] = {};
  const uint16_t *x = job.x + m * job.x_stride;
  int64_t s = 0;
#pragma GCC unroll $unroll
  for (; s + CHAINS <= PAIRS; s += CHAINS)
    for (int chain = 0; chain < CHAINS; chain++)
      step<R>(x + (s + chain) * 2, job.x_stride, w + (s + chain) * PANEL * 2, true, part[chain]);
  for (; s < STEPS; s++) step<R>(x + s * 2, job.x_stride, w + s * PANEL * 2, s < PAIRS, part[0]);
  const int64_t width = N - n < PANEL ? N - n : PANEL;
  for (int r = 0; r < R; r++) {
    float line[PANEL];
    for (int c = 0; c < COLUMNS; c++) {
      for (int chain = 1; chain < CHAINS; chain++) part[0][r][c] += part[chain][r][c];
      _mm512_storeu_ps(line + c * 16, part[0][r][c]);
    }
    uint16_t *y = job.y + (m + r) * job.y_stride + n;
    for (int64_t c = 0; c < width; c++) y[c] = narrow(line[c] + (job.bias ? widen(job.bias[n + c]) : 0.0f));
  }
}

template <int R>
void choose(int rows, const Job &job, const uint16_t *w, int64_t m, int64_t n) {
  if (rows == R)
    block<R>(job, w, m, n);
  else if constexpr (R > 1)
    choose<R - 1>(rows, job, w, m, n);
}

void panels(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t top = 0; top < job.m; top += CHUNK) {
    const int64_t rows = job.m - top < CHUNK ? job.m - top : CHUNK, blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t p = begin; p < end; p++)
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t from = rows * b / blocks, to = rows * (b + 1) / blocks;
        choose<ROWS>(int(to - from), job, job.weight + p * PANEL_ELEMENTS, top + from, p * PANEL);
      }
  }
}

inline bool is_matrix(const pm_tensor &t, int64_t columns) {
  return t.ndim == 2 && t.dtype == PM_BF16 && t.sizes[1] == columns && t.strides[1] == 1;
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  static_assert(DEPTH == 2 && sizeof(element) == 2 && sizeof(given) == 2, "dot products take bfloat16 pairs");
  if (context->abi_version != PM_ABI_VERSION || context->isa < PM_ISA_AVX512_BF16) return 1;
  if (inputs != 3 || outputs != 1) return 1;
  if (!is_matrix(in[0], K) || !is_matrix(out[0], N) || in[0].sizes[0] != out[0].sizes[0]) return 1;
  if (in[1].dtype != PM_U8 || in[1].sizes[0] != PANELS * PANEL_ELEMENTS * 2) return 1;
  if (in[2].data && (in[2].dtype != PM_BF16 || in[2].sizes[0] != N || in[2].strides[0] != 1)) return 1;
  Job job{static_cast<const uint16_t *>(in[0].data), static_cast<const uint16_t *>(in[2].data),
          static_cast<uint16_t *>(out[0].data), in[0].sizes[0], in[0].strides[0], out[0].strides[0],
          static_cast<const uint16_t *>(in[1].data)};
  context->parallel_for(context, PANELS, GRAIN, panels, &job);
  return 0;
}
