// polymorph::linear: one unquantised linear layer, by the kernel in its slot or by the code that vLLM chose for it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>

#include <torch/library.h>

#include <optional>

#include "site.h"

namespace polymorph {

// What vLLM's dispatch_cpu_unquantized_gemm chose for a layer.
enum NativeLinear { kOneDnn = 0, kPackedSgl = 1, kTorch = 2 };

struct LinearLayer {
  int64_t site;
  int64_t n;
  int64_t k;
  int64_t native;
  at::Tensor state;  // oneDNN: the handler; sgl: the packed weight; torch: the weight
};

inline std::deque<LinearLayer> &linear_layers() {
  static std::deque<LinearLayer> all;
  return all;
}

using OptionalTensor = std::optional<at::Tensor>;

inline void native_linear(const LinearLayer &layer, const at::Tensor &x, const OptionalTensor &bias, at::Tensor &y) {
  if (layer.native == kOneDnn) {
    static const auto onednn = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("_C::onednn_mm", "")
                                   .typed<void(at::Tensor &, const at::Tensor &, const OptionalTensor &, const at::Tensor &)>();
    onednn.call(y, x, bias, layer.state);
  } else if (layer.native == kPackedSgl) {
    static const auto packed = c10::Dispatcher::singleton().findSchemaOrThrow("_C::weight_packed_linear", "");
    call_boxed(packed, y, x, layer.state, bias, true);
  } else {
    at::linear_out(y, x, layer.state, bias);
  }
}

inline int32_t slot_linear(const Cell &cell, const at::Tensor &x, const OptionalTensor &bias, at::Tensor &y) {
  const at::Tensor dense = x.contiguous();
  const pm_tensor inputs[3] = {view_of(dense), cell.packed[0], bias.has_value() ? view_of(*bias) : pm_tensor{}};
  const pm_tensor output = view_of(y);
  return cell.run(context(), inputs, 3, &output, 1);
}

inline at::Tensor linear(const at::Tensor &x, const OptionalTensor &bias, int64_t layer_id, int64_t n) {
  const LinearLayer &layer = linear_layers().at(static_cast<size_t>(layer_id));
  at::DimVector shape(x.sizes());
  shape.back() = n;
  at::Tensor y = at::empty(shape, x.options());
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, layer.k});
  at::Tensor out = y.dim() == 2 ? y : y.view({-1, n});
  const int64_t m = rows.size(0);
  if (m == 0) return y;
  maybe_capture(sites()[static_cast<size_t>(layer.site)].definition, layer.site, m, [&] { return Named{{"x", rows}}; });
  serve(
      layer.site, m, [&](const Cell &cell) { return slot_linear(cell, rows, bias, out); },
      [&] { native_linear(layer, rows, bias, out); });
  return y;
}

inline int64_t add_linear(const std::string &definition, int64_t n, int64_t k, int64_t native,
                          const at::Tensor &state) {
  const int64_t site = add_site(definition);
  linear_layers().push_back({site, n, k, native, state});
  return static_cast<int64_t>(linear_layers().size()) - 1;
}

// The layer's weight was loaded anew: its native code has a new state, and its site stays.
inline void update_linear(int64_t layer_id, int64_t native, const at::Tensor &state) {
  LinearLayer &layer = linear_layers().at(static_cast<size_t>(layer_id));
  layer.native = native;
  layer.state = state;
}

inline int64_t linear_site(int64_t layer_id) { return linear_layers().at(static_cast<size_t>(layer_id)).site; }

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def("linear(Tensor x, Tensor? bias, int layer_id, int n) -> Tensor");
  library.def("add_linear(str definition, int n, int k, int native, Tensor state) -> int", add_linear);
  library.def("update_linear(int layer_id, int native, Tensor state) -> ()", update_linear);
  library.def("linear_site(int layer_id) -> int", linear_site);
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) { library.impl("linear", linear); }

}  // namespace polymorph
