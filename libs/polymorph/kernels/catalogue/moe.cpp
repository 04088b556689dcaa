// y[t] = sum over the experts e of token t of weight[t, e] * (silu(x[t] gate[e]^T) * (x[t] up[e]^T)) down[e]^T.
// Token-expert pairs are put in the order of their experts; then one pass over the first product's panels, and one over
// the second's, in which a thread owns columns of the output, so that nothing is added by two threads.
#include "layout.h"

namespace {

using namespace layout;

constexpr int64_t TOPK = $topk;
constexpr int ROWS = $rows;              // tokens in one register block, at most
constexpr int SUMS = $sums;              // vectors of sums in flight, at least: low blocks take a sum in parts for it
constexpr int64_t PREFETCH = $prefetch;  // bytes of weight fetched ahead
constexpr int64_t WIDEN_FROM = $widen_from;  // tokens of an expert from which its panels are widened once for all blocks
constexpr bool BY_COST = $by_cost;       // first product: threads take equal work of whole experts, else equal columns
using scalar = given;                    // of x and y

constexpr int VECTORS = PANEL / LANES;
constexpr int64_t WIDTH = UP_PANELS * HALF;  // of a row of activations
constexpr bool WIDENS = sizeof(element) == 2 && WIDEN_FROM > 0;
constexpr int64_t LONGEST = H > I ? H : I;
constexpr int chains(int rows) { return rows * VECTORS < SUMS ? SUMS / (rows * VECTORS) : 1; }
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct Job {
  const scalar *x;
  scalar *y;
  int64_t x_stride, y_stride;
  const element *up, *down;
  const float *weights;
  const int32_t *ids;
  int64_t first, tokens, active;  // what is computed at a time, and how many experts it needs
  int32_t *starts;                // [EXPERTS + 1] by expert, into the ordered pairs
  int32_t *experts;               // [active] those with a pair
  int32_t *token;                 // [pairs] each pair's token, counted from `first`
  float *share;                   // [pairs] each pair's weight
  float *wide;                    // [tokens, H] x in float32, where it is not
  float *inner;                   // [pairs, WIDTH]
  char *own;                      // of each thread
  int64_t own_bytes;
  int32_t threads;
};

inline float widen(uint16_t value) { return __builtin_bit_cast(float, uint32_t(value) << 16); }
inline void narrow(float *to, float value) { *to = value; }
inline void narrow(uint16_t *to, float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  *to = nan ? uint16_t(bits >> 16 | 64) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// exp, by 2^n times a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]: within 3 units in the last place on [-87, 88],
// where it is cut off on both sides.
inline vec exponential(vec x) {
  constexpr float LEAST = -87.0f, MOST = 88.0f, ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  x = x < LEAST ? vec{} + LEAST : x;
  x = x > MOST ? vec{} + MOST : x;
  const vec shifted = x * 1.44269504088896341f + ROUND;
  const vec n = shifted - ROUND;
  const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = r * 1.3888889e-3f + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  const words power = ((words)shifted + 127u) << 23;  // the low bits of `shifted` are n
  return p * (vec)power;
}

// One vector of weights for each of the D values of a row that lie side by side.
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
__attribute__((always_inline)) inline void step(const float *const (&x)[R], int64_t k, const W *w, int values,
                                                vec (&sum)[R][VECTORS]) {
  if constexpr (PREFETCH > 0 && sizeof(W) == sizeof(element))
    for (int64_t line = 0; line < int64_t(PANEL * D * sizeof(W)); line += 64)
      __builtin_prefetch(reinterpret_cast<const char *>(w) + PREFETCH + line);
  for (int c = 0; c < VECTORS; c++) {
    vec value[D];
    load<D>(w + c * LANES * D, value);
    for (int d = 0; d < D; d++)
      for (int r = 0; r < R; r++)
        if (d < values) sum[r][c] += value[d] * x[r][k + d];
  }
}

// R rows times one panel.
template <int64_t LENGTH, int R, int D, typename W>
__attribute__((always_inline)) inline void product(const float *const (&x)[R], const W *w, vec (&sum)[R][VECTORS]) {
  constexpr int CHAINS = chains(R);
  vec part[CHAINS][R][VECTORS] = {};
  constexpr int64_t STRIDE = CHAINS * D, WHOLE = LENGTH / STRIDE * STRIDE;
  for (int64_t k = 0; k < WHOLE; k += STRIDE)
    for (int chain = 0; chain < CHAINS; chain++)
      step<R, D>(x, k + chain * D, w + (k + chain * D) * PANEL, D, part[chain]);
  for (int64_t k = WHOLE; k < LENGTH; k += D)
    step<R, D>(x, k, w + k * PANEL, LENGTH - k < D ? int(LENGTH - k) : D, part[0]);
  for (int r = 0; r < R; r++)
    for (int c = 0; c < VECTORS; c++) {
      sum[r][c] = part[0][r][c];
      for (int chain = 1; chain < CHAINS; chain++) sum[r][c] += part[chain][r][c];
    }
}

inline const float *row_of_x(const Job &job, int64_t token) {
  if constexpr (sizeof(scalar) == 4)
    return reinterpret_cast<const float *>(job.x) + (job.first + token) * job.x_stride;
  else
    return job.wide + token * H;
}

// The first product for R pairs: gate and up, and what the second product takes. The pair's weight goes in here.
struct Up {
  static constexpr int64_t LENGTH = H, PANELS = UP_PANELS, ELEMENTS = UP_ELEMENTS;
  static const element *weight(const Job &job) { return job.up; }
  static const float *row(const Job &job, int64_t pair) { return row_of_x(job, job.token[pair]); }
  template <int R>
  static void finish(const Job &job, char *, int64_t pair, int64_t panel, vec (&sum)[R][VECTORS]) {
    for (int r = 0; r < R; r++)
      for (int c = 0; c < VECTORS / 2; c++) {
        const vec gate = sum[r][c];
        const vec value = gate / (exponential(-gate) + 1.0f) * sum[r][c + VECTORS / 2] * job.share[pair + r];
        *reinterpret_cast<vec *>(job.inner + (pair + r) * WIDTH + panel * HALF + c * LANES) = value;
      }
  }
};

// The second product: added up over a token's experts in memory of the thread that owns the columns.
struct Down {
  static constexpr int64_t LENGTH = I, PANELS = DOWN_PANELS, ELEMENTS = DOWN_ELEMENTS;
  static const element *weight(const Job &job) { return job.down; }
  static const float *row(const Job &job, int64_t pair) { return job.inner + pair * WIDTH; }
  template <int R>
  static void finish(const Job &job, char *own, int64_t pair, int64_t, vec (&sum)[R][VECTORS]) {
    for (int r = 0; r < R; r++)
      for (int c = 0; c < VECTORS; c++)
        reinterpret_cast<vec *>(own)[job.token[pair + r] * VECTORS + c] += sum[r][c];
  }
};

template <typename Part, int R, int D, typename W>
__attribute__((noinline)) void block(const Job &job, char *own, const W *w, int64_t pair, int64_t panel) {
  const float *x[R];
  for (int r = 0; r < R; r++) x[r] = Part::row(job, pair + r);
  vec sum[R][VECTORS];
  product<Part::LENGTH, R, D>(x, w, sum);
  Part::template finish<R>(job, own, pair, panel, sum);
}

template <typename Part, int R, int D, typename W>
void choose(int rows, const Job &job, char *own, const W *w, int64_t pair, int64_t panel) {
  if (rows == R)
    block<Part, R, D>(job, own, w, pair, panel);
  else if constexpr (R > 1)
    choose<Part, R - 1, D>(rows, job, own, w, pair, panel);
}

// All pairs of an expert, in blocks of nearly equal height.
template <typename Part, int D, typename W>
void blocks(const Job &job, char *own, const W *w, int64_t pair, int64_t rows, int64_t panel) {
  const int64_t count = (rows + ROWS - 1) / ROWS;
  for (int64_t b = 0; b < count; b++) {
    const int64_t from = rows * b / count, to = rows * (b + 1) / count;
    choose<Part, ROWS, D>(int(to - from), job, own, w, pair + from, panel);
  }
}

template <int64_t LENGTH>
void widen_panel(const element *w, float *to) {
  for (int64_t s = 0; s < steps(LENGTH); s++)
    for (int c = 0; c < PANEL; c += LANES) {
      vec value[DEPTH];
      load<DEPTH>(w + (s * PANEL + c) * DEPTH, value);
      for (int64_t d = 0; d < DEPTH; d++) __builtin_memcpy(to + (s * DEPTH + d) * PANEL + c, &value[d], 4 * LANES);
    }
}

constexpr int64_t WIDE_BYTES = WIDENS ? steps(LONGEST) * DEPTH * PANEL * 4 : 0;

// One expert's panel times all its pairs. `own`: room for the widened panel, then what Part keeps.
template <typename Part>
void expert_panel(const Job &job, char *own, int64_t expert, int64_t panel) {
  const int64_t pair = job.starts[expert], rows = job.starts[expert + 1] - pair;
  const element *w = Part::weight(job) + (expert * Part::PANELS + panel) * Part::ELEMENTS;
  if constexpr (WIDENS) {
    if (rows >= WIDEN_FROM) {
      float *wide = reinterpret_cast<float *>(own);
      widen_panel<Part::LENGTH>(w, wide);
      return blocks<Part, 1>(job, own + WIDE_BYTES, wide, pair, rows, panel);
    }
  }
  blocks<Part, DEPTH>(job, own + WIDE_BYTES, w, pair, rows, panel);
}

inline char *memory_of(const Job &job, int32_t thread) { return job.own + thread * job.own_bytes; }

void up_columns(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t a = 0; a < job.active; a++)
    for (int64_t panel = begin; panel < end; panel++)
      expert_panel<Up>(job, memory_of(job, thread), job.experts[a], panel);
}

// What one panel of an expert costs: reading it is worth about four rows of arithmetic.
inline int64_t cost(const Job &job, int64_t expert) { return job.starts[expert + 1] - job.starts[expert] + 4; }

// `begin` to `end` are parts of the whole work, of which there are as many as threads.
void up_by_cost(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  int64_t total = 0, done = 0;
  for (int64_t a = 0; a < job.active; a++) total += cost(job, job.experts[a]) * UP_PANELS;
  const int64_t from = total * begin / job.threads, to = total * end / job.threads;
  for (int64_t a = 0; a < job.active && done < to; a++) {
    const int64_t each = cost(job, job.experts[a]);
    for (int64_t panel = 0; panel < UP_PANELS; panel++, done += each)
      if (from <= done && done < to) expert_panel<Up>(job, memory_of(job, thread), job.experts[a], panel);
  }
}

void down_columns(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  char *own = memory_of(job, thread);
  const float *sums = reinterpret_cast<const float *>(own + WIDE_BYTES);
  for (int64_t panel = begin; panel < end; panel++) {
    __builtin_memset(own + WIDE_BYTES, 0, size_t(job.tokens * PANEL * 4));
    for (int64_t a = 0; a < job.active; a++) expert_panel<Down>(job, own, job.experts[a], panel);
    const int64_t width = H - panel * PANEL < PANEL ? H - panel * PANEL : PANEL;
    for (int64_t t = 0; t < job.tokens; t++)
      for (int64_t c = 0; c < width; c++)
        narrow(job.y + (job.first + t) * job.y_stride + panel * PANEL + c, sums[t * PANEL + c]);
  }
}

void widen_rows(void *argument, int64_t begin, int64_t end, int32_t) {
  if constexpr (sizeof(scalar) == 2) {
    const Job &job = *static_cast<const Job *>(argument);
    for (int64_t t = begin; t < end; t++)
      for (int64_t k = 0; k < H; k++) job.wide[t * H + k] = widen(job.x[(job.first + t) * job.x_stride + k]);
  }
}

// Puts the pairs in the order of their experts.
void order(Job &job) {
  const int32_t *ids = job.ids + job.first * TOPK;
  const float *weights = job.weights + job.first * TOPK;
  const int64_t pairs = job.tokens * TOPK;
  __builtin_memset(job.starts, 0, (EXPERTS + 1) * sizeof(int32_t));
  for (int64_t i = 0; i < pairs; i++) job.starts[ids[i] + 1]++;
  job.active = 0;
  for (int64_t e = 0; e < EXPERTS; e++) {
    if (job.starts[e + 1]) job.experts[job.active++] = int32_t(e);
    job.starts[e + 1] += job.starts[e];
  }
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t at = job.starts[ids[i]]++;
    job.token[at] = int32_t(i / TOPK);
    job.share[at] = weights[i];
  }
  for (int64_t e = EXPERTS; e > 0; e--) job.starts[e] = job.starts[e - 1];
  job.starts[0] = 0;
}

constexpr int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr int64_t TABLE_BYTES = rounded((2 * EXPERTS + 1) * 4);

inline int64_t shared_bytes(int64_t tokens) {
  const int64_t wide = sizeof(scalar) == 4 ? 0 : tokens * H * 4;
  return TABLE_BYTES + 2 * rounded(tokens * TOPK * 4) + rounded(wide) + rounded(tokens * TOPK * WIDTH * 4);
}
inline int64_t own_bytes(int64_t tokens) { return rounded(WIDE_BYTES + tokens * PANEL * 4); }

// How many tokens' worth of scratch memory there is. All of it is ours until the call returns.
inline int64_t most_tokens(const pm_context *context, int64_t wanted) {
  const int64_t room = context->scratch_bytes * context->threads;
  int64_t tokens = wanted;
  while (tokens > 0 && shared_bytes(tokens) + own_bytes(tokens) * context->threads > room) tokens = tokens * 7 / 8;
  return tokens;
}

void divide(Job &job, const pm_context *context) {
  char *at = static_cast<char *>(context->scratch);
  const auto take = [&at](int64_t bytes) {
    char *taken = at;
    at += rounded(bytes);
    return taken;
  };
  job.starts = reinterpret_cast<int32_t *>(take((2 * EXPERTS + 1) * 4));
  job.experts = job.starts + EXPERTS + 1;
  job.token = reinterpret_cast<int32_t *>(take(job.tokens * TOPK * 4));
  job.share = reinterpret_cast<float *>(take(job.tokens * TOPK * 4));
  job.wide = reinterpret_cast<float *>(take(sizeof(scalar) == 4 ? 0 : job.tokens * H * 4));
  job.inner = reinterpret_cast<float *>(take(job.tokens * TOPK * WIDTH * 4));
  job.own = at;
  job.own_bytes = own_bytes(job.tokens);
}

inline bool is_matrix(const pm_tensor &t, int64_t rows, int64_t columns, int32_t dtype) {
  return t.ndim == 2 && t.dtype == dtype && t.sizes[0] == rows && t.sizes[1] == columns && t.strides[1] == 1;
}

inline bool is_packed(const pm_tensor &t, int64_t elements) {
  return t.dtype == PM_U8 && t.sizes[0] == elements * int64_t(sizeof(element));
}

}  // namespace

// 1: other tensors than these; 2: too little scratch memory; 3: an expert that does not exist.
extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  if (context->abi_version != PM_ABI_VERSION || inputs != 5 || outputs != 1) return 1;
  const int64_t m = in[0].sizes[0];
  if (!is_matrix(in[0], m, H, $code) || !is_matrix(out[0], m, H, $code)) return 1;
  if (!is_packed(in[1], EXPERTS * UP_PANELS * UP_ELEMENTS)) return 1;
  if (!is_packed(in[2], EXPERTS * DOWN_PANELS * DOWN_ELEMENTS)) return 1;
  if (!is_matrix(in[3], m, TOPK, PM_F32) || !is_matrix(in[4], m, TOPK, PM_I32)) return 1;
  if (m > 1 && (in[3].strides[0] != TOPK || in[4].strides[0] != TOPK)) return 1;
  Job job{};
  job.x = static_cast<const scalar *>(in[0].data);
  job.y = static_cast<scalar *>(out[0].data);
  job.x_stride = in[0].strides[0];
  job.y_stride = out[0].strides[0];
  job.up = static_cast<const element *>(in[1].data);
  job.down = static_cast<const element *>(in[2].data);
  job.weights = static_cast<const float *>(in[3].data);
  job.ids = static_cast<const int32_t *>(in[4].data);
  job.threads = context->threads;
  for (int64_t i = 0; i < m * TOPK; i++)
    if (job.ids[i] < 0 || job.ids[i] >= EXPERTS) return 3;
  const int64_t most = most_tokens(context, m);
  if (most < 1) return 2;
  const int64_t parts = (m + most - 1) / most;
  for (int64_t part = 0; part < parts; part++) {
    job.first = m * part / parts;
    job.tokens = m * (part + 1) / parts - job.first;
    divide(job, context);
    order(job);
    if (sizeof(scalar) == 2) context->parallel_for(context, job.tokens, 1, widen_rows, &job);
    if (BY_COST)
      context->parallel_for(context, job.threads, 1, up_by_cost, &job);
    else
      context->parallel_for(context, UP_PANELS, 1, up_columns, &job);
    context->parallel_for(context, DOWN_PANELS, 1, down_columns, &job);
  }
  return 0;
}
