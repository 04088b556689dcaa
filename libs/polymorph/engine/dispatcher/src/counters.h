// Calls and nanoseconds by definition and bucket of M, and by artifact: what was served, and by what.
#pragma once

#include <time.h>

#include <array>
#include <atomic>
#include <deque>
#include <sstream>
#include <string>

#include "table.h"

namespace polymorph {

using Count = std::atomic<int64_t>;

struct Tally {
  Count calls{0};
  Count nanoseconds{0};
  void add(int64_t ns) {
    calls.fetch_add(1, std::memory_order_relaxed);
    nanoseconds.fetch_add(ns, std::memory_order_relaxed);
  }
  void reset() {
    calls.store(0, std::memory_order_relaxed);
    nanoseconds.store(0, std::memory_order_relaxed);
  }
};

using ByBucket = std::array<Tally, kBuckets>;

struct DefinitionCounts {
  std::string name;
  Tally native;
  ByBucket by_bucket;
  std::deque<std::deque<Count>> experts;  // of each layer, the tokens of each expert; empty without experts
};

struct ArtifactCounts {
  std::string digest;
  Tally served;
  ByBucket by_bucket;
  Count errors{0};
};

// Deques: growing one moves nothing that a call may be counting into.
inline std::deque<DefinitionCounts> &definitions() {
  static std::deque<DefinitionCounts> all;
  return all;
}

inline std::deque<ArtifactCounts> &artifacts() {
  static std::deque<ArtifactCounts> all;
  return all;
}

template <typename Counts>
int32_t interned(std::deque<Counts> &all, std::string Counts::*key, const std::string &text) {
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].*key == text) return static_cast<int32_t>(i);
  }
  all.emplace_back();
  all.back().*key = text;
  return static_cast<int32_t>(all.size() - 1);
}

inline int64_t now_ns() {
  timespec at{};
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000000LL + at.tv_nsec;
}

inline void write_tally(std::ostream &out, const Tally &tally) {
  out << "{\"calls\":" << tally.calls.load() << ",\"ns\":" << tally.nanoseconds.load() << "}";
}

inline void write_by_m(std::ostream &out, const ByBucket &by_bucket) {
  out << ",\"by_m\":{";
  const char *comma = "";
  for (int i = 0; i < kBuckets; ++i) {
    if (by_bucket[static_cast<size_t>(i)].calls.load() == 0) continue;
    out << comma << '"' << (1 << i) << "\":";
    write_tally(out, by_bucket[static_cast<size_t>(i)]);
    comma = ",";
  }
  out << '}';
}

inline void write_experts(std::ostream &out, const std::deque<std::deque<Count>> &layers) {
  if (layers.empty()) return;
  out << ",\"experts\":[";
  const char *next_layer = "";
  for (const auto &layer : layers) {
    out << next_layer << '[';
    const char *comma = "";
    for (const auto &tokens : layer) {
      out << comma << tokens.load(std::memory_order_relaxed);
      comma = ",";
    }
    out << ']';
    next_layer = ",";
  }
  out << ']';
}

inline std::string counters_json() {
  std::ostringstream out;
  out << "{\"epoch\":" << current().load()->epoch << ",\"definitions\":{";
  const char *comma = "";
  for (const auto &counts : definitions()) {
    out << comma << '"' << counts.name << "\":{\"native\":";
    write_tally(out, counts.native);
    write_by_m(out, counts.by_bucket);
    write_experts(out, counts.experts);
    out << '}';
    comma = ",";
  }
  out << "},\"artifacts\":{";
  comma = "";
  for (const auto &counts : artifacts()) {
    out << comma << '"' << counts.digest << "\":{\"served\":";
    write_tally(out, counts.served);
    write_by_m(out, counts.by_bucket);
    out << ",\"errors\":" << counts.errors.load() << '}';
    comma = ",";
  }
  out << "}}";
  return out.str();
}

inline void reset_counters() {
  for (auto &counts : definitions()) {
    counts.native.reset();
    for (auto &tally : counts.by_bucket) tally.reset();
    for (auto &layer : counts.experts) {
      for (auto &tokens : layer) tokens.store(0, std::memory_order_relaxed);
    }
  }
  for (auto &counts : artifacts()) {
    counts.served.reset();
    for (auto &tally : counts.by_bucket) tally.reset();
    counts.errors.store(0);
  }
}

}  // namespace polymorph
