// Copies of a definition's real inputs, for the next few calls, bounded by count and bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

namespace polymorph {

// Inputs by their names in the definition; what is packed at load is not among them.
using Named = std::vector<std::pair<const char *, at::Tensor>>;

struct Captured {
  int64_t site;
  Named inputs;
};

// One capture at a time. Armed and collected between engine steps; the model's thread appends.
struct Capture {
  std::atomic<int32_t> definition{-1};
  int64_t remaining = 0;
  int64_t every = 1;
  int64_t seen = 0;
  int64_t bytes_left = 0;
  int64_t min_m = 1;
  int64_t max_m = INT64_MAX;
  std::vector<Captured> calls;
};

inline Capture &capture() {
  static Capture instance;
  return instance;
}

// `inputs()` gives a `Named`; it is asked only for a call that is kept.
template <typename Inputs>
void maybe_capture(int32_t definition, int64_t site, int64_t m, const Inputs &inputs) {
  Capture &state = capture();
  if (state.definition.load(std::memory_order_relaxed) != definition) return;
  if (state.remaining == 0 || m < state.min_m || m > state.max_m || state.seen++ % state.every != 0) return;
  Captured call{site, inputs()};
  int64_t bytes = 0;
  for (const auto &input : call.inputs) bytes += static_cast<int64_t>(input.second.nbytes());
  if (bytes > state.bytes_left) return;
  for (auto &input : call.inputs) input.second = input.second.detach().clone(at::MemoryFormat::Contiguous);
  state.calls.push_back(std::move(call));
  state.bytes_left -= bytes;
  --state.remaining;
}

}  // namespace polymorph
