// e^x for vectors of LANES floats, without a library.
#pragma once

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// 2^SHIFT e^x for x <= 0, with a relative error below 1.5 * 2^-24; 0 where the result would be subnormal, NaN of NaN.
// x = n ln 2 + r, and e^r = 1 + r + r^2 q(r) by a polynomial whose greatest error over |r| <= ln(2)/2 is least.
template <int SHIFT = 0>
inline vec exponential(vec x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  constexpr float LEAST = -87.33f - 0.69314718f * SHIFT;
  const vec whole = x * 1.44269504f + ROUND;
  const ints power = (ints)whole - __builtin_bit_cast(int32_t, ROUND);
  const vec n = whole - ROUND;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec q = r * 0.00138145394f + 0.00836874545f;
  q = q * r + 0.041668389f;
  q = q * r + 0.166665211f;
  q = q * r + 0.49999994f;
  const vec y = ((q * r * r + r) + 1.0f) * (vec)((power + (127 + SHIFT)) << 23);
  return x < LEAST ? vec{} : y;
}
