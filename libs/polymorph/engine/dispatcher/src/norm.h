// polymorph::rms_norm and polymorph::fused_add_rms_norm; their sites are found by width and dtype at the first call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>

#include <torch/library.h>

#include <tuple>

#include "keyed.h"

namespace polymorph {

inline int64_t norm_site(bool fused, const at::Tensor &x) {
  static KeyedSites<3> known;
  const int64_t width = x.size(-1);
  const auto dtype = x.scalar_type();
  return known.find({fused, width, static_cast<int64_t>(dtype)}, [&] {
    return (fused ? "fused_add_rms_norm_h" : "rms_norm_h") + std::to_string(width) + "_" + dtype_name(dtype);
  });
}

inline at::Tensor rms_norm(const at::Tensor &x, const at::Tensor &weight, double eps) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow("_C::rms_norm", "");
  const at::Tensor dense = x.contiguous();
  at::Tensor y = at::empty_like(dense);
  const int64_t width = x.size(-1);
  const at::Tensor rows = dense.view({-1, width});
  const at::Tensor out = y.view({-1, width});
  if (rows.size(0) == 0) return y;
  const int64_t site = norm_site(false, x);
  maybe_capture(definition_of(site), site, rows.size(0),
                [&] { return Named{{"x", rows}, {"weight", weight}, {"eps", scalar_of(eps)}}; });
  const auto kernel = [&](const Cell &cell) {
    float epsilon = static_cast<float>(eps);
    const pm_tensor scalar{&epsilon, {1}, {1}, 1, PM_F32};
    const pm_tensor inputs[3] = {view_of(rows), view_of(weight), scalar};
    const pm_tensor output = view_of(out);
    return cell.run(context(), inputs, 3, &output, 1);
  };
  serve(site, rows.size(0), kernel, [&] { call_boxed(native, y, dense, weight, eps); });
  return y;
}

inline std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(const at::Tensor &x, const at::Tensor &residual,
                                                            const at::Tensor &weight, double eps) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow("_C::fused_add_rms_norm", "");
  const at::Tensor dense = x.contiguous();
  const at::Tensor carried = residual.contiguous();
  at::Tensor y = at::empty_like(dense);
  at::Tensor sum = at::empty_like(carried);
  const int64_t width = x.size(-1);
  const at::Tensor rows = dense.view({-1, width});
  const at::Tensor carried_rows = carried.view({-1, width});
  if (rows.size(0) == 0) return {y, sum};
  const int64_t site = norm_site(true, x);
  maybe_capture(definition_of(site), site, rows.size(0), [&] {
    return Named{{"x", rows}, {"residual", carried_rows}, {"weight", weight}, {"eps", scalar_of(eps)}};
  });
  const auto kernel = [&](const Cell &cell) {
    float epsilon = static_cast<float>(eps);
    const pm_tensor scalar{&epsilon, {1}, {1}, 1, PM_F32};
    const pm_tensor inputs[4] = {view_of(rows), view_of(carried_rows), view_of(weight), scalar};
    const pm_tensor outputs[2] = {view_of(y.view({-1, width})), view_of(sum.view({-1, width}))};
    return cell.run(context(), inputs, 4, outputs, 2);
  };
  serve(site, rows.size(0), kernel, [&] {
    y.copy_(dense);  // the engine's own op works in place
    sum.copy_(carried);
    call_boxed(native, y, sum, weight, eps);
  });
  return {y, sum};
}

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("fused_add_rms_norm", fused_add_rms_norm);
}

}  // namespace polymorph
