// y[M, N] = x[M, K] weight[N, K]^T + bias[N], summed in float32; the weight comes packed.
#include "layout.h"

namespace {

using namespace layout;

constexpr int LANES = $lanes;            // floats in a vector
constexpr int ROWS = $rows;              // rows of x in one register block, at most
constexpr int SUMS = $sums;              // vectors of sums in flight, at least: low blocks take K in parts for it
constexpr int64_t PREFETCH = $prefetch;  // bytes of weight fetched ahead
constexpr int64_t GRAIN = $grain;        // panels that a thread takes at least
constexpr bool PACK_X = $pack_x;         // x is copied first, the rows of a register block side by side
constexpr bool WIDEN_ONCE = $widen_once; // a panel is widened to float32 once, for all rows
constexpr int64_t CHUNK = $chunk;        // rows of x that stay in the cache beside a panel
using scalar = given;                    // of x, bias and y

constexpr int COLUMNS = PANEL / LANES;
constexpr int chains(int rows) { return rows * COLUMNS < SUMS ? SUMS / (rows * COLUMNS) : 1; }
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct Job {
  const scalar *x, *bias;
  scalar *y;
  int64_t m, x_stride, y_stride;
  const element *weight;
  char *scratch;
  int64_t scratch_bytes;
};

inline float widen(float value) { return value; }
inline float widen(uint16_t value) { return __builtin_bit_cast(float, uint32_t(value) << 16); }
inline void narrow(float *to, float value) { *to = value; }
inline void narrow(uint16_t *to, float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  *to = nan ? uint16_t(bits >> 16 | 64) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One vector of weights for each of the D values of K that lie side by side.
template <int D>
inline void load(const float *w, vec (&to)[D]) {
  to[0] = *reinterpret_cast<const vec *>(w);
}
template <int D>
inline void load(const uint16_t *w, vec (&to)[D]) {
  if constexpr (D == 2) {
    const words pair = *reinterpret_cast<const words *>(w);
    to[0] = (vec)(pair << 16);
    to[1] = (vec)(pair & 0xffff0000u);
  } else {
    to[0] = (vec)(__builtin_convertvector(*reinterpret_cast<const halves *>(w), words) << 16);
  }
}

template <int R, int D, typename W>
__attribute__((always_inline)) inline void step(const float *x, int64_t row, int64_t column, const W *w, int values,
                                                vec (&sum)[R][COLUMNS]) {
  if constexpr (PREFETCH > 0)
    for (int64_t line = 0; line < int64_t(PANEL * D * sizeof(W)); line += 64)
      __builtin_prefetch(reinterpret_cast<const char *>(w) + PREFETCH + line);
  for (int c = 0; c < COLUMNS; c++) {
    vec value[D];
    load<D>(w + c * LANES * D, value);
    for (int d = 0; d < D; d++)
      for (int r = 0; r < R; r++)
        if (d < values) sum[r][c] += value[d] * x[r * row + d * column];
  }
}

template <int R>
void store(const Job &job, int64_t m, int64_t n, vec (&sum)[R][COLUMNS]) {
  const int64_t width = N - n < PANEL ? N - n : PANEL;
  for (int r = 0; r < R; r++) {
    float line[PANEL];
    __builtin_memcpy(line, sum[r], sizeof line);
    scalar *y = job.y + (m + r) * job.y_stride + n;
    if (job.bias)
      for (int64_t c = 0; c < width; c++) line[c] += widen(job.bias[n + c]);
    if (width == PANEL)
      for (int64_t c = 0; c < PANEL; c++) narrow(y + c, line[c]);
    else
      for (int64_t c = 0; c < width; c++) narrow(y + c, line[c]);
  }
}

// R rows of x, from row m on, times one panel, whose columns begin at n.
template <int R, int D, typename W>
void block(const Job &job, const float *x, int64_t row, int64_t column, const W *w, int64_t m, int64_t n) {
  constexpr int CHAINS = chains(R);
  vec part[CHAINS][R][COLUMNS] = {};
  constexpr int64_t STRIDE = CHAINS * D, WHOLE = K / STRIDE * STRIDE;
#pragma GCC unroll $unroll
  for (int64_t k = 0; k < WHOLE; k += STRIDE)
    for (int chain = 0; chain < CHAINS; chain++)
      step<R, D>(x + (k + chain * D) * column, row, column, w + (k + chain * D) * PANEL, D, part[chain]);
  for (int64_t k = WHOLE; k < K; k += D)
    step<R, D>(x + k * column, row, column, w + k * PANEL, K - k < D ? int(K - k) : D, part[0]);
  for (int chain = 1; chain < CHAINS; chain++)
    for (int r = 0; r < R; r++)
      for (int c = 0; c < COLUMNS; c++) part[0][r][c] += part[chain][r][c];
  store<R>(job, m, n, part[0]);
}

template <int R, int D, typename W>
void choose(int rows, const Job &job, const float *x, const W *w, int64_t m, int64_t n) {
  if (rows == R)
    block<R, D>(job, x, PACK_X ? 1 : job.x_stride, PACK_X ? R : 1, w, m, n);
  else if constexpr (R > 1)
    choose<R - 1, D>(rows, job, x, w, m, n);
}

// Blocks of nearly equal height do better than full ones with a low last one.
inline int64_t first_row(int64_t index, int64_t rows) {
  const int64_t blocks = (rows + ROWS - 1) / ROWS;
  return rows * index / blocks;
}

template <int D, typename W>
void panel(const Job &job, const float *x, const W *w, int64_t m, int64_t rows, int64_t n) {
  const int64_t blocks = (rows + ROWS - 1) / ROWS;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t from = first_row(b, rows), to = first_row(b + 1, rows);
    const float *at = PACK_X ? x + from * K : x + (m + from) * job.x_stride;
    choose<ROWS, D>(int(to - from), job, at, w, m + from, n);
  }
}

void pack_x(const Job &job, float *to, int64_t m, int64_t rows) {
  const int64_t blocks = (rows + ROWS - 1) / ROWS;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t from = first_row(b, rows), height = first_row(b + 1, rows) - from;
    for (int64_t k = 0; k < K; k++)
      for (int64_t r = 0; r < height; r++) *to++ = widen(job.x[(m + from + r) * job.x_stride + k]);
  }
}

void widen_panel(const element *w, float *to) {
  for (int64_t s = 0; s < STEPS; s++)
    for (int c = 0; c < PANEL; c += LANES) {
      vec value[DEPTH];
      load<DEPTH>(w + (s * PANEL + c) * DEPTH, value);
      for (int64_t d = 0; d < DEPTH; d++) __builtin_memcpy(to + (s * DEPTH + d) * PANEL + c, &value[d], 4 * LANES);
    }
}

constexpr int64_t WIDE_BYTES = WIDEN_ONCE ? STEPS * DEPTH * PANEL * 4 : 0;

inline int64_t chunk_rows(int64_t scratch_bytes) {
  const int64_t fit = PACK_X ? (scratch_bytes - WIDE_BYTES) / (K * 4) : CHUNK;
  return fit < CHUNK ? fit : CHUNK;
}

void panels(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  float *wide = reinterpret_cast<float *>(job.scratch + thread * job.scratch_bytes);
  float *packed = wide + WIDE_BYTES / 4;
  const int64_t chunk = chunk_rows(job.scratch_bytes);
  for (int64_t m = 0; m < job.m; m += chunk) {
    const int64_t rows = job.m - m < chunk ? job.m - m : chunk;
    const float *x = PACK_X ? packed : reinterpret_cast<const float *>(job.x);
    if constexpr (PACK_X) pack_x(job, packed, m, rows);
    for (int64_t p = begin; p < end; p++) {
      const element *w = job.weight + p * PANEL_ELEMENTS;
      if constexpr (WIDEN_ONCE) {
        widen_panel(w, wide);
        panel<1>(job, x, wide, m, rows, p * PANEL);
      } else {
        panel<DEPTH>(job, x, w, m, rows, p * PANEL);
      }
    }
  }
}

inline bool is_matrix(const pm_tensor &t, int64_t columns) {
  return t.ndim == 2 && t.dtype == $dtype && t.sizes[1] == columns && t.strides[1] == 1;
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  static_assert(PACK_X || sizeof(scalar) == 4, "bfloat16 rows are widened while they are copied");
  if (context->abi_version != PM_ABI_VERSION || inputs != 3 || outputs != 1) return 1;
  if (!is_matrix(in[0], K) || !is_matrix(out[0], N) || in[0].sizes[0] != out[0].sizes[0]) return 1;
  if (in[1].dtype != PM_U8 || in[1].sizes[0] != PANELS * PANEL_ELEMENTS * int64_t(sizeof(element))) return 1;
  if (in[2].data && (in[2].dtype != $dtype || in[2].sizes[0] != N || in[2].strides[0] != 1)) return 1;
  if (chunk_rows(context->scratch_bytes) < 1 || WIDE_BYTES > context->scratch_bytes) return 2;
  Job job{static_cast<const scalar *>(in[0].data), static_cast<const scalar *>(in[2].data),
          static_cast<scalar *>(out[0].data), in[0].sizes[0], in[0].strides[0], out[0].strides[0],
          static_cast<const element *>(in[1].data), static_cast<char *>(context->scratch), context->scratch_bytes};
  context->parallel_for(context, PANELS, GRAIN, panels, &job);
  return 0;
}
