// $title
#include "polymorph_kernel.h"

namespace {

constexpr int64_t H = $h;
constexpr int LANES = $lanes;         // floats in a vector
constexpr int CHAINS = $chains;       // independent sums of squares
constexpr bool KEEP = $keep;          // rows are kept widened between the passes, instead of read again
constexpr int64_t GRAIN = $grain;     // rows that a thread takes at least
constexpr bool FUSED = $fused;        // the residual is added first
using scalar = $given;

constexpr int64_t STEP = LANES * CHAINS;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct Job {
  const scalar *x, *residual, *weight;
  scalar *y, *summed;
  int64_t x_stride, residual_stride, y_stride, summed_stride;
  float eps;
  char *scratch;
  int64_t scratch_bytes;
};

inline uint16_t narrow(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float get(const float *from) { return *from; }
inline float get(const uint16_t *from) { return __builtin_bit_cast(float, uint32_t(*from) << 16); }
inline void put(float *to, float value) { *to = value; }
inline void put(uint16_t *to, float value) { *to = narrow(value); }
inline vec get_vector(const float *from) { return *reinterpret_cast<const vec *>(from); }
inline vec get_vector(const uint16_t *from) {
  return (vec)(__builtin_convertvector(*reinterpret_cast<const halves *>(from), words) << 16);
}
inline void put_vector(float *to, vec value) { *reinterpret_cast<vec *>(to) = value; }
inline void put_vector(uint16_t *to, vec value) {
  const words bits = (words)value;
  const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 64;
  const words is_nan = (words)((bits & 0x7fffffffu) > 0x7f800000u);
  *reinterpret_cast<halves *>(to) = __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), halves);
}

// Stores the sum where there is a residual, keeps the row where that is asked for, and gives its sum of squares.
float first_pass(const scalar *x, const scalar *residual, scalar *summed, float *kept) {
  vec sums[CHAINS] = {};
  int64_t i = 0;
  for (; i + STEP <= H; i += STEP)
    for (int chain = 0; chain < CHAINS; chain++) {
      const int64_t at = i + chain * LANES;
      vec h = get_vector(x + at);
      if constexpr (FUSED) {
        h += get_vector(residual + at);
        put_vector(summed + at, h);
      }
      if constexpr (KEEP) put_vector(kept + at, h);
      sums[chain] += h * h;
    }
  float total = 0;
  for (; i < H; i++) {
    float h = get(x + i);
    if constexpr (FUSED) {
      h += get(residual + i);
      put(summed + i, h);
    }
    if constexpr (KEEP) kept[i] = h;
    total += h * h;
  }
  for (int chain = 1; chain < CHAINS; chain++) sums[0] += sums[chain];
  for (int lane = 0; lane < LANES; lane++) total += sums[0][lane];
  return total;
}

template <typename From>
void second_pass(const From *h, const scalar *weight, float scale, scalar *y) {
  int64_t i = 0;
  for (; i + LANES <= H; i += LANES) put_vector(y + i, get_vector(h + i) * scale * get_vector(weight + i));
  for (; i < H; i++) put(y + i, get(h + i) * scale * get(weight + i));
}

void rows(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  float *kept = reinterpret_cast<float *>(job.scratch + thread * job.scratch_bytes);
  for (int64_t m = begin; m < end; m++) {
    const scalar *x = job.x + m * job.x_stride;
    scalar *summed = FUSED ? job.summed + m * job.summed_stride : nullptr;
    const float squares = first_pass(x, FUSED ? job.residual + m * job.residual_stride : nullptr, summed, kept);
    const float scale = 1.0f / __builtin_sqrtf(squares / H + job.eps);
    scalar *y = job.y + m * job.y_stride;
    if constexpr (KEEP)
      second_pass(kept, job.weight, scale, y);
    else
      second_pass(FUSED ? summed : x, job.weight, scale, y);
  }
}

inline bool is_rows(const pm_tensor &t, int64_t m) {
  return t.ndim == 2 && t.dtype == $dtype && t.sizes[0] == m && t.sizes[1] == H && t.strides[1] == 1;
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  static_assert(KEEP || !FUSED || sizeof(scalar) == 4, "a bfloat16 sum is rounded: it cannot be read again");
  if (context->abi_version != PM_ABI_VERSION || inputs != 3 + FUSED || outputs != 1 + FUSED) return 1;
  const pm_tensor &x = in[0], &residual = in[FUSED], &weight = in[1 + FUSED], &eps = in[2 + FUSED];
  const int64_t m = x.sizes[0];
  if (!is_rows(x, m) || !is_rows(residual, m) || !is_rows(out[0], m) || !is_rows(out[FUSED], m)) return 1;
  if (weight.dtype != $dtype || weight.sizes[0] != H || weight.strides[0] != 1 || eps.dtype != PM_F32) return 1;
  if (KEEP && context->scratch_bytes < H * 4) return 2;
  Job job{static_cast<const scalar *>(x.data), static_cast<const scalar *>(residual.data),
          static_cast<const scalar *>(weight.data), static_cast<scalar *>(out[0].data),
          static_cast<scalar *>(out[FUSED].data), x.strides[0], residual.strides[0], out[0].strides[0],
          out[FUSED].strides[0], *static_cast<const float *>(eps.data), static_cast<char *>(context->scratch),
          context->scratch_bytes};
  context->parallel_for(context, m, GRAIN, rows, &job);
  return 0;
}
