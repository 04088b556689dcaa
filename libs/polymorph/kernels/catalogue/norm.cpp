// $title
#include "vectors.h"

namespace {

constexpr int64_t H = $h;
constexpr int CHAINS = $chains;       // independent sums of squares
constexpr bool KEEP = $keep;          // rows are kept widened between the passes, instead of read again
constexpr int64_t GRAIN = $grain;     // rows that a thread takes at least
constexpr bool FUSED = $fused;        // the residual is added first

constexpr int64_t STEP = LANES * CHAINS;

struct Job {
  const scalar *x, *residual, *weight;
  scalar *y, *summed;
  int64_t x_stride, residual_stride, y_stride, summed_stride;
  float eps;
  char *scratch;
  int64_t scratch_bytes;
};

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

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  static_assert(KEEP || !FUSED || sizeof(scalar) == 4, "a bfloat16 sum is rounded: it cannot be read again");
  if (context->abi_version != PM_ABI_VERSION || inputs != 3 + FUSED || outputs != 1 + FUSED) return 1;
  const pm_tensor &x = in[0], &residual = in[FUSED], &weight = in[1 + FUSED], &eps = in[2 + FUSED];
  const int64_t m = x.sizes[0];
  if (!is_rows(x, m, H) || !is_rows(residual, m, H) || !is_rows(out[0], m, H) || !is_rows(out[FUSED], m, H)) return 1;
  if (!is_line(weight, H) || eps.dtype != PM_F32) return 1;
  if (KEEP && context->scratch_bytes < H * 4) return 2;
  Job job{static_cast<const scalar *>(x.data), static_cast<const scalar *>(residual.data),
          static_cast<const scalar *>(weight.data), static_cast<scalar *>(out[0].data),
          static_cast<scalar *>(out[FUSED].data), x.strides[0], residual.strides[0], out[0].strides[0],
          out[FUSED].strides[0], *static_cast<const float *>(eps.data), static_cast<char *>(context->scratch),
          context->scratch_bytes};
  context->parallel_for(context, m, GRAIN, rows, &job);
  return 0;
}
