// Vectors of floats, and elements that are float32 or bfloat16 in memory.
#pragma once
#include "polymorph_kernel.h"

namespace {

constexpr int LANES = $lanes;  // floats in a vector
using scalar = $given;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline uint16_t narrow(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float get(const float *from) { return *from; }
inline float get(const uint16_t *from) { return __builtin_bit_cast(float, uint32_t(*from) << 16); }
inline void put(float *to, float value) { *to = value; }
inline void put(uint16_t *to, float value) { *to = narrow(value); }
inline vec get_vector(const float *from) { return *reinterpret_cast<const vec *>(from); }
inline vec get_vector(const uint16_t *from) {
  return (vec)(__builtin_convertvector(*reinterpret_cast<const halves *>(from), words) << 16);
}
inline void put_vector(float *to, vec value) { *reinterpret_cast<vec *>(to) = value; }
inline void put_vector(uint16_t *to, vec value) {
  const words bits = (words)value;
  const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 64;
  const words is_nan = (words)((bits & 0x7fffffffu) > 0x7f800000u);
  *reinterpret_cast<halves *>(to) = __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), halves);
}

inline bool is_rows(const pm_tensor &t, int64_t m, int64_t width) {
  return t.ndim == 2 && t.dtype == $dtype && t.sizes[0] == m && t.sizes[1] == width && t.strides[1] == 1;
}
inline bool is_line(const pm_tensor &t, int64_t width) {
  return t.ndim == 1 && t.dtype == $dtype && t.sizes[0] == width && t.strides[0] == 1;
}

}  // namespace
