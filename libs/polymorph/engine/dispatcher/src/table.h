// Which code serves which site at which M. A table is immutable once engaged; engaging another one swaps a pointer.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "library.h"
#include "polymorph_kernel.h"

namespace polymorph {

constexpr int kBuckets = 14;  // upper bounds 1, 2, 4 ... 8192; the last one takes all that is larger
constexpr int kMostPacked = 2;

inline int bucket_index(int64_t m) {
  if (m <= 1) return 0;
  const int index = 64 - __builtin_clzll(static_cast<unsigned long long>(m - 1));
  return index < kBuckets ? index : kBuckets - 1;
}

// One kernel for one site and bucket, for calls whose feature (see the definition's x_polymorph.feature) lies in range.
struct Cell {
  pm_run_fn run = nullptr;
  int32_t artifact = -1;
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
  std::array<pm_tensor, kMostPacked> packed{};  // or as the model has them where the kernel packs nothing

  bool any_feature() const { return least <= 0 && most == std::numeric_limits<int64_t>::max(); }
};

using Row = std::array<std::vector<Cell>, kBuckets>;

struct Table {
  int64_t epoch = 0;
  std::vector<Row> rows;         // by site
  std::vector<at::Tensor> keep;  // what the cells point into
  std::set<std::string> paths;   // libraries that the cells call
};

inline std::atomic<const Table *> &current() {
  static std::atomic<const Table *> table{new Table()};
  return table;
}

// The kernel for a call, nullptr for the engine's own code. `feature` is computed only where a cell asks for it.
template <typename Feature>
const Cell *cell(const Table *table, int64_t site, int bucket, const Feature &feature) {
  if (static_cast<size_t>(site) >= table->rows.size()) return nullptr;
  const std::vector<Cell> &cells = table->rows[static_cast<size_t>(site)][static_cast<size_t>(bucket)];
  if (cells.empty()) return nullptr;
  if (cells.size() == 1 && cells[0].any_feature()) return cells.data();
  const int64_t found = feature();
  for (const Cell &candidate : cells) {
    if (candidate.least <= found && found <= candidate.most) return &candidate;
  }
  return nullptr;
}

// The table that is being filled; commit makes it the current one.
inline std::unique_ptr<Table> &staged() {
  static std::unique_ptr<Table> table;
  return table;
}

inline Table &staged_or_raise() {
  TORCH_CHECK(staged() != nullptr, "no table is being filled: call table_begin first");
  return *staged();
}

// Libraries of the last tables, newest last: what a way back to one of them needs stays loaded.
inline std::deque<std::set<std::string>> &history() {
  static std::deque<std::set<std::string>> paths;
  return paths;
}

inline int64_t &kept_epochs() {
  static int64_t count = 4;
  return count;
}

// Unloads what neither the current table nor one of the kept ones names. Between two steps, so no call is in it.
inline void unload_unreachable() {
  while (static_cast<int64_t>(history().size()) > kept_epochs()) history().pop_front();
  std::set<std::string> reachable = current().load()->paths;
  for (const auto &paths : history()) reachable.insert(paths.begin(), paths.end());
  for (auto at = libraries().begin(); at != libraries().end();) {
    if (reachable.count(at->first) != 0) {
      ++at;
      continue;
    }
    dlclose(at->second.handle);
    at = libraries().erase(at);
  }
}

}  // namespace polymorph
