// polymorph::top_k_top_p: which tokens may be sampled. The engine's own code is Python, so the operator only serves where
// a kernel can, and is told what the engine's own code took where none could.
#pragma once

#include <torch/library.h>

#include <optional>

#include "keyed.h"

namespace polymorph {

inline int64_t sampling_site(int64_t vocabulary) {
  static KeyedSites<1> known;
  return known.find({vocabulary}, [&] { return "top_k_top_p_v" + std::to_string(vocabulary) + "_f32"; });
}

using OptionalRows = std::optional<at::Tensor>;

// Masks the logits in place and tells true, where a kernel is engaged for so many rows; else it changes nothing.
inline bool top_k_top_p(const at::Tensor &logits, const OptionalRows &k, const OptionalRows &p) {
  const int64_t began = now_ns(), m = logits.size(0), site = sampling_site(logits.size(1));
  maybe_capture(definition_of(site), site, m, [&] {
    Named inputs{{"logits", logits}};
    if (k.has_value()) inputs.emplace_back("k", *k);
    if (p.has_value()) inputs.emplace_back("p", *p);
    return inputs;
  });
  const auto kernel = [&](const Cell &cell) {
    const pm_tensor inputs[3] = {view_of(logits), k.has_value() ? view_of(*k) : pm_tensor{},
                                 p.has_value() ? view_of(*p) : pm_tensor{}};
    const pm_tensor output = view_of(logits);
    return cell.run(context(), inputs, 3, &output, 1);
  };
  return served_by_kernel(site, m, began, kernel, NoFeature{});
}

// The engine's own code took `nanoseconds` for m rows.
inline void count_native_top_k_top_p(int64_t vocabulary, int64_t m, int64_t nanoseconds) {
  count_native(sampling_site(vocabulary), m, nanoseconds);
}

// A model's vocabulary has its site before the first call.
inline void add_top_k_top_p(int64_t vocabulary) { sampling_site(vocabulary); }

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def("top_k_top_p(Tensor(a!) logits, Tensor? k, Tensor? p) -> bool");
  library.def("count_native_top_k_top_p(int vocabulary, int m, int nanoseconds) -> ()", count_native_top_k_top_p);
  library.def("add_top_k_top_p(int vocabulary) -> ()", add_top_k_top_p);
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) { library.impl("top_k_top_p", top_k_top_p); }

}  // namespace polymorph
