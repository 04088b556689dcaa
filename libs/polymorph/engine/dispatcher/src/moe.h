// polymorph::fused_moe: the experts of one mixture-of-experts layer, by the kernel in its slot or by vLLM's own code.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "site.h"

namespace polymorph {

struct MoeLayer {
  int64_t site;
  std::string isa;            // which of its codes vLLM chose for the layer
  std::deque<Count> *tokens;  // by expert
};

inline std::deque<MoeLayer> &moe_layers() {
  static std::deque<MoeLayer> all;
  return all;
}

// Only the model's thread counts: a plain addition, read by whoever reads counters.
inline void count_experts(const MoeLayer &layer, const at::Tensor &topk_ids) {
  const auto *ids = topk_ids.const_data_ptr<int32_t>();
  const auto experts = static_cast<int64_t>(layer.tokens->size());
  for (int64_t i = 0; i < topk_ids.numel(); ++i) {
    if (ids[i] < 0 || ids[i] >= experts) continue;
    Count &count = (*layer.tokens)[static_cast<size_t>(ids[i])];
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
}

// The feature of the definition: the percent of the tokens that the busiest expert serves.
inline int64_t busiest_percent(const at::Tensor &topk_ids, size_t experts) {
  static thread_local std::vector<int64_t> tokens;
  tokens.assign(experts, 0);
  const auto *ids = topk_ids.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < topk_ids.numel(); ++i) {
    if (ids[i] >= 0 && static_cast<size_t>(ids[i]) < experts) ++tokens[static_cast<size_t>(ids[i])];
  }
  return *std::max_element(tokens.begin(), tokens.end()) * 100 / topk_ids.size(0);
}

// What vLLM's router gives. Anything else has no definition, so it is neither counted nor given to a kernel.
inline bool is_routing(const at::Tensor &topk_weights, const at::Tensor &topk_ids) {
  return topk_ids.scalar_type() == at::kInt && topk_weights.scalar_type() == at::kFloat && topk_ids.dim() == 2 &&
         topk_ids.is_contiguous() && topk_weights.is_contiguous();
}

// `w13` and `w2` are as vLLM packed them, for its own code alone.
inline void fused_moe(const at::Tensor &output, const at::Tensor &x, const at::Tensor &w13, const at::Tensor &w2,
                      const at::Tensor &topk_weights, const at::Tensor &topk_ids, int64_t layer_id) {
  const MoeLayer &layer = moe_layers().at(static_cast<size_t>(layer_id));
  const auto native = [&] {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("_C::cpu_fused_moe", "");
    const std::optional<at::Tensor> no_bias;
    call_boxed(op, output, x, w13, w2, no_bias, no_bias, topk_weights, topk_ids, false, std::string("silu"), layer.isa);
  };
  const int64_t m = x.size(0);
  if (m == 0) return;
  if (x.dim() != 2 || output.dim() != 2 || !is_routing(topk_weights, topk_ids)) return native();
  count_experts(layer, topk_ids);
  maybe_capture(sites()[static_cast<size_t>(layer.site)].definition, layer.site, m,
                [&] { return Named{{"x", x}, {"topk_weights", topk_weights}, {"topk_ids", topk_ids}}; });
  const auto kernel = [&](const Cell &cell) {
    const pm_tensor inputs[5] = {view_of(x), cell.packed[0], cell.packed[1], view_of(topk_weights), view_of(topk_ids)};
    const pm_tensor written = view_of(output);
    return cell.run(context(), inputs, 5, &written, 1);
  };
  serve(layer.site, m, kernel, native, [&] { return busiest_percent(topk_ids, layer.tokens->size()); });
}

inline int64_t add_moe(const std::string &definition, int64_t experts, const std::string &isa) {
  const int64_t site = add_site(definition);
  auto &counts = definitions()[static_cast<size_t>(sites()[static_cast<size_t>(site)].definition)];
  counts.experts.emplace_back(static_cast<size_t>(experts));
  moe_layers().push_back({site, isa, &counts.experts.back()});
  return static_cast<int64_t>(moe_layers().size()) - 1;
}

inline int64_t moe_site(int64_t layer_id) { return moe_layers().at(static_cast<size_t>(layer_id)).site; }

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def(
      "fused_moe(Tensor(a!) output, Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
      "int layer_id) -> ()");
  library.def("add_moe(str definition, int experts, str isa) -> int", add_moe);
  library.def("moe_site(int layer_id) -> int", moe_site);
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) { library.impl("fused_moe", fused_moe); }

}  // namespace polymorph
