// Self time by operator over one engine step, taken only in the steps that are sampled: torch's observers are switched on
// for the thread that runs the model, and off again, so all other steps pay nothing.
#pragma once

#include <ATen/record_function.h>

#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "counters.h"

namespace polymorph {

struct Frame {
  std::string name;
  int64_t began;
  int64_t inside;  // nanoseconds of the calls within this one
};

struct SelfTime {
  int64_t calls = 0;
  int64_t nanoseconds = 0;
};

// Used by the model's thread alone.
struct Profile {
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  int64_t began = 0;
  std::vector<Frame> open;
  std::unordered_map<std::string, SelfTime> by_name;
};

inline Profile &profile() {
  static Profile instance;
  return instance;
}

inline std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction &function) {
  profile().open.push_back({function.name(), now_ns(), 0});
  return nullptr;
}

inline void operator_ends(const at::RecordFunction &, at::ObserverContext *) {
  Profile &state = profile();
  if (state.open.empty()) return;  // it began before the profile did
  const Frame frame = std::move(state.open.back());
  state.open.pop_back();
  const int64_t took = now_ns() - frame.began;
  if (!state.open.empty()) state.open.back().inside += took;
  SelfTime &sum = state.by_name[frame.name];
  ++sum.calls;
  sum.nanoseconds += took - frame.inside;
}

inline void profile_start() {
  Profile &state = profile();
  TORCH_CHECK(state.handle == at::INVALID_CALLBACK_HANDLE, "a profile runs already: stop it first");
  state.open.clear();
  state.by_name.clear();
  state.handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(operator_begins, operator_ends).scopes({at::RecordScope::FUNCTION}));
  state.began = now_ns();
}

// {"wall_ns": ..., "operators": {name: {"calls": ..., "ns": self time}}}
inline std::string profile_stop() {
  Profile &state = profile();
  TORCH_CHECK(state.handle != at::INVALID_CALLBACK_HANDLE, "no profile runs: start one first");
  const int64_t wall = now_ns() - state.began;
  at::removeCallback(state.handle);
  state.handle = at::INVALID_CALLBACK_HANDLE;
  std::ostringstream out;
  out << "{\"wall_ns\":" << wall << ",\"operators\":{";
  const char *comma = "";
  for (const auto &entry : state.by_name) {
    out << comma << '"' << entry.first << "\":{\"calls\":" << entry.second.calls
        << ",\"ns\":" << entry.second.nanoseconds << '}';
    comma = ",";
  }
  out << "}}";
  return out.str();
}

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def("profile_start() -> ()", profile_start);
  library.def("profile_stop() -> str", profile_stop);
}

}  // namespace polymorph
