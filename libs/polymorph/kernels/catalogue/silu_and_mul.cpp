// y = gate / (1 + exp(-gate)) * up, computed in float32; gate and up are the halves of a row of x.
#include "vectors.h"

namespace {

constexpr int64_t D = $d;
constexpr int UNROLL = $unroll;     // vectors in flight
constexpr int64_t CHUNK = $chunk;   // columns of one unit of work
constexpr int64_t GRAIN = $grain;   // units that a thread takes at least
constexpr int64_t PIECES = (D + CHUNK - 1) / CHUNK;
constexpr bool SHORT = $short;      // a polynomial of one term less

struct Job {
  const scalar *x;
  scalar *y;
  int64_t x_stride, y_stride;
};

// exp(x) from -87.3 to 88; above infinity, below exp(-87.3), and a NaN of a NaN: 2^n exp(r) with |r| <= ln(2)/2. The
// polynomial for exp(r) is within 4e-9 of it, relatively (1.1e-7 where SHORT), so the result within 1 unit in the last place
// (2.5 where SHORT).
inline vec exponential(vec given) {
  vec x = given > 88.0f ? vec{} + 88.0f : given;
  x = x < -87.3f ? vec{} - 87.3f : x;
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const vec shifted = x * 1.44269504088896341f + rounder;
  const vec n = shifted - rounder;
  const vec r = x - n * 0.693145751953125f - n * 1.42860682030941723e-6f;
  vec p;
  if constexpr (SHORT) {
    p = vec{} + 8.312501013278961e-3f;
    p = p * r + 4.189033061265945e-2f;
    p = p * r + 1.6667115688323975e-1f;
    p = p * r + 4.99992311000824e-1f;
  } else {
    p = vec{} + 1.3814539415761828e-3f;
    p = p * r + 8.36874544620514e-3f;
    p = p * r + 4.166838899254799e-2f;
    p = p * r + 1.666652113199234e-1f;
    p = p * r + 4.999999403953552e-1f;
  }
  p = p * (r * r) + r + 1.0f;
  const vec power = (vec)(((ints)shifted << 23) + (ints)p);
  return given > 88.0f ? vec{} + __builtin_inff() : power;
}

inline vec gated(vec gate, vec up) { return gate / (1.0f + exponential(-gate)) * up; }

void piece(const scalar *gate, const scalar *up, scalar *y, int64_t count) {
  int64_t i = 0;
  for (; i + UNROLL * LANES <= count; i += UNROLL * LANES)
    for (int u = 0; u < UNROLL; u++) {
      const int64_t at = i + u * LANES;
      put_vector(y + at, gated(get_vector(gate + at), get_vector(up + at)));
    }
  for (; i + LANES <= count; i += LANES) put_vector(y + i, gated(get_vector(gate + i), get_vector(up + i)));
  for (; i < count; i++) put(y + i, gated(vec{} + get(gate + i), vec{} + get(up + i))[0]);
}

void units(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / PIECES, from = unit % PIECES * CHUNK;
    const scalar *x = job.x + row * job.x_stride;
    piece(x + from, x + D + from, job.y + row * job.y_stride + from, from + CHUNK < D ? CHUNK : D - from);
  }
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  if (context->abi_version != PM_ABI_VERSION || inputs != 1 || outputs != 1) return 1;
  const int64_t m = in[0].sizes[0];
  if (!is_rows(in[0], m, 2 * D) || !is_rows(out[0], m, D)) return 1;
  Job job{static_cast<const scalar *>(in[0].data), static_cast<scalar *>(out[0].data), in[0].strides[0],
          out[0].strides[0]};
  context->parallel_for(context, m * PIECES, GRAIN, units, &job);
  return 0;
}
