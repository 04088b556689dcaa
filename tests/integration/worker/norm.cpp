// A kernel for tests: rms_norm, and fused_add_rms_norm where it gets four inputs.
#include "polymorph_kernel.h"

namespace {

struct Job {
  const float *x, *residual, *weight;
  float eps;
  float *y, *carried;
  int64_t width;
};

void body(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t row = begin; row < end; ++row) {
    const float *x = job.x + row * job.width;
    float *y = job.y + row * job.width;
    float squares = 0.0f;
    for (int64_t i = 0; i < job.width; ++i) {
      y[i] = x[i] + (job.residual != nullptr ? job.residual[row * job.width + i] : 0.0f);
      if (job.carried != nullptr) job.carried[row * job.width + i] = y[i];
      squares += y[i] * y[i];
    }
    const float scale = 1.0f / __builtin_sqrtf(squares / job.width + job.eps);
    for (int64_t i = 0; i < job.width; ++i) y[i] *= scale * job.weight[i];
  }
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t) {
  const bool fused = inputs == 4;
  Job job{static_cast<const float *>(in[0].data),
          fused ? static_cast<const float *>(in[1].data) : nullptr,
          static_cast<const float *>(in[fused ? 2 : 1].data),
          *static_cast<const float *>(in[fused ? 3 : 2].data),
          static_cast<float *>(out[0].data),
          fused ? static_cast<float *>(out[1].data) : nullptr,
          in[0].sizes[1]};
  context->parallel_for(context, in[0].sizes[0], 1, body, &job);
  return 0;
}
