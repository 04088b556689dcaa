// Copies of a definition's real inputs, for the next few calls, bounded by count and bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace polymorph {

struct Captured {
  int64_t site;
  std::vector<at::Tensor> inputs;
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

inline void maybe_capture(int32_t definition, int64_t site, int64_t m, at::TensorList inputs) {
  Capture &state = capture();
  if (state.definition.load(std::memory_order_relaxed) != definition) return;
  if (state.remaining == 0 || m < state.min_m || m > state.max_m || state.seen++ % state.every != 0) return;
  int64_t bytes = 0;
  for (const auto &input : inputs) bytes += static_cast<int64_t>(input.nbytes());
  if (bytes > state.bytes_left) return;
  Captured call{site, {}};
  for (const auto &input : inputs) call.inputs.push_back(input.detach().clone());
  state.calls.push_back(std::move(call));
  state.bytes_left -= bytes;
  --state.remaining;
}

}  // namespace polymorph
