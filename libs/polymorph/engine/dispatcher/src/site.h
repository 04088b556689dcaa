// Sites: the places in the model that have a slot. One call of a site goes through `serve`.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "capture.h"
#include "context.h"
#include "counters.h"
#include "flight.h"
#include "table.h"

namespace polymorph {

struct Site {
  int32_t definition = -1;
};

inline std::deque<Site> &sites() {
  static std::deque<Site> all;
  return all;
}

inline int64_t add_site(const std::string &definition) {
  sites().push_back(Site{interned(definitions(), &DefinitionCounts::name, definition)});
  return static_cast<int64_t>(sites().size()) - 1;
}

inline int32_t pm_dtype_of(const at::Tensor &tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return PM_F32;
    case at::kBFloat16: return PM_BF16;
    case at::kHalf: return PM_F16;
    case at::kDouble: return PM_F64;
    case at::kByte: return PM_U8;
    case at::kInt: return PM_I32;
    case at::kLong: return PM_I64;
    default: TORCH_CHECK_VALUE(false, "no kernel takes tensors of ", tensor.scalar_type()); return -1;
  }
}

inline pm_tensor view_of(const at::Tensor &tensor) {
  TORCH_CHECK_VALUE(tensor.dim() <= PM_MAX_DIMS, "a tensor of ", tensor.dim(), " dimensions: at most ", PM_MAX_DIMS);
  pm_tensor view{};
  view.data = tensor.data_ptr();
  view.ndim = static_cast<int32_t>(tensor.dim());
  view.dtype = pm_dtype_of(tensor);
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    view.sizes[i] = tensor.size(i);
    view.strides[i] = tensor.stride(i);
  }
  return view;
}

// A scalar parameter as a kernel's tensor of one float32.
inline at::Tensor scalar_of(double value) { return at::full({1}, value, at::TensorOptions().dtype(at::kFloat)); }

// Calls an operator by its schema, whatever C++ types it was registered with; arguments left out have their defaults.
template <typename... Arguments>
void call_boxed(const c10::OperatorHandle &op, Arguments &&...arguments) {
  torch::jit::Stack stack;
  stack.reserve(sizeof...(arguments));
  (stack.emplace_back(arguments), ...);
  const auto &schema = op.schema().arguments();
  for (size_t i = stack.size(); i < schema.size(); ++i) stack.emplace_back(schema[i].default_value().value());
  op.callBoxed(&stack);
}

struct NoFeature {
  int64_t operator()() const { return 0; }
};

inline DefinitionCounts &counts_of(int64_t site) {
  return definitions()[static_cast<size_t>(sites()[static_cast<size_t>(site)].definition)];
}

inline void count_native(int64_t site, int64_t m, int64_t took) {
  DefinitionCounts &counts = counts_of(site);
  counts.native.add(took);
  counts.by_bucket[static_cast<size_t>(bucket_index(m))].add(took);
}

// Runs `kernel(cell)` and tells true where the table has code for this site and M that can serve; else false.
// `feature()` is what else decides, a number, where the definition has one.
template <typename Kernel, typename Feature>
bool served_by_kernel(int64_t site, int64_t m, int64_t began, const Kernel &kernel, const Feature &feature) {
  const auto bucket = static_cast<size_t>(bucket_index(m));
  const Table *table = current().load(std::memory_order_acquire);
  const Cell *code = cell(table, site, static_cast<int>(bucket), feature);
  if (code == nullptr) return false;
  ArtifactCounts &artifact = artifacts()[static_cast<size_t>(code->artifact)];
  take_off(artifact.digest, table->epoch, began);
  const int32_t status = kernel(*code);
  land();
  if (status != 0) {
    artifact.errors.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  const int64_t took = now_ns() - began;
  artifact.served.add(took);
  artifact.by_bucket[bucket].add(took);
  counts_of(site).by_bucket[bucket].add(took);
  return true;
}

// Runs `kernel(cell)` where it can serve, else `native()`.
template <typename Kernel, typename Native, typename Feature = NoFeature>
void serve(int64_t site, int64_t m, const Kernel &kernel, const Native &native, const Feature &feature = {}) {
  const int64_t began = now_ns();
  if (served_by_kernel(site, m, began, kernel, feature)) return;
  native();
  count_native(site, m, now_ns() - began);
}

}  // namespace polymorph
