// Loaded shared libraries of kernels.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <string>
#include <unordered_map>

#include "polymorph_kernel.h"

namespace polymorph {

struct Library {
  void *handle = nullptr;
  pm_run_fn run = nullptr;
  pm_pack_bytes_fn pack_bytes = nullptr;
  pm_pack_fn pack = nullptr;
};

inline std::unordered_map<std::string, Library> &libraries() {
  static std::unordered_map<std::string, Library> loaded;
  return loaded;
}

inline const Library &library(const std::string &path) {
  const auto found = libraries().find(path);
  if (found != libraries().end()) return found->second;
  Library made;
  made.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK_VALUE(made.handle != nullptr, "cannot load ", path, ": ", dlerror());
  made.run = reinterpret_cast<pm_run_fn>(dlsym(made.handle, "pm_run"));
  made.pack_bytes = reinterpret_cast<pm_pack_bytes_fn>(dlsym(made.handle, "pm_pack_bytes"));
  made.pack = reinterpret_cast<pm_pack_fn>(dlsym(made.handle, "pm_pack"));
  const bool runs = made.run != nullptr;
  const bool packs_whole = (made.pack == nullptr) == (made.pack_bytes == nullptr);
  if (!runs || !packs_whole) dlclose(made.handle);
  TORCH_CHECK_VALUE(runs, path, " exports no pm_run: a kernel exports it with C linkage");
  TORCH_CHECK_VALUE(packs_whole, path, " exports one of pm_pack and pm_pack_bytes: a kernel exports both or neither");
  return libraries().emplace(path, made).first->second;
}

}  // namespace polymorph
