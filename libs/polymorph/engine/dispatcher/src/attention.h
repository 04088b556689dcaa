// polymorph::attention: decode attention over the paged cache, one query token of each sequence.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "keyed.h"

namespace polymorph {

inline int64_t attention_site(int64_t heads, int64_t kv_heads, int64_t d, int64_t block, at::ScalarType dtype) {
  static KeyedSites<5> known;
  return known.find({heads, kv_heads, d, block, static_cast<int64_t>(dtype)}, [&] {
    return "attn_decode_q" + std::to_string(heads) + "_kv" + std::to_string(kv_heads) + "_d" + std::to_string(d) +
           "_b" + std::to_string(block) + "_" + dtype_name(dtype);
  });
}

// One call as vLLM makes it. A cache is [blocks, KV heads, block, D] by its shape; what lies in a block is known by ISA
// (hooks/attention.py lets only those through whose keys lie as [D, block]).
struct Decode {
  const at::Tensor &query, &key_cache, &value_cache, &output, &query_start_loc, &seq_lens, &block_table, &metadata;
  double scale;

  int64_t m() const { return query.size(0); }
  int64_t block() const { return value_cache.size(2); }
  const int32_t *lengths() const { return seq_lens.data_ptr<int32_t>(); }

  int64_t longest() const { return m() == 0 ? 0 : *std::max_element(lengths(), lengths() + m()); }

  // The keys by the shape that they really have.
  at::Tensor keys(const at::Tensor &cache) const {
    const int64_t d = cache.size(3), tokens = cache.size(2);
    return cache.as_strided({cache.size(0), cache.size(1), d, tokens}, {cache.stride(0), cache.stride(1), tokens, 1});
  }
};

inline void native_attention(const Decode &call) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow("_C::cpu_attention_with_kv_cache", "");
  const c10::IValue absent;
  call_boxed(native, call.query, call.key_cache, call.value_cache, call.output, call.query_start_loc, call.seq_lens,
             call.scale, true, absent, int64_t{-1}, call.block_table, 0.0, call.metadata, absent, absent);
}

// The blocks that the sequences use, numbered anew: a whole cache is far too much to keep.
inline Named attention_inputs(const Decode &call) {
  std::unordered_map<int32_t, int32_t> number;
  std::vector<int64_t> used;
  const int64_t pages = (call.longest() + call.block() - 1) / call.block();
  at::Tensor table = at::zeros({call.m(), pages}, at::TensorOptions().dtype(at::kInt));
  const auto from = call.block_table.accessor<int32_t, 2>();
  auto to = table.accessor<int32_t, 2>();
  for (int64_t row = 0; row < call.m(); ++row) {
    for (int64_t page = 0; page * call.block() < call.lengths()[row]; ++page) {
      const auto [place, is_new] = number.emplace(from[row][page], static_cast<int32_t>(used.size()));
      if (is_new) used.push_back(from[row][page]);
      to[row][page] = place->second;
    }
  }
  const at::Tensor rows = at::tensor(used, at::TensorOptions().dtype(at::kLong));
  return Named{{"q", call.query},
               {"key_cache", at::index_select(call.keys(call.key_cache), 0, rows)},
               {"value_cache", at::index_select(call.value_cache, 0, rows)},
               {"block_table", table},
               {"seq_lens", call.seq_lens},
               {"scale", scalar_of(call.scale)}};
}

inline int32_t slot_attention(const Cell &cell, const Decode &call) {
  float scale = static_cast<float>(call.scale);
  const pm_tensor scalar{&scale, {1}, {1}, 1, PM_F32};
  const pm_tensor inputs[6] = {view_of(call.query),       view_of(call.keys(call.key_cache)), view_of(call.value_cache),
                               view_of(call.block_table), view_of(call.seq_lens),             scalar};
  const pm_tensor output = view_of(call.output);
  return cell.run(context(), inputs, 6, &output, 1);
}

// A kernel takes what the definition tells: dtypes, one row of the table and one length for each query, blocks that are
// dense inside.
inline bool is_defined(const Decode &call) {
  const at::ScalarType dtype = call.query.scalar_type();
  const auto is_cache = [&](const at::Tensor &cache) {
    return cache.dim() == 4 && cache.scalar_type() == dtype && cache.stride(3) == 1 && cache.stride(2) == cache.size(3);
  };
  return (dtype == at::kFloat || dtype == at::kBFloat16) && call.query.dim() == 3 && call.output.dim() == 3 &&
         call.output.scalar_type() == dtype && is_cache(call.key_cache) && is_cache(call.value_cache) &&
         call.seq_lens.scalar_type() == at::kInt && call.seq_lens.is_contiguous() && call.seq_lens.numel() == call.m() &&
         call.block_table.scalar_type() == at::kInt && call.block_table.dim() == 2 &&
         call.block_table.size(0) == call.m();
}

inline void attention(const at::Tensor &query, const at::Tensor &key_cache, const at::Tensor &value_cache,
                      const at::Tensor &output, const at::Tensor &query_start_loc, const at::Tensor &seq_lens,
                      double scale, const at::Tensor &block_table, const at::Tensor &metadata) {
  const Decode call{query, key_cache, value_cache, output, query_start_loc, seq_lens, block_table, metadata, scale};
  if (call.m() == 0 || !is_defined(call)) return native_attention(call);
  const int64_t site =
      attention_site(query.size(1), key_cache.size(1), query.size(2), call.block(), query.scalar_type());
  maybe_capture(definition_of(site), site, call.m(), [&] { return attention_inputs(call); });
  serve(
      site, call.m(), [&](const Cell &cell) { return slot_attention(cell, call); }, [&] { native_attention(call); },
      [&] { return call.longest(); });
}

// A model's layers have their site before the first call.
inline void add_attention(int64_t heads, int64_t kv_heads, int64_t d, int64_t block, at::ScalarType dtype) {
  attention_site(heads, kv_heads, d, block, dtype);
}

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def(
      "attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a!) output, Tensor query_start_loc, "
      "Tensor seq_lens, float scale, Tensor block_table, Tensor metadata) -> ()");
  library.def("add_attention(int heads, int kv_heads, int d, int block, ScalarType dtype) -> ()", add_attention);
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) { library.impl("attention", attention); }

}  // namespace polymorph
