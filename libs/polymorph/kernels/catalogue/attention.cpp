// o = softmax(q K^T scale) V for one query token of each sequence over its pages of the cache: an online softmax, all in
// float32. The query heads that share a KV head share its loads.
#include "polymorph_kernel.h"

#define NOT_INLINED __attribute__((noinline))

namespace {

constexpr int LANES = $lanes;          // floats in a vector
#include "exponential.h"

constexpr int HEADS = $heads, KV_HEADS = $kv_heads, GROUP = HEADS / KV_HEADS;
constexpr int64_t D = $d;              // elements of a head
constexpr int64_t PAGE = $page;        // tokens in a block of the cache
constexpr int64_t TILE = $tile;        // tokens between two looks at the greatest score
constexpr int ROWS = $rows;            // query heads in a register block
constexpr int TOKENS = $tokens;        // vectors of scores in a register block
constexpr int COLUMNS = $columns;      // vectors of outputs in a register block
constexpr bool PREFETCH = $prefetch;   // keys are fetched a register block ahead
constexpr bool STREAM = $stream;       // a page's values are fetched while its keys are read, and then the next page's keys
constexpr bool SPREAD = $spread;       // threads share all tiles evenly, wherever a sequence ends; else whole sequences
constexpr int64_t ALONE = $alone;      // up to so many tiles in all one thread does it
using scalar = $element;

constexpr int64_t WIDTH = TOKENS * LANES;
static_assert(HEADS % KV_HEADS == 0 && GROUP % ROWS == 0, "register blocks are whole");
static_assert(!STREAM || TILE == PAGE, "what is fetched ahead is a whole page");
static_assert(PAGE % TILE == 0 && TILE % WIDTH == 0 && D % (COLUMNS * LANES) == 0, "register blocks are whole");

typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline float get(const float *from) { return *from; }
inline float get(const uint16_t *from) { return __builtin_bit_cast(float, uint32_t(*from) << 16); }
inline vec get_vector(const float *from) { return *reinterpret_cast<const vec *>(from); }
inline vec get_vector(const uint16_t *from) {
  return (vec)(__builtin_convertvector(*reinterpret_cast<const halves *>(from), ints) << 16);
}
inline void put(float *to, float value) { *to = value; }
inline void put(uint16_t *to, float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  *to = nan ? uint16_t(bits >> 16 | 64) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline vec &at(float *memory) { return *reinterpret_cast<vec *>(memory); }
inline float exponential(float x) { return exponential(vec{} + x)[0]; }

struct Job {
  const scalar *q, *keys, *values;
  const int32_t *pages, *lengths;
  scalar *o;
  int64_t m, q_row, q_head, o_row, o_head, key_page, key_head, value_page, value_head, page_row;
  float scale;
  char *scratch;
  int64_t scratch_bytes;
};

// The query heads of one KV head over some of the tokens: sums that are not yet divided, and what they are relative to.
struct State {
  float greatest[GROUP], sum[GROUP];
  float o[GROUP * D];
};

// What a thread could not finish: the sequence's other tokens are another thread's.
struct Part {
  int64_t item;  // m * KV_HEADS + head
  bool first;
  State state;
};

struct Parts {
  int64_t count;
  Part part[1];
};

constexpr float INFINITE = __builtin_inff();

inline int64_t tiles(int64_t length) { return (length + TILE - 1) / TILE; }

// Fetches the `step`th part of LINES cache lines.
template <int64_t LINES>
inline void fetch(const scalar *page, int64_t step) {
  for (int64_t line = 0; line < LINES; line++)
    __builtin_prefetch(reinterpret_cast<const char *>(page) + (step * LINES + line) * 64, 0, 2);
}

// scores[GROUP][TILE] of `count` tokens, the first of which is the page's `from`; -inf beyond them.
void score(const float *q, const scalar *keys, int64_t from, int64_t count, float *scores, const scalar *ahead) {
  for (int64_t t = 0; t < count; t += WIDTH) {
    const scalar *k = keys + from + t;
    for (int row = 0; row < GROUP; row += ROWS) {
      vec sum[ROWS][TOKENS] = {};
      for (int64_t d = 0; d < D; d++) {
        if (STREAM && row == 0) fetch<WIDTH * int64_t(sizeof(scalar)) / 64>(ahead, t / WIDTH * D + d);
        if constexpr (PREFETCH)
          for (int64_t line = 0; line < WIDTH * int64_t(sizeof(scalar)); line += 64)
            __builtin_prefetch(reinterpret_cast<const char *>(k + d * PAGE + WIDTH) + line);
        for (int c = 0; c < TOKENS; c++) {
          const vec key = get_vector(k + d * PAGE + c * LANES);
          for (int r = 0; r < ROWS; r++) sum[r][c] += key * q[(row + r) * D + d];
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < TOKENS; c++) at(scores + (row + r) * TILE + t + c * LANES) = sum[r][c];
    }
  }
  const int64_t whole = (count + WIDTH - 1) / WIDTH * WIDTH;
  for (int row = 0; row < GROUP; row++)
    for (int64_t t = count; t < whole; t++) scores[row * TILE + t] = -INFINITE;
}

// Scores become shares, relative to the greatest score so far; the state's sums are brought to the same.
void share(State &state, float *scores, int64_t count, float *rescale) {
  for (int row = 0; row < GROUP; row++) {
    float *s = scores + row * TILE;
    vec most = at(s);
    for (int64_t t = LANES; t < count; t += LANES) most = at(s + t) > most ? at(s + t) : most;
    float greatest = state.greatest[row];
    for (int lane = 0; lane < LANES; lane++) greatest = most[lane] > greatest ? most[lane] : greatest;
    vec sum = {};
    for (int64_t t = 0; t < count; t += LANES) sum += at(s + t) = exponential(at(s + t) - greatest);
    rescale[row] = exponential(state.greatest[row] - greatest);
    state.sum[row] *= rescale[row];
    for (int lane = 0; lane < LANES; lane++) state.sum[row] += sum[lane];
    state.greatest[row] = greatest;
  }
}

void add_values(State &state, const float *shares, const scalar *values, int64_t count, const float *rescale,
                const scalar *ahead) {
  for (int64_t column = 0; column < D; column += COLUMNS * LANES)
    for (int row = 0; row < GROUP; row += ROWS) {
      vec sum[ROWS][COLUMNS];
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
          sum[r][c] = at(state.o + (row + r) * D + column + c * LANES) * rescale[row + r];
      for (int64_t t = 0; t < count; t++) {
        if (STREAM && row == 0 && column == 0) fetch<D * int64_t(sizeof(scalar)) / 64>(ahead, t);
        for (int c = 0; c < COLUMNS; c++) {
          const vec value = get_vector(values + t * D + column + c * LANES);
          for (int r = 0; r < ROWS; r++) sum[r][c] += value * shares[(row + r) * TILE + t];
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) at(state.o + (row + r) * D + column + c * LANES) = sum[r][c];
    }
}

void begin(State &state) {
  for (int row = 0; row < GROUP; row++) state.greatest[row] = -INFINITE, state.sum[row] = 0;
  for (int64_t i = 0; i < GROUP * D; i++) state.o[i] = 0;
}

// Tiles [from, to) of one sequence and KV head.
NOT_INLINED void attend(const Job &job, int64_t item, int64_t from, int64_t to, State &state) {
  const int64_t m = item / KV_HEADS, head = item % KV_HEADS;
  float q[GROUP * D], scores[GROUP * TILE], rescale[GROUP];
  for (int row = 0; row < GROUP; row++)
    for (int64_t d = 0; d < D; d++)
      q[row * D + d] = get(job.q + m * job.q_row + (head * GROUP + row) * job.q_head + d) * job.scale;
  begin(state);
  for (int64_t tile = from; tile < to; tile++) {
    const int64_t token = tile * TILE, left = job.lengths[m] - token, count = left < TILE ? left : TILE;
    const int32_t *page = job.pages + m * job.page_row + token / PAGE;
    const int64_t inside = token % PAGE;
    const scalar *keys = job.keys + page[0] * job.key_page + head * job.key_head;
    const scalar *values = job.values + page[0] * job.value_page + head * job.value_head + inside * D;
    const scalar *next = STREAM && tile + 1 < to ? job.keys + page[1] * job.key_page + head * job.key_head : keys;
    score(q, keys, inside, count, scores, values);
    share(state, scores, count, rescale);
    add_values(state, scores, values, count, rescale, next);
  }
}

NOT_INLINED void store(const Job &job, int64_t item, const State &state) {
  const int64_t m = item / KV_HEADS, head = item % KV_HEADS;
  for (int row = 0; row < GROUP; row++) {
    scalar *o = job.o + m * job.o_row + (head * GROUP + row) * job.o_head;
    const float scale = state.sum[row] == 0 ? 0.0f : 1.0f / state.sum[row];
    for (int64_t d = 0; d < D; d++) put(o + d, state.o[row * D + d] * scale);
  }
}

// All tokens of one sequence and KV head.
void finish(const Job &job, int64_t item) {
  State state;
  attend(job, item, 0, tiles(job.lengths[item / KV_HEADS]), state);
  store(job, item, state);
}

inline Parts &parts_of(const Job &job, int64_t thread) {
  return *reinterpret_cast<Parts *>(job.scratch + thread * job.scratch_bytes);
}

// Tiles [from, to) of the `count` that a sequence has: all of them are an output, some are a part of one.
NOT_INLINED void piece(const Job &job, Parts &parts, int64_t item, int64_t from, int64_t to, int64_t count) {
  if (to - from == count) return finish(job, item);
  Part &part = parts.part[parts.count++];
  part.item = item;
  part.first = from == 0;
  attend(job, item, from, to, part.state);
}

// A range of all tiles, counted sequence by sequence and head by head.
void some_tiles(void *argument, int64_t begin, int64_t end, int32_t thread) {
  const Job &job = *static_cast<const Job *>(argument);
  int64_t first = 0;
  for (int64_t item = 0; item < job.m * KV_HEADS && first < end; item++) {
    const int64_t count = tiles(job.lengths[item / KV_HEADS]);
    const int64_t from = begin > first ? begin - first : 0, to = end - first < count ? end - first : count;
    if (from < to) piece(job, parts_of(job, thread), item, from, to, count);
    first += count;
  }
}

void some_items(void *argument, int64_t begin, int64_t end, int32_t) {
  const Job &job = *static_cast<const Job *>(argument);
  for (int64_t item = begin; item < end; item++) finish(job, item);
}

NOT_INLINED void add(State &to, const State &from) {
  for (int row = 0; row < GROUP; row++) {
    const bool more = from.greatest[row] > to.greatest[row];
    const float greatest = more ? from.greatest[row] : to.greatest[row];
    const float mine = exponential(to.greatest[row] - greatest), theirs = exponential(from.greatest[row] - greatest);
    to.sum[row] = to.sum[row] * mine + from.sum[row] * theirs;
    for (int64_t d = 0; d < D; d++) to.o[row * D + d] = to.o[row * D + d] * mine + from.o[row * D + d] * theirs;
    to.greatest[row] = greatest;
  }
}

// Brings together what several threads did for one sequence and head.
void combine(const Job &job, int64_t threads) {
  for (int64_t thread = 0; thread < threads; thread++)
    for (int64_t i = 0; i < parts_of(job, thread).count; i++) {
      Part &part = parts_of(job, thread).part[i];
      if (!part.first) continue;
      for (int64_t other = 0; other < threads; other++)
        for (int64_t j = 0; j < parts_of(job, other).count; j++) {
          const Part &next = parts_of(job, other).part[j];
          if (next.item == part.item && !next.first) add(part.state, next.state);
        }
      store(job, part.item, part.state);
    }
}

inline bool is(const pm_tensor &t, int32_t dtype, int ndim, int64_t last) {
  return t.ndim == ndim && t.dtype == dtype && t.sizes[ndim - 1] == last && t.strides[ndim - 1] == 1;
}

bool fits(const pm_tensor *in, const pm_tensor &o) {
  const pm_tensor &q = in[0], &keys = in[1], &values = in[2], &pages = in[3], &lengths = in[4];
  const int64_t m = q.sizes[0];
  return is(q, $dtype, 3, D) && q.sizes[1] == HEADS && is(o, $dtype, 3, D) && o.sizes[0] == m && o.sizes[1] == HEADS &&
         is(keys, $dtype, 4, PAGE) && keys.sizes[1] == KV_HEADS && keys.sizes[2] == D && keys.strides[2] == PAGE &&
         is(values, $dtype, 4, D) && values.sizes[0] == keys.sizes[0] && values.sizes[1] == KV_HEADS &&
         values.sizes[2] == PAGE && values.strides[2] == D && pages.ndim == 2 && pages.dtype == PM_I32 &&
         pages.sizes[0] == m && pages.strides[1] == 1 && is(lengths, PM_I32, 1, m) && in[5].dtype == PM_F32;
}

// All tiles; -1 where a sequence is longer than its row of the table or names a block that is not there.
int64_t all_tiles(const Job &job, int64_t blocks, int64_t most_pages) {
  int64_t total = 0;
  for (int64_t m = 0; m < job.m; m++) {
    const int64_t length = job.lengths[m], pages = (length + PAGE - 1) / PAGE;
    if (length < 0 || pages > most_pages) return -1;
    for (int64_t page = 0; page < pages; page++) {
      const int32_t block = job.pages[m * job.page_row + page];
      if (block < 0 || block >= blocks) return -1;
    }
    total += tiles(length) * KV_HEADS;
  }
  return total;
}

// Sequences without a token have no tile: their rows of the output are zeros.
void store_empty(const Job &job) {
  State nothing;
  begin(nothing);
  for (int64_t m = 0; m < job.m; m++)
    for (int64_t head = 0; job.lengths[m] == 0 && head < KV_HEADS; head++) store(job, m * KV_HEADS + head, nothing);
}

}  // namespace

extern "C" int32_t pm_run(const pm_context *context, const pm_tensor *in, int32_t inputs, const pm_tensor *out,
                          int32_t outputs) {
  if (context->abi_version != PM_ABI_VERSION || inputs != 6 || outputs != 1 || !fits(in, out[0])) return 1;
  const pm_tensor &q = in[0], &keys = in[1], &values = in[2], &pages = in[3];
  // Two parts for the range of a thread, and room for a host that hands a thread several ranges.
  if (context->scratch_bytes < int64_t(sizeof(Parts) + 8 * sizeof(Part))) return 2;
  Job job{static_cast<const scalar *>(q.data), static_cast<const scalar *>(keys.data),
          static_cast<const scalar *>(values.data), static_cast<const int32_t *>(pages.data),
          static_cast<const int32_t *>(in[4].data), static_cast<scalar *>(out[0].data), q.sizes[0], q.strides[0],
          q.strides[1], out[0].strides[0], out[0].strides[1], keys.strides[0], keys.strides[1], values.strides[0],
          values.strides[1], pages.strides[0], *static_cast<const float *>(in[5].data),
          static_cast<char *>(context->scratch), context->scratch_bytes};
  const int64_t total = all_tiles(job, keys.sizes[0], pages.sizes[1]);
  if (total < 0) return 3;
  store_empty(job);
  const bool alone = total <= ALONE;
  if (alone || !SPREAD) {
    const int64_t items = job.m * KV_HEADS;
    context->parallel_for(context, items, alone ? items : 1, some_items, &job);
    return 0;
  }
  for (int64_t thread = 0; thread < context->threads; thread++) parts_of(job, thread).count = 0;
  context->parallel_for(context, total, 1, some_tiles, &job);
  combine(job, context->threads);
  return 0;
}
