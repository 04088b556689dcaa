/* The C ABI between a worker and a kernel, version 1.
 *
 * A kernel is a shared library built without the standard library. It exports
 *
 *     int32_t pm_run(const pm_context *, const pm_tensor *inputs, int32_t n_inputs,
 *                    const pm_tensor *outputs, int32_t n_outputs);
 *
 * and, where its definition has a weight that may be repacked once at load,
 *
 *     int64_t pm_pack_bytes(const pm_tensor *weight);
 *     int32_t pm_pack(const pm_context *, const pm_tensor *weight, void *packed);
 *
 * Inputs and outputs stand in the order of the definition; outputs are allocated by the caller (destination passing).
 * A kernel starts no threads, allocates nothing, opens nothing and makes no system call: it has parallel_for and its
 * scratch memory. Every call returns 0, or another number where it cannot serve these arguments; then it has written
 * nothing that matters and the caller runs its native code.
 */
#ifndef POLYMORPH_KERNEL_H
#define POLYMORPH_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PM_ABI_VERSION 1
#define PM_MAX_DIMS 4

enum pm_dtype { PM_F32 = 0, PM_BF16 = 1, PM_F16 = 2, PM_F64 = 3, PM_I8 = 4, PM_U8 = 5, PM_I32 = 6, PM_I64 = 7 };

/* ISA tiers, each holding those below it on the same architecture. */
enum pm_isa {
  PM_ISA_GENERIC = 0,
  PM_ISA_AVX2 = 10,        /* AVX2, FMA, F16C */
  PM_ISA_AVX512 = 20,      /* F, BW, DQ, VL */
  PM_ISA_AVX512_BF16 = 30, /* and BF16 dot products */
  PM_ISA_NEON = 100
};

/* A tensor. Sizes and strides count elements; a scalar parameter (epsilon, say) is a float32 tensor of one element. An
 * absent optional input has data == NULL. A packed weight is a PM_U8 tensor of one dimension. */
typedef struct pm_tensor {
  void *data;
  int64_t sizes[PM_MAX_DIMS];
  int64_t strides[PM_MAX_DIMS];
  int32_t ndim;
  int32_t dtype;
} pm_tensor;

/* Called for a half-open range of iterations, on one of the pool's threads; `thread` is in [0, context->threads). */
typedef void (*pm_body)(void *argument, int64_t begin, int64_t end, int32_t thread);

typedef struct pm_context pm_context;
struct pm_context {
  int32_t abi_version;
  int32_t isa;             /* the tier of this machine, enum pm_isa */
  int32_t threads;         /* how many threads parallel_for uses at most */
  int32_t reserved;
  int64_t scratch_bytes;   /* for each thread; at least 256 KiB */
  void *scratch;           /* 64-byte aligned; thread t owns [scratch + t * scratch_bytes, ...) */
  /* Splits [0, count) into at most `threads` contiguous ranges that are multiples of `grain` (the last one excepted)
   * and returns when all are done. Runs inline where one thread suffices. */
  void (*parallel_for)(const pm_context *, int64_t count, int64_t grain, pm_body body, void *argument);
};

typedef int32_t (*pm_run_fn)(const pm_context *, const pm_tensor *, int32_t, const pm_tensor *, int32_t);
typedef int64_t (*pm_pack_bytes_fn)(const pm_tensor *);
typedef int32_t (*pm_pack_fn)(const pm_context *, const pm_tensor *, void *);

#ifdef __cplusplus
}
#endif
#endif
