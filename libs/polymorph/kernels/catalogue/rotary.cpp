// Query and key turned by their positions, each head normalised before where NORM.
#include "vectors.h"

namespace {

constexpr int64_t QUERY = $query, KEY = $key;  // heads
constexpr int64_t D = $width;                  // of a head
constexpr int64_t HALF = $half;                // pairs that are turned; the rest of a head passes
constexpr bool NEOX = $neox;                   // a pair lies HALF apart; else it is two neighbours
constexpr bool NORM = $norm;
constexpr bool KEEP = $keep;                   // a head is kept in float32 between norm and rotation, not read again
constexpr int64_t UNIT = $unit;                // heads of one unit of work
constexpr int64_t GRAIN = $grain;              // units that a thread takes at least
constexpr int64_t HEADS = QUERY + KEY;
constexpr int64_t UNITS = (HEADS + UNIT - 1) / UNIT;  // of a token

struct Side {
  const scalar *x, *weight;
  scalar *y;
  int64_t x_stride, y_stride;
};
struct Job {
  Side query, key;
  const int64_t *positions;
  const scalar *cache;
  int64_t position_stride, cache_stride;
  float eps;
};

inline float sum(vec value) {
  float total = 0;
  for (int lane = 0; lane < LANES; lane++) total += value[lane];
  return total;
}

// 1 / root mean square of a head; where KEEP, the head goes to `kept`.
inline float inverse_root(const scalar *x, float *kept, float eps) {
  vec squares[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= D; i += 2 * LANES)
    for (int chain = 0; chain < 2; chain++) {
      const vec value = get_vector(x + i + chain * LANES);
      if constexpr (KEEP) put_vector(kept + i + chain * LANES, value);
      squares[chain] += value * value;
    }
  float total = 0;
  for (; i < D; i++) {
    const float value = get(x + i);
    if constexpr (KEEP) kept[i] = value;
    total += value * value;
  }
  return 1.0f / __builtin_sqrtf((total + sum(squares[0] + squares[1])) / D + eps);
}

template <typename From>
inline vec normed(const From *x, const scalar *weight, float scale, int64_t at) {
  if constexpr (NORM) return get_vector(x + at) * scale * get_vector(weight + at);
  return get_vector(x + at);
}
template <typename From>
inline float normed_one(const From *x, const scalar *weight, float scale, int64_t at) {
  if constexpr (NORM) return get(x + at) * scale * get(weight + at);
  return get(x + at);
}

template <typename From>
inline void turn(const From *x, const scalar *weight, float scale, const scalar *cosines, scalar *y) {
  const scalar *sines = cosines + HALF;
  int64_t i = 0;
  if constexpr (NEOX)
    for (; i + LANES <= HALF; i += LANES) {
      const vec a = normed(x, weight, scale, i), b = normed(x, weight, scale, i + HALF);
      const vec c = get_vector(cosines + i), s = get_vector(sines + i);
      put_vector(y + i, a * c - b * s);
      put_vector(y + i + HALF, b * c + a * s);
    }
  for (; i < HALF; i++) {
    const int64_t first = NEOX ? i : 2 * i, second = NEOX ? i + HALF : 2 * i + 1;
    const float a = normed_one(x, weight, scale, first), b = normed_one(x, weight, scale, second);
    const float c = get(cosines + i), s = get(sines + i);
    put(y + first, a * c - b * s);
    put(y + second, b * c + a * s);
  }
  for (int64_t at = 2 * HALF; at < D; at++) put(y + at, normed_one(x, weight, scale, at));
}

inline void head(const Side &side, int64_t m, int64_t index, const scalar *cosines, float eps) {
  const scalar *x = side.x + m * side.x_stride + index * D;
  scalar *y = side.y + m * side.y_stride + index * D;
  if constexpr (NORM && KEEP) {
    float kept[D];
    const float scale = inverse_root(x, kept, eps);
    turn(kept, side.weight, scale, cosines, y);
  } else {
    turn(x, side.weight, NORM ? inverse_root(x, nullptr, eps) : 1.0f, cosines, y);
  }
}

void units(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t m = unit / UNITS, first = unit % UNITS * UNIT;
    const int64_t last = first + UNIT < HEADS ? first + UNIT : HEADS;
    const scalar *cosines = job.cache + job.positions[m * job.position_stride] * job.cache_stride;
    for (int64_t index = first; index < last; index++)
      if (index < QUERY)
        head(job.query, m, index, cosines, job.eps);
      else
        head(job.key, m, index - QUERY, cosines, job.eps);
  }
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  if (context->abi_version != PM_ABI_VERSION || inputs != (NORM ? 7 : 4) || outputs != 2) return 1;
  const pm_tensor &positions = in[0], &query = in[1], &key = in[2], &cache = in[3];
  const int64_t m = positions.sizes[0];
  if (positions.ndim != 1 || positions.dtype != PM_I64 || cache.ndim != 2 || !is_rows(cache, cache.sizes[0], 2 * HALF))
    return 1;
  if (!is_rows(query, m, QUERY * D) || !is_rows(key, m, KEY * D)) return 1;
  if (!is_rows(out[0], m, QUERY * D) || !is_rows(out[1], m, KEY * D)) return 1;
  if (NORM && (!is_line(in[4], D) || !is_line(in[5], D) || in[6].dtype != PM_F32)) return 1;
  const int64_t *at = static_cast<const int64_t *>(positions.data);
  for (int64_t i = 0; i < m; i++)
    if (at[i * positions.strides[0]] < 0 || at[i * positions.strides[0]] >= cache.sizes[0]) return 2;
  const auto side = [&](int which) {
    const scalar *weight = NORM ? static_cast<const scalar *>(in[4 + which].data) : nullptr;
    return Side{static_cast<const scalar *>(in[1 + which].data), weight, static_cast<scalar *>(out[which].data),
                in[1 + which].strides[0], out[which].strides[0]};
  };
  Job job{side(0), side(1), at, static_cast<const scalar *>(cache.data), positions.strides[0], cache.strides[0],
          NORM ? *static_cast<const float *>(in[6].data) : 0.0f};
  context->parallel_for(context, m * UNITS, GRAIN, units, &job);
  return 0;
}
