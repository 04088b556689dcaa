// How the packed weight lies in memory: [panels][steps][panel][depth], zeros beyond N and K. Decided here alone.
#pragma once
#include "polymorph_kernel.h"

namespace layout {

constexpr int64_t N = $n, K = $k;
constexpr int64_t PANEL = $panel;  // columns side by side
constexpr int64_t DEPTH = $depth;  // values of K side by side
using element = $element;          // $storage
using given = $given;              // the weight as it comes: $dtype

constexpr int64_t PANELS = (N + PANEL - 1) / PANEL;
constexpr int64_t STEPS = (K + DEPTH - 1) / DEPTH;
constexpr int64_t PANEL_ELEMENTS = STEPS * PANEL * DEPTH;

inline uint32_t bits(float value) { return __builtin_bit_cast(uint32_t, value); }
inline uint32_t bits(uint16_t value) { return uint32_t(value) << 16; }
inline void put(float *to, uint32_t value) { *to = __builtin_bit_cast(float, value); }
inline void put(uint16_t *to, uint32_t value) { *to = uint16_t(value >> 16); }

struct Packing {
  const given *weight;
  int64_t row, column;  // strides
  element *packed;
  int32_t inexact;
};

inline void pack_panels(void *argument, int64_t begin, int64_t end, int32_t) {
  Packing &job = *static_cast<Packing *>(argument);
  uint32_t lost = 0;
  for (int64_t panel = begin; panel < end; panel++)
    for (int64_t step = 0; step < STEPS; step++)
      for (int64_t c = 0; c < PANEL; c++)
        for (int64_t d = 0; d < DEPTH; d++) {
          const int64_t n = panel * PANEL + c, k = step * DEPTH + d;
          const uint32_t value = n < N && k < K ? bits(job.weight[n * job.row + k * job.column]) : 0;
          if (sizeof(element) == 2) lost |= value & 0xffff;
          put(job.packed + panel * PANEL_ELEMENTS + (step * PANEL + c) * DEPTH + d, value);
        }
  if (lost) __atomic_store_n(&job.inexact, 1, __ATOMIC_RELAXED);
}

}  // namespace layout

extern "C" int64_t pm_pack_bytes(const pm_tensor *weight) {
  if (weight->ndim != 2 || weight->sizes[0] != layout::N || weight->sizes[1] != layout::K) return -1;
  if (weight->dtype != $dtype) return -1;
  return layout::PANELS * layout::PANEL_ELEMENTS * int64_t(sizeof(layout::element));
}

// 1: not this weight; 2: a value that $storage cannot hold exactly.
extern "C" int32_t pm_pack(const pm_context *context, const pm_tensor *weight, void *packed) {
  if (pm_pack_bytes(weight) < 0 || !weight->data) return 1;
  layout::Packing job{static_cast<const layout::given *>(weight->data), weight->strides[0], weight->strides[1],
                  static_cast<layout::element *>(packed), 0};
  context->parallel_for(context, layout::PANELS, 1, layout::pack_panels, &job);
  return job.inexact ? 2 : 0;
}
