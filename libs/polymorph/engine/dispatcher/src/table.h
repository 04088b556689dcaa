// Which code serves which site at which M. A table is immutable once engaged; engaging another one swaps a pointer.
#pragma once

#include <ATen/core/Tensor.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "polymorph_kernel.h"

namespace polymorph {

constexpr int kBuckets = 14;  // upper bounds 1, 2, 4 ... 8192; the last one takes all that is larger

inline int bucket_index(int64_t m) {
  if (m <= 1) return 0;
  const int index = 64 - __builtin_clzll(static_cast<unsigned long long>(m - 1));
  return index < kBuckets ? index : kBuckets - 1;
}

// A loaded shared library. It is never closed: a handle costs little, and code that a thread may still run must stay.
struct Library {
  pm_run_fn run = nullptr;
  pm_pack_bytes_fn pack_bytes = nullptr;
  pm_pack_fn pack = nullptr;
};

inline const Library &library(const std::string &path) {
  static std::unordered_map<std::string, Library> loaded;
  const auto found = loaded.find(path);
  if (found != loaded.end()) return found->second;
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK_VALUE(handle != nullptr, "cannot load ", path, ": ", dlerror());
  Library made;
  made.run = reinterpret_cast<pm_run_fn>(dlsym(handle, "pm_run"));
  made.pack_bytes = reinterpret_cast<pm_pack_bytes_fn>(dlsym(handle, "pm_pack_bytes"));
  made.pack = reinterpret_cast<pm_pack_fn>(dlsym(handle, "pm_pack"));
  TORCH_CHECK_VALUE(made.run != nullptr, path, " exports no pm_run: a kernel exports it with C linkage");
  TORCH_CHECK_VALUE((made.pack == nullptr) == (made.pack_bytes == nullptr), path,
                    " exports one of pm_pack and pm_pack_bytes: a kernel exports both or neither");
  return loaded.emplace(path, made).first->second;
}

struct Cell {
  pm_run_fn run = nullptr;  // nullptr: the engine's own code
  int32_t artifact = -1;
  pm_tensor weight{};  // packed, or as the model has it where the kernel packs nothing
};

using Row = std::array<Cell, kBuckets>;

struct Table {
  int64_t epoch = 0;
  std::vector<Row> rows;         // by site
  std::vector<at::Tensor> keep;  // what the cells point into
};

inline std::atomic<const Table *> &current() {
  static std::atomic<const Table *> table{new Table()};
  return table;
}

inline const Cell *cell(int64_t site, int bucket) {
  const Table *table = current().load(std::memory_order_acquire);
  if (static_cast<size_t>(site) >= table->rows.size()) return nullptr;
  const Cell *found = &table->rows[static_cast<size_t>(site)][static_cast<size_t>(bucket)];
  return found->run != nullptr ? found : nullptr;
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

}  // namespace polymorph
