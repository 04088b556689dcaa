// Sites of operations without weights of their own: found by what a call looks like, at the first such call.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <string>

#include "site.h"

namespace polymorph {

inline std::string dtype_name(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bf16" : dtype == at::kHalf ? "f16" : "f32";
}

template <size_t N>
struct KeyedSites {
  using Key = std::array<int64_t, N>;

  // `name()` gives the definition's name; it is asked once for each key.
  template <typename Name>
  int64_t find(const Key &key, const Name &name) {
    for (const auto &entry : known) {
      if (entry.first == key) return entry.second;
    }
    const int64_t site = add_site(name());
    known.emplace_back(key, site);
    return site;
  }

  std::deque<std::pair<Key, int64_t>> known;
};

inline int32_t definition_of(int64_t site) { return sites()[static_cast<size_t>(site)].definition; }

// Rows of a kernel's input: any distance apart, each dense.
inline at::Tensor dense_rows(const at::Tensor &tensor, int64_t width) {
  if (tensor.dim() == 2 && tensor.stride(1) == 1) return tensor;
  return tensor.contiguous().view({-1, width});
}

}  // namespace polymorph
