// polymorph::rotary (and rotary_, in place) and polymorph::qk_norm_rotary: query and key turned by position, after a norm of
// each head or without; their sites are found by heads, style and dtype at the first call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <torch/library.h>

#include <tuple>

#include "keyed.h"

namespace polymorph {

struct Turned {
  const at::Tensor &positions, &query, &key, &cache;
  int64_t head_size;
  bool neox;
};

inline int64_t rotary_site(const Turned &call, bool norm) {
  static KeyedSites<7> known;
  const int64_t width = call.head_size, queries = call.query.size(-1) / width, keys = call.key.size(-1) / width;
  const int64_t turned = call.cache.size(-1);
  const auto dtype = call.query.scalar_type();
  return known.find({norm, queries, keys, width, turned, call.neox, static_cast<int64_t>(dtype)}, [&] {
    return std::string(norm ? "qk_norm_rotary_q" : "rotary_q") + std::to_string(queries) + "_k" +
           std::to_string(keys) + "_d" + std::to_string(width) + "_r" + std::to_string(turned) +
           (call.neox ? "_neox_" : "_gptj_") + dtype_name(dtype);
  });
}

// The engine's own operator turns in place.
inline void native_rotary(const Turned &call, const at::Tensor &query, const at::Tensor &key) {
  static const auto native = c10::Dispatcher::singleton().findSchemaOrThrow("_C::rotary_embedding", "");
  call_boxed(native, call.positions, query, key, call.head_size, call.cache, call.neox);
}

inline at::Tensor dense_like(const at::Tensor &tensor) {
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

// What a kernel may index: the rows of the cache up to the last position of the call.
inline at::Tensor used_rows(const at::Tensor &cache, const at::Tensor &positions) {
  return cache.narrow(0, 0, std::min(cache.size(0), positions.max().item<int64_t>() + 1));
}

// What a kernel takes: one position for each row of query and key.
inline bool is_plain(const Turned &call) {
  return call.positions.dim() == 1 && call.query.dim() == 2 && call.key.dim() == 2 && call.query.stride(1) == 1 &&
         call.key.stride(1) == 1 && call.positions.scalar_type() == at::kLong &&
         call.cache.scalar_type() == call.query.scalar_type();
}

// Turns into `q` and `k`, which may be query and key themselves.
template <typename Native>
void turn(const Turned &call, const at::Tensor &q, const at::Tensor &k, const Native &native) {
  const int64_t m = call.positions.numel();
  if (m == 0) return;
  if (!is_plain(call)) return native();
  const int64_t site = rotary_site(call, false);
  maybe_capture(definition_of(site), site, m, [&] {
    return Named{{"positions", call.positions},
                 {"query", call.query},
                 {"key", call.key},
                 {"cos_sin_cache", used_rows(call.cache, call.positions)}};
  });
  const auto kernel = [&](const Cell &cell) {
    const pm_tensor inputs[4] = {view_of(call.positions), view_of(call.query), view_of(call.key), view_of(call.cache)};
    const pm_tensor outputs[2] = {view_of(q), view_of(k)};
    return cell.run(context(), inputs, 4, outputs, 2);
  };
  serve(site, m, kernel, native);
}

inline std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor &positions, const at::Tensor &query,
                                                const at::Tensor &key, const at::Tensor &cache, int64_t head_size,
                                                bool neox) {
  const Turned call{positions, query, key, cache, head_size, neox};
  at::Tensor q = dense_like(query), k = dense_like(key);
  turn(call, q, k, [&] {
    q.copy_(query);
    k.copy_(key);
    native_rotary(call, q, k);
  });
  return {q, k};
}

// Without a graph nothing else reads what the projection gave: the engine turns it in place, and so do we.
inline void rotary_in_place(const at::Tensor &positions, const at::Tensor &query, const at::Tensor &key,
                            const at::Tensor &cache, int64_t head_size, bool neox) {
  const Turned call{positions, query, key, cache, head_size, neox};
  turn(call, query, key, [&] { native_rotary(call, query, key); });
}

inline std::tuple<at::Tensor, at::Tensor> qk_norm_rotary(const at::Tensor &positions, const at::Tensor &query,
                                                        const at::Tensor &key, const at::Tensor &cache,
                                                        const at::Tensor &query_weight, const at::Tensor &key_weight,
                                                        double eps, int64_t head_size, bool neox) {
  static const auto norm = c10::Dispatcher::singleton().findSchemaOrThrow("_C::rms_norm", "");
  const Turned call{positions, query, key, cache, head_size, neox};
  at::Tensor q = dense_like(query), k = dense_like(key);
  const int64_t m = positions.numel();
  if (m == 0) return {q, k};
  const auto native = [&] {
    const at::Tensor q_heads = q.view({-1, head_size}), k_heads = k.view({-1, head_size});
    call_boxed(norm, q_heads, query.contiguous().view({-1, head_size}), query_weight, eps);
    call_boxed(norm, k_heads, key.contiguous().view({-1, head_size}), key_weight, eps);
    native_rotary(call, q, k);
  };
  if (!is_plain(call)) {
    native();
    return {q, k};
  }
  const int64_t site = rotary_site(call, true);
  maybe_capture(definition_of(site), site, m, [&] {
    return Named{{"positions", positions},
                 {"query", query},
                 {"key", key},
                 {"cos_sin_cache", used_rows(cache, positions)},
                 {"query_weight", query_weight},
                 {"key_weight", key_weight},
                 {"eps", scalar_of(eps)}};
  });
  const auto kernel = [&](const Cell &cell) {
    float epsilon = static_cast<float>(eps);
    const pm_tensor scalar{&epsilon, {1}, {1}, 1, PM_F32};
    const pm_tensor inputs[7] = {view_of(positions),    view_of(query),      view_of(key), view_of(cache),
                                 view_of(query_weight), view_of(key_weight), scalar};
    const pm_tensor outputs[2] = {view_of(q), view_of(k)};
    return cell.run(context(), inputs, 7, outputs, 2);
  };
  serve(site, m, kernel, native);
  return {q, k};
}

TORCH_LIBRARY_FRAGMENT(polymorph, library) {
  library.def(
      "rotary(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, bool neox)"
      " -> (Tensor, Tensor)");
  library.def(
      "rotary_(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor cos_sin_cache, int head_size, bool neox)"
      " -> ()");
  library.def(
      "qk_norm_rotary(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, Tensor query_weight, "
      "Tensor key_weight, float eps, int head_size, bool neox) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(polymorph, CPU, library) {
  library.impl("rotary", rotary);
  library.impl("rotary_", rotary_in_place);
  library.impl("qk_norm_rotary", qk_norm_rotary);
}

}  // namespace polymorph
