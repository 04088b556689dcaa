// How the packed experts lie in memory: [expert][panels][steps][PANEL][DEPTH], zeros beyond the matrix. A panel of the
// first product holds as many columns of the gate as of the up projection, so that one block gives both sides of the
// activation; one of the second product holds columns of the output. Decided here alone.
#pragma once
#include "polymorph_kernel.h"

namespace layout {

constexpr int64_t EXPERTS = $experts, H = $hidden, I = $intermediate;
constexpr int LANES = $lanes;              // floats in a vector
constexpr int64_t HALF = $vectors * LANES; // columns of the gate in a panel
constexpr int64_t PANEL = 2 * HALF;
constexpr int64_t DEPTH = $depth;          // values of a row side by side
using element = $element;                  // $storage
using given = $given;                      // a weight as it comes

constexpr int64_t steps(int64_t length) { return (length + DEPTH - 1) / DEPTH; }
constexpr int64_t UP_PANELS = (I + HALF - 1) / HALF, DOWN_PANELS = (H + PANEL - 1) / PANEL;
constexpr int64_t UP_ELEMENTS = steps(H) * PANEL * DEPTH, DOWN_ELEMENTS = steps(I) * PANEL * DEPTH;  // of one panel

inline uint32_t bits(float value) { return __builtin_bit_cast(uint32_t, value); }
inline uint32_t bits(uint16_t value) { return uint32_t(value) << 16; }
inline void put(float *to, uint32_t value) { *to = __builtin_bit_cast(float, value); }
inline void put(uint16_t *to, uint32_t value) { *to = uint16_t(value >> 16); }

struct Packing {
  const given *weight;
  int64_t expert, row, column;  // strides
  bool up;                      // gate and up, else down
  element *packed;
  int32_t inexact;
};

// The row of the weight that gives column `c` of a panel, -1 beyond the last one.
inline int64_t row_of(bool up, int64_t panel, int64_t c) {
  if (!up) return panel * PANEL + c < H ? panel * PANEL + c : -1;
  const int64_t at = panel * HALF + c % HALF;
  return at < I ? c / HALF * I + at : -1;
}

inline void pack_panels(void *argument, int64_t begin, int64_t end, int32_t) {
  Packing &job = *static_cast<Packing *>(argument);
  const int64_t panels = job.up ? UP_PANELS : DOWN_PANELS, length = job.up ? H : I;
  const int64_t elements = job.up ? UP_ELEMENTS : DOWN_ELEMENTS;
  uint32_t lost = 0;
  for (int64_t index = begin; index < end; index++)
    for (int64_t c = 0; c < PANEL; c++) {
      const int64_t row = row_of(job.up, index % panels, c);
      const given *from = job.weight + index / panels * job.expert + row * job.row;
      element *to = job.packed + index * elements + c * DEPTH;
      for (int64_t k = 0; k < steps(length) * DEPTH; k++) {
        const uint32_t value = row >= 0 && k < length ? bits(from[k * job.column]) : 0;
        if (sizeof(element) == 2) lost |= value & 0xffff;
        put(to + k / DEPTH * PANEL * DEPTH + k % DEPTH, value);
      }
    }
  if (lost) __atomic_store_n(&job.inexact, 1, __ATOMIC_RELAXED);
}

inline bool is_up(const pm_tensor *weight) { return weight->sizes[1] == 2 * I && weight->sizes[2] == H; }

}  // namespace layout

extern "C" int64_t pm_pack_bytes(const pm_tensor *weight) {
  using namespace layout;
  if (weight->ndim != 3 || weight->dtype != $code || weight->sizes[0] != EXPERTS) return -1;
  if (is_up(weight)) return EXPERTS * UP_PANELS * UP_ELEMENTS * int64_t(sizeof(element));
  if (weight->sizes[1] != H || weight->sizes[2] != I) return -1;
  return EXPERTS * DOWN_PANELS * DOWN_ELEMENTS * int64_t(sizeof(element));
}

// 1: not this weight; 2: a value that $storage cannot hold exactly.
extern "C" int32_t pm_pack(const pm_context *context, const pm_tensor *weight, void *packed) {
  using namespace layout;
  if (pm_pack_bytes(weight) < 0 || !weight->data) return 1;
  const bool up = is_up(weight);
  Packing job{static_cast<const given *>(weight->data), weight->strides[0], weight->strides[1], weight->strides[2],
              up, static_cast<element *>(packed), 0};
  context->parallel_for(context, EXPERTS * (up ? UP_PANELS : DOWN_PANELS), 1, pack_panels, &job);
  return job.inexact ? 2 : 0;
}
