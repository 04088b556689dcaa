// Copies of a definition's real inputs, bounded by count and bytes: the first calls, or as a ring the last ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <string>
#include <utility>
#include <vector>

namespace polymorph {

// Inputs by their names in the definition; what is packed at load is not among them.
using Named = std::vector<std::pair<const char *, at::Tensor>>;

struct Captured {
  int64_t site;
  int64_t bytes;
  Named inputs;
};

// One capture at a time. Armed and collected between engine steps; the model's thread appends.
struct Capture {
  std::atomic<int32_t> definition{-1};
  int64_t most_calls = 0;
  int64_t every = 1;
  int64_t seen = 0;
  int64_t most_bytes = 0;
  int64_t bytes = 0;
  int64_t min_m = 1;
  int64_t max_m = INT64_MAX;
  bool ring = false;
  std::deque<Captured> calls;

  // Room for a call of so many bytes; in a ring the oldest calls make it.
  bool make_room(int64_t wanted) {
    if (wanted > most_bytes || most_calls < 1) return false;
    while (ring && !calls.empty() && (static_cast<int64_t>(calls.size()) >= most_calls || bytes + wanted > most_bytes)) {
      bytes -= calls.front().bytes;
      calls.pop_front();
    }
    return static_cast<int64_t>(calls.size()) < most_calls && bytes + wanted <= most_bytes;
  }
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
  if (m < state.min_m || m > state.max_m || state.seen++ % state.every != 0) return;
  if (!state.ring && static_cast<int64_t>(state.calls.size()) >= state.most_calls) return;
  Captured call{site, 0, inputs()};
  for (const auto &input : call.inputs) call.bytes += static_cast<int64_t>(input.second.nbytes());
  if (!state.make_room(call.bytes)) return;
  for (auto &input : call.inputs) input.second = input.second.detach().clone(at::MemoryFormat::Contiguous);
  state.bytes += call.bytes;
  state.calls.push_back(std::move(call));
}

}  // namespace polymorph
