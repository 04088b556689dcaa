#pragma once
#include "polymorph_kernel.h"

// Panels of 16 columns; within a panel K rows of 16 bfloat16 values.
enum { PANEL = 16 };

static inline int64_t panels(const pm_tensor *weight) { return (weight->sizes[0] + PANEL - 1) / PANEL; }

static inline float widen(uint16_t half) {
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

extern "C" int64_t pm_pack_bytes(const pm_tensor *weight) {
  return panels(weight) * weight->sizes[1] * PANEL * 2;
}

extern "C" int32_t pm_pack(const pm_context *context, const pm_tensor *weight, void *packed) {
  (void)context;
  const int64_t n = weight->sizes[0], k = weight->sizes[1];
  const float *from = static_cast<const float *>(weight->data);
  uint16_t *to = static_cast<uint16_t *>(packed);
  for (int64_t panel = 0; panel < panels(weight); ++panel)
    for (int64_t i = 0; i < k; ++i)
      for (int64_t j = 0; j < PANEL; ++j) {
        const int64_t row = panel * PANEL + j;
        uint32_t bits = 0;
        if (row < n) __builtin_memcpy(&bits, from + row * weight->strides[0] + i * weight->strides[1], 4);
        if (bits & 0xffff) return 1;
        *to++ = static_cast<uint16_t>(bits >> 16);
      }
  return 0;
}
