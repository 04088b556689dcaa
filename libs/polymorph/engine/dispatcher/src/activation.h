// polymorph::silu_and_mul: the gated activation; its sites are found by width and dtype at the first call.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>

#include <torch/library.h>

#include "keyed.h"

namespace polymorph {

inline int64_t silu_site(const at::Tensor &x, int64_t d) {
  static KeyedSites<2> known;
  const auto dtype = x.scalar_type();
  return known.find({d, static_cast<int64_t>(dtype)},
                    [&] { return "silu_and_mul_d" + std::to_string(d) + "_" + dtype_name(dtype); });
}

inline at::Tensor silu_and_mul(const at::Tensor &x) {
  const int64_t d = x.size(-1) / 2;
  TORCH_CHECK_VALUE(x.size(-1) == 2 * d, "a row of ", x.size(-1), " has no two halves");
  at::DimVector shape(x.sizes());
  shape.back() = d;
  at::Tensor y = at::empty(shape, x.options());
  if (y.numel() == 0) return y;
  const at::Tensor rows = dense_rows(x, 2 * d);
  const at::Tensor out = y.dim() == 2 ? y : y.view({-1, d});
  const int64_t site = silu_site(x, d);
  maybe_capture(definition_of(site), site, rows.size(0), [&] { return Named{{"x", rows}}; });
  const auto kernel = [&](const Cell &cell) {
    const pm_tensor input = view_of(rows), output = view_of(out);
    return cell.run(context(), &input, 1, &output, 1);
  };
  serve(site, rows.size(0), kernel, [&] {
    at::Tensor target = out;
    at::silu_out(target, rows.narrow(1, 0, d));  // vLLM's own: F.silu(x[..., :d]) * x[..., d:]
    target.mul_(rows.narrow(1, d, d));
  });
  return y;
}

TORCH_LIBRARY_FRAGMENT(polymorph, library) { library.def("silu_and_mul(Tensor x) -> Tensor"); }

TORCH_LIBRARY_IMPL(polymorph, CPU, library) { library.impl("silu_and_mul", silu_and_mul); }

}  // namespace polymorph
