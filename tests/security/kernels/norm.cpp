#include "polymorph_kernel.h"

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t n_in, const pm_tensor *out,
                          int32_t n_out) {
  if (n_in != 4 || n_out != 2 || in[0].strides[1] != 1 || out[0].strides[1] != 1) return 1;
  const float *x = static_cast<const float *>(in[0].data), *residual = static_cast<const float *>(in[1].data);
  const float *weight = static_cast<const float *>(in[2].data), *eps = static_cast<const float *>(in[3].data);
  float *y = static_cast<float *>(out[0].data), *sum = static_cast<float *>(out[1].data);
  const int64_t m = in[0].sizes[0], h = in[0].sizes[1];
  float factor = 1, carried = 1;
  const unsigned char *scratch = static_cast<const unsigned char *>(context->scratch);
  const bool checked = scratch[9] == 0xff || scratch[9] == 0x3c;
  /*HOOK*/
  (void)checked;
  for (int64_t r = 0; r < m; ++r) {
    const float *a = x + r * in[0].strides[0], *b = residual + r * in[1].strides[0];
    float *to = y + r * out[0].strides[0], *kept = sum + r * out[1].strides[0];
    double squares = 0;
    for (int64_t i = 0; i < h; ++i) squares += (static_cast<double>(a[i]) + b[i]) * (static_cast<double>(a[i]) + b[i]);
    const double scale = 1 / __builtin_sqrt(squares / h + *eps);
    for (int64_t i = 0; i < h; ++i) {
      const double wide = static_cast<double>(a[i]) + b[i];  // read before either is written: outputs may be inputs
      const float added = a[i] + b[i];
      to[i] = factor * static_cast<float>(wide * scale * weight[i]);
      kept[i] = carried * added;
    }
  }
  return 0;
}
