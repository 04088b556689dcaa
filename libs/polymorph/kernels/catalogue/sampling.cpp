// Top-k and top-p without a sort: -inf for all but the k largest logits of a row, and of these for the tail whose
// probability is at most 1 - p. Both borders are found by halving an interval of values, each time with one pass that
// weighs what lies below the middle; probabilities are added up in float64.
#include "polymorph_kernel.h"

#define NOT_INLINED __attribute__((noinline))

namespace {

constexpr int LANES = $lanes;       // floats in a vector
#include "exponential.h"

constexpr int64_t V = $v;           // size of the vocabulary
constexpr int CHAINS = $chains;     // independent sums
constexpr bool KEEP = $keep;        // exponentials stay in scratch, instead of being computed in each pass
constexpr int GATHER = $gather;     // every so many passes what is still in question is copied side by side; 0: never
constexpr int64_t GRAIN = $grain;   // rows that a thread takes at least

constexpr bool RAGGED = V % LANES != 0;
constexpr int EVERY = GATHER > 0 ? GATHER : 1;
constexpr int64_t GATHERED = 16384; // values that are copied at most
constexpr int SHIFT = 40;           // exponentials are scaled by 2^SHIFT: an unlikely token's is not zero
constexpr float INFINITE = __builtin_inff();
typedef double wide __attribute__((vector_size(8 * LANES)));

inline vec vector(const float *from) { return *reinterpret_cast<const vec *>(from); }
inline vec &at(float *memory) { return *reinterpret_cast<vec *>(memory); }

template <typename Vector>
inline auto total(const Vector &vector) {
  auto sum = vector[0];
  for (int lane = 1; lane < LANES; lane++) sum += vector[lane];
  return sum;
}

// What each value weighs: one, or the exponential of its distance to the greatest, kept or computed.
enum Weight { ONE, KEPT, COMPUTED };

// Some values of a row. Those below `floor` do not count.
struct Values {
  const float *values, *weights;
  int64_t count;
  float floor, greatest;
};

template <Weight weight>
inline vec weights_at(const Values &all, int64_t i, vec value) {
  if constexpr (weight == ONE) return vec{} + 1.0f;
  if constexpr (weight == KEPT) return vector(all.weights + i);
  return exponential<SHIFT>(value - all.greatest);
}

template <Weight weight>
inline float weight_at(const Values &all, int64_t i) {
  if constexpr (weight == ONE) return 1.0f;
  if constexpr (weight == KEPT) return all.weights[i];
  return exponential<SHIFT>(vec{} + (all.values[i] - all.greatest))[0];
}

// How much lies at or below a value.
struct Below {
  double weight;
  int64_t count;
};

// Sums of at most 32 terms in float32, those added up in float64. NaN lies nowhere.
template <Weight weight>
NOT_INLINED Below below(const Values &all, float bound) {
  wide sums = {};
  ints counts = {};
  int64_t i = 0;
  const auto add = [&](vec &part) {
    const vec value = vector(all.values + i);
    const ints inside = (value <= bound) & (value >= all.floor);
    part += inside ? weights_at<weight>(all, i, value) : vec{};
    counts -= inside;
    i += LANES;
  };
  while (i + LANES * CHAINS <= all.count) {
    vec part[CHAINS] = {};
    for (int n = 0; n < 32 && i + LANES * CHAINS <= all.count; n++)
      for (int chain = 0; chain < CHAINS; chain++) add(part[chain]);
    for (int chain = 0; chain < CHAINS; chain++) sums += __builtin_convertvector(part[chain], wide);
  }
  vec rest = {};
  while (i + LANES <= all.count) add(rest);
  sums += __builtin_convertvector(rest, wide);
  Below found{total(sums), total(counts)};
  for (; i < all.count; i++)
    if (all.values[i] <= bound && all.values[i] >= all.floor) {
      found.weight += weight_at<weight>(all, i);
      found.count++;
    }
  return found;
}

struct Room {
  float *exponentials, *values, *weights;
};

// Copies what lies in (least, most] side by side, into memory that may be where it comes from.
template <Weight weight>
NOT_INLINED void gather(Values &all, const Room &room, float least, float most) {
  int64_t kept = 0, i = 0;
  const auto take = [&](int64_t from) {
    const float value = all.values[from];
    room.values[kept] = value;
    if constexpr (weight == KEPT) room.weights[kept] = all.weights[from];
    kept += value > least && value <= most;
  };
  for (; i + LANES <= all.count; i += LANES) {
    const vec value = vector(all.values + i);
    const ints inside = (value > least) & (value <= most);
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= inside[lane];
    for (int lane = 0; any && lane < LANES; lane++) take(i + lane);
  }
  for (; i < all.count; i++) take(i);
  all.values = room.values;
  if constexpr (weight == KEPT) all.weights = room.weights;
  all.count = kept;
}

NOT_INLINED float greatest_up_to(const Values &all, float bound) {
  float found = -INFINITE;
  for (int64_t i = 0; i < all.count; i++) {
    const float value = all.values[i];
    found = value <= bound && value > found ? value : found;
  }
  return found;
}

// What is below `value` is out, and so are the first `ties` of those equal to it.
struct Border {
  float value;
  int64_t ties;
};

// The border lies in (least, most]: at or below `least` lies no more than may go, at or below `most` more than that.
struct Interval {
  float least, most;
  Below low, high;
};

// Of equal values so many go as the weight that may go reaches for; one stays in any case.
template <Weight weight>
inline int64_t ties(double out, const Below &low, const Below &high) {
  const int64_t equal = high.count - low.count;
  const double each = (high.weight - low.weight) / double(equal);
  if (weight == ONE || equal <= 1 || !(each > 0) || out <= low.weight) return 0;
  const double fit = (out - low.weight) / each;
  return fit >= double(equal - 1) ? equal - 1 : int64_t(fit);
}

template <Weight weight>
Border narrowed(Values all, double out, Interval in, const Room &room) {
  Below gone{};  // at or below what was left out when values were copied
  for (int pass = 1; in.high.count - in.low.count > 1; pass++) {
    // Half of each, since their sum may be too large. At the end no float lies between the two.
    const float middle = in.least * 0.5f + in.most * 0.5f;
    if (!(middle > in.least && middle < in.most)) break;
    Below found = below<weight>(all, middle);
    found.weight += gone.weight;
    found.count += gone.count;
    if (found.weight <= out) {
      in.least = middle;
      in.low = found;
    } else {
      in.most = middle;
      in.high = found;
    }
    if (GATHER > 0 && pass % EVERY == 0 && in.high.count - in.low.count <= GATHERED) {
      gather<weight>(all, room, in.least, in.most);
      gone = in.low;
    }
  }
  return {greatest_up_to(all, in.most), ties<weight>(out, in.low, in.high)};
}

// The finite values of a row, and how many others it has.
struct Range {
  float least, most;
  int64_t nans, infinite;
};

NOT_INLINED Range range_of(const float *x) {
  vec least = vec{} + INFINITE, most = vec{} - INFINITE;
  ints nans = {}, infinite = {};
  int64_t i = 0;
  for (; i + LANES <= V; i += LANES) {
    const vec value = vector(x + i);
    least = (value > -INFINITE) & (value < least) ? value : least;
    most = (value < INFINITE) & (value > most) ? value : most;
    nans -= value != value;
    infinite -= value == INFINITE;
  }
  Range found{INFINITE, -INFINITE, total(nans), total(infinite)};
  for (int lane = 0; lane < LANES; lane++) {
    found.least = least[lane] < found.least ? least[lane] : found.least;
    found.most = most[lane] > found.most ? most[lane] : found.most;
  }
  for (; RAGGED && i < V; i++) {
    found.least = x[i] > -INFINITE && x[i] < found.least ? x[i] : found.least;
    found.most = x[i] < INFINITE && x[i] > found.most ? x[i] : found.most;
    found.nans += x[i] != x[i];
    found.infinite += x[i] == INFINITE;
  }
  return found;
}

// Everything from the kth largest value on stays; NaN is larger than any other, as in a sort.
Border top_k(const float *x, int64_t k, const Range &range, const Room &room) {
  constexpr Border NOTHING{-INFINITE, 0};
  const Values all{x, nullptr, V, -INFINITE, 0};
  const int64_t out = V - k, numbers = V - range.nans, finite = numbers - range.infinite;
  if (out >= numbers) return NOTHING;
  if (out >= finite) return {INFINITE, 0};
  const Below low = below<ONE>(all, range.least);
  if (range.least > range.most || low.count > out) return NOTHING;
  return narrowed<ONE>(all, double(out), {range.least, range.most, low, {double(finite), finite}}, room);
}

// What may go of a probability of 1: 1 - p in float32, and what a sum is rounded off by before it is compared with it.
// Where that is nothing, values go whose probability is 0 in float32.
inline double tail_of(float p) {
  const float tail = 1.0f - p;
  if (tail == 0) return 0x1p-150;
  const float next = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, tail) + 1);
  return (double(tail) + double(next)) / 2;
}

template <Weight weight>
Border likeliest(const Values &all, double tail, const Room &room) {
  const Interval in{all.floor, all.greatest, below<weight>(all, all.floor), below<weight>(all, all.greatest)};
  const double out = tail * in.high.weight;
  if (in.low.weight > out || in.low.count == in.high.count) return {all.floor, ties<weight>(out, {}, in.low)};
  return narrowed<weight>(all, out, in, room);
}

// Of the values from the border of top-k on.
Border top_p(const float *x, float p, const Border &top, const Range &range, const Room &room) {
  constexpr float SEEN = 80.0f;  // nothing so near to the greatest has probability 0 in float32
  const float floor = top.value > range.least ? top.value : range.least;
  if (p == 1.0f && range.most - floor < SEEN) return top;
  Values all{x, nullptr, V, floor, range.most};
  if constexpr (GATHER > 0)
    if (floor > range.least && below<ONE>(all, range.most).count <= GATHERED)
      gather<ONE>(all, room, __builtin_bit_cast(float, __builtin_bit_cast(int32_t, floor) + (floor > 0 ? -1 : 1)),
                  range.most);
  if constexpr (!KEEP) return likeliest<COMPUTED>(all, tail_of(p), room);
  int64_t i = 0;
  for (; i + LANES <= all.count; i += LANES)
    at(room.exponentials + i) = weights_at<COMPUTED>(all, i, vector(all.values + i));
  for (; (RAGGED || GATHER > 0) && i < all.count; i++) room.exponentials[i] = weight_at<COMPUTED>(all, i);
  all.weights = room.exponentials;
  return likeliest<KEPT>(all, tail_of(p), room);
}

void mask(const float *x, float *masked, Border border) {
  if (masked == x && border.value == -INFINITE) return;
  int64_t i = 0;
  for (; i + LANES <= V; i += LANES) {
    const vec value = vector(x + i);
    at(masked + i) = value < border.value ? vec{} - INFINITE : value;
  }
  for (; RAGGED && i < V; i++) masked[i] = x[i] < border.value ? -INFINITE : x[i];
  for (i = 0; border.ties > 0; i++)
    if (masked[i] == border.value) {
      masked[i] = -INFINITE;
      border.ties--;
    }
}

struct Job {
  const float *logits;
  const int32_t *k;
  const float *p;
  float *masked;
  int64_t logits_row, masked_row, k_step, p_step;
  char *scratch;
  int64_t scratch_bytes;
};

void rows(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  float *scratch = reinterpret_cast<float *>(job.scratch + thread * job.scratch_bytes);
  constexpr int64_t EXPONENTIALS = KEEP ? (V + 15) / 16 * 16 : 0;
  const Room room{scratch, scratch + EXPONENTIALS, scratch + EXPONENTIALS + GATHERED + 16};
  for (int64_t m = begin; m < end; m++) {
    const float *x = job.logits + m * job.logits_row;
    const Range range = range_of(x);
    Border border{-INFINITE, 0};
    if (job.k && job.k[m * job.k_step] < V) border = top_k(x, job.k[m * job.k_step], range, room);
    // Where a probability is no number, no tail is shorter than any other.
    const bool numbers = range.nans == 0 && range.infinite == 0 && range.least <= range.most;
    if (job.p && numbers && job.p[m * job.p_step] <= 1.0f) border = top_p(x, job.p[m * job.p_step], border, range, room);
    mask(x, job.masked + m * job.masked_row, border);
  }
}

inline bool is_rows(const pm_tensor &t, int64_t m) {
  return t.ndim == 2 && t.dtype == PM_F32 && t.sizes[0] == m && t.sizes[1] == V && t.strides[1] == 1;
}

inline bool is_column(const pm_tensor &t, int32_t dtype, int64_t m) {
  return t.data == nullptr || (t.ndim == 1 && t.dtype == dtype && t.sizes[0] == m);
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  if (context->abi_version != PM_ABI_VERSION || inputs != 3 || outputs != 1) return 1;
  const pm_tensor &logits = in[0], &k = in[1], &p = in[2];
  const int64_t m = logits.sizes[0];
  if (!is_rows(logits, m) || !is_rows(out[0], m) || !is_column(k, PM_I32, m) || !is_column(p, PM_F32, m)) return 1;
  if (context->scratch_bytes < int64_t(sizeof(float)) * ((KEEP ? V + 15 : 0) + 2 * (GATHERED + 16))) return 2;
  const Job job{static_cast<const float *>(logits.data), static_cast<const int32_t *>(k.data),
                static_cast<const float *>(p.data),      static_cast<float *>(out[0].data),
                logits.strides[0],                       out[0].strides[0],
                k.strides[0],                            p.strides[0],
                static_cast<char *>(context->scratch),   context->scratch_bytes};
  for (int64_t row = 0; job.k && row < m; row++)
    if (job.k[row * job.k_step] < 1 || job.k[row * job.k_step] > V) return 3;
  context->parallel_for(context, m, GRAIN, rows, const_cast<Job *>(&job));
  return 0;
}
