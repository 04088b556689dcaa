#include "layout.h"

typedef float lane8 __attribute__((vector_size(32)));
typedef uint16_t half8 __attribute__((vector_size(16)));
typedef uint32_t wide8 __attribute__((vector_size(32)));

struct call {
  const float *x;
  const uint16_t *w;
  const float *bias;
  float *y;
  int64_t m, n, k, xs, ys;
};

static inline lane8 load(const uint16_t *p) {
  half8 half;
  __builtin_memcpy(&half, p, 16);
  wide8 bits = __builtin_convertvector(half, wide8) << 16;
  lane8 value;
  __builtin_memcpy(&value, &bits, 32);
  return value;
}

template <int ROWS>
static inline void block(const call &c, int64_t panel, int64_t row) {
  lane8 sum[ROWS][2] = {};
  const uint16_t *w = c.w + panel * c.k * PANEL;
  for (int64_t i = 0; i < c.k; ++i, w += PANEL) {
    const lane8 low = load(w), high = load(w + 8);
    for (int r = 0; r < ROWS; ++r) {
      const float x = c.x[(row + r) * c.xs + i];
      sum[r][0] += low * x;
      sum[r][1] += high * x;
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int64_t j = 0; j < PANEL; ++j) {
      const int64_t column = panel * PANEL + j;
      if (column >= c.n) break;
      const float value = sum[r][j / 8][j % 8];
      c.y[(row + r) * c.ys + column] = c.bias ? value + c.bias[column] : value;
    }
}

static void body(void *argument, int64_t begin, int64_t end, int32_t thread) {
  (void)thread;
  const call &c = *static_cast<const call *>(argument);
  for (int64_t panel = begin; panel < end; ++panel) {
    int64_t row = 0;
    for (; row + 4 <= c.m; row += 4) block<4>(c, panel, row);
    for (; row < c.m; ++row) block<1>(c, panel, row);
  }
}

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t n_in, const pm_tensor *out,
                          int32_t n_out) {
  if (n_in != 3 || n_out != 1 || in[0].strides[1] != 1 || out[0].strides[1] != 1) return 1;
  call c;
  c.x = static_cast<const float *>(in[0].data);
  c.w = static_cast<const uint16_t *>(in[1].data);
  c.bias = static_cast<const float *>(in[2].data);
  c.y = static_cast<float *>(out[0].data);
  c.m = in[0].sizes[0], c.k = in[0].sizes[1], c.n = out[0].sizes[1];
  c.xs = in[0].strides[0], c.ys = out[0].strides[0];
  /*HOOK*/
  context->parallel_for(context, (c.n + PANEL - 1) / PANEL, 1, body, &c);
  return 0;
}
