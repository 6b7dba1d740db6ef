/* Attention of a prompt's chunk: all queries of a KV head over blocks of PAGE tokens, in float32.
 *
 * First, each block that the chunk attends to, in the cache and in the chunk itself, is widened once. Then each unit of up to
 * TOKENS new tokens attends to the blocks in order, with an online softmax per query. Scores and weighted sums are products
 * of small matrices, whose sums stay in registers. Neither the number of threads nor the other sequences of the batch change a
 * bit of the result. */
#include "attention.c"

/* New tokens per unit: their queries, scores and sums fit into a core's L2 cache. */
enum { TOKENS = GROUP > 96 ? 1 : GROUP < 3 ? 64 : 192 / GROUP };

/* Vectors and rows of a product whose sums stay in registers; a unit's queries are padded to a multiple of TALL. */
enum { WIDE = 4, TALL = (int)SUMS / WIDE, QUERIES = (TOKENS * GROUP + TALL - 1) / TALL * TALL };

/* A block as floats. Missing tokens are zeros. */
typedef struct {
  float keys[HEAD_DIM][PAGE], values[PAGE][HEAD_DIM];
} Block;

typedef struct {
  Call call; /* with the queries of all new tokens; its units are the cached blocks */
  const float *keys, *values;
  float *out;
  Block *blocks;
  int tokens, heads;         /* new tokens per sequence, and KV heads of all sequences */
  int cached, chunk, chunks; /* all cached blocks; blocks of new tokens per head; units of new tokens per head */
} Prefill;

/* ---- blocks ---- */

/* Dequantize the codes of one side of a page. */
static void widen_page(const Store *from, int head, const uint8_t *codes, const uint8_t *scale_bytes, const uint8_t *zero_bytes,
                       int rows, float (*to)[HEAD_DIM]) {
  const Side *side = from->side;
  float scales[PAGE * MAX_GROUPS], zeros[PAGE * MAX_GROUPS], factors[HEAD_DIM], offsets[HEAD_DIM] = {0};
  int of[VECTORS];
  for (int v = 0; v < VECTORS; v++) of[v] = v * side->groups / VECTORS;
  stored_floats(side->kind, scale_bytes, side->groups, scales);
  if (side->asymmetric) stored_floats(side->kind, zero_bytes, side->groups, zeros);
  for (int d = 0; d < HEAD_DIM; d++) {
    factors[d] = channel_factor(from, head, d);
    if (side->is_static && side->asymmetric) offsets[d] = parameter(from->static_zero, side, head, d);
  }
  for (int t = 0; t < rows; t++) {
    const uint8_t *row = codes + (size_t)t * row_bytes(side->kind);
#define WIDEN(kind) \
  case kind: \
    for (int v = 0; v < VECTORS; v++) store(to[t] + LANES * v, widen(kind, row, v)); \
    break;
    switch (side->kind) {
      WIDEN(FP16) WIDEN(BF16) WIDEN(E4M3) WIDEN(E5M2) WIDEN(INT8) WIDEN(INT8U) WIDEN(INT4) WIDEN(INT4U) WIDEN(NVFP4)
    }
    for (int v = 0; v < VECTORS; v++) {
      Vec x = load(to[t] + LANES * v);
      int group = t * side->groups + of[v];
      if (side->groups) x = x * scales[group] + (side->asymmetric ? zeros[group] : 0);
      store(to[t] + LANES * v, x * load(factors + LANES * v) + load(offsets + LANES * v));
    }
    if (side->rotated) hadamard(to[t]);
  }
  memset(to + rows, 0, sizeof *to * (size_t)(PAGE - rows));
}

/* Widen block `number`: the cached blocks come first, then the blocks of new tokens. */
static void widen_block(void *argument, size_t number) {
  const Prefill *prefill = argument;
  const Call *call = &prefill->call;
  Block *block = &prefill->blocks[number];
  float keys[PAGE][HEAD_DIM];
  if (number < (size_t)prefill->cached) {
    const Unit *unit = &call->units[number];
    Region region = find_region(call, unit->row, unit->region, 0);
    PageView view = {0};
    view_page(call, unit, &region, unit->page, &view);
    widen_page(region.keys, unit->head, view.keys, view.key_scales, view.key_zeros, view.rows, keys);
    widen_page(region.values, unit->head, view.values, view.value_scales, view.value_zeros, view.rows, block->values);
  } else {
    size_t head = (number - prefill->cached) / prefill->chunk;
    int first = (int)((number - prefill->cached) % prefill->chunk) * PAGE;
    int rows = prefill->tokens - first < PAGE ? prefill->tokens - first : PAGE;
    size_t at = (head * prefill->tokens + first) * HEAD_DIM, bytes = (size_t)rows * sizeof *keys;
    memcpy(keys, prefill->keys + at, bytes), memcpy(block->values, prefill->values + at, bytes);
    memset(keys + rows, 0, sizeof keys - bytes), memset(block->values + rows, 0, sizeof block->values - bytes);
  }
  for (int d = 0; d < HEAD_DIM; d++)
    for (int t = 0; t < PAGE; t++) block->keys[d][t] = keys[t][d];
}

/* ---- products ---- */

/* Compute a (TALL, inner) times b (inner, wide vectors), and add it to c (TALL, wide vectors) or store it there. */
INLINE void product(int wide, int inner, const float *a, int a_step, const float *b, int b_step, float *c, int c_step,
                    int add) {
  Vec sums[TALL][WIDE];
#pragma GCC unroll 16
  for (int r = 0; r < TALL; r++)
#pragma GCC unroll 16
    for (int v = 0; v < wide; v++) sums[r][v] = add ? load(c + r * c_step + LANES * v) : (Vec){0};
  for (int k = 0; k < inner; k++) {
    Vec x[WIDE];
#pragma GCC unroll 16
    for (int v = 0; v < wide; v++) x[v] = load(b + k * b_step + LANES * v);
#pragma GCC unroll 16
    for (int r = 0; r < TALL; r++)
#pragma GCC unroll 16
      for (int v = 0; v < wide; v++) sums[r][v] = sums[r][v] + x[v] * a[r * a_step + k];
  }
#pragma GCC unroll 16
  for (int r = 0; r < TALL; r++)
#pragma GCC unroll 16
    for (int v = 0; v < wide; v++) store(c + r * c_step + LANES * v, sums[r][v]);
}

/* Compute a product of `rows` rows, a multiple of TALL, and `vectors` vectors. */
INLINE void matrix_product(int rows, int vectors, int inner, const float *a, int a_step, const float *b, float *c, int c_step,
                           int add) {
  int width = vectors * LANES;
  for (int r = 0; r < rows; r += TALL) {
    const float *left = a + (size_t)r * a_step;
    float *out = c + (size_t)r * c_step;
    int v = 0;
    for (; v + WIDE <= vectors; v += WIDE)
      product(WIDE, inner, left, a_step, b + v * LANES, width, out + v * LANES, c_step, add);
    if (vectors % WIDE) product(vectors % WIDE, inner, left, a_step, b + v * LANES, width, out + v * LANES, c_step, add);
  }
}

/* ---- one unit ---- */

/* Find the tokens [first, last) of a block that new token `step` attends to. `unit` is NULL for a block of new tokens, which
 * begins at `start`. */
static void find_span(const Call *call, const Unit *unit, int start, int step, PageView *span) {
  const Layer *layer = call->layer;
  Region region = {0};
  int page = unit ? unit->page : start / PAGE;
  if (unit)
    region = find_region(call, unit->row, unit->region, step);
  else
    region.first = first_token(layer, step), region.last = step + 1;
  span->first = larger(region.first - page * PAGE, 0), span->last = last_of_page(&region, page);
}

/* Add a block to the partial results of a unit's queries: GROUP for each of `count` new tokens from `first` on. */
static void attend_block(const Call *call, const Block *block, const Unit *unit, int start, int first, int count,
                         const float (*query)[HEAD_DIM], float (*scores)[PAGE], Partial *partials) {
  PageView spans[TOKENS] = {{0}};
  int any = 0;
  for (int i = 0; i < count; i++) {
    find_span(call, unit, start, first + i, &spans[i]);
    any |= spans[i].first < spans[i].last;
  }
  if (!any) return;
  int rows = (count * GROUP + TALL - 1) / TALL * TALL;
  matrix_product(rows, PAGE / LANES, HEAD_DIM, query[0], HEAD_DIM, block->keys[0], scores[0], PAGE, 0);
  for (int i = 0; i < count; i++) {
    PageView *span = &spans[i];
    if (unit && unit->region == EXACT) {
      int found = 0;
      for (int t = 0; t < span->last; t++) {
        int counts = reads_exact_slot(call->layer, call->lengths[unit->row], unit->page * PAGE + t, first + i);
        for (int q = 0; q < GROUP && !counts; q++) scores[i * GROUP + q][t] = -INFINITY;
        found |= counts;
      }
      if (!found) span->last = 0;
    }
    for (int q = 0; q < GROUP; q++) {
      float *row = scores[i * GROUP + q];
      Partial *partial = &partials[i * GROUP + q];
      int begin = PAGE, end = PAGE;
      if (span->first < span->last) {
        weigh(call->layer, span, 0, row, partial, partial->values);
        begin = span->first / LANES * LANES, end = (span->last + LANES - 1) / LANES * LANES;
      }
      for (int t = 0; t < begin; t++) row[t] = 0;
      for (int t = end; t < PAGE; t++) row[t] = 0;
    }
  }
  enum { STEP = sizeof(Partial) / sizeof(float) };
  matrix_product(rows, VECTORS, PAGE, scores[0], PAGE, block->values[0], partials[0].values, STEP, 1);
}

/* Attend from the new tokens of unit `number`. Later tokens attend to more and start first, to balance the threads. */
static void attend_tokens(void *argument, size_t number) {
  const Prefill *prefill = argument;
  const Call *call = &prefill->call;
  int head = (int)(number % prefill->heads), kv_heads = call->layer->kv_heads, heads = kv_heads * GROUP;
  int first = (prefill->chunks - 1 - (int)(number / prefill->heads)) * TOKENS;
  int count = prefill->tokens - first < TOKENS ? prefill->tokens - first : TOKENS;
  float query[QUERIES][HEAD_DIM] = {{0}}, scores[QUERIES][PAGE];
  Partial partials[QUERIES];
  for (int r = 0; r < QUERIES; r++) {
    partials[r] = (Partial){.maximum = -INFINITY};
    if (call->sinks) partials[r] = (Partial){.maximum = call->sinks[head % kv_heads * GROUP + r % GROUP], .sum = 1};
    const float *from = call->query + (((size_t)head * GROUP + r % GROUP) * prefill->tokens + first + r / GROUP) * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM && r < count * GROUP; d++) query[r][d] = from[d] * call->layer->scaling;
  }
  for (int i = 0; i < prefill->cached; i++) {
    const Unit *unit = &call->units[i];
    if (unit->row * kv_heads + unit->head != head) continue;
    attend_block(call, &prefill->blocks[i], unit, 0, first, count, query, scores, partials);
  }
  const Block *own = prefill->blocks + prefill->cached + (size_t)head * prefill->chunk;
  for (int i = 0; i < prefill->chunk; i++) attend_block(call, own + i, NULL, i * PAGE, first, count, query, scores, partials);
  for (int r = 0; r < count * GROUP; r++) {
    size_t token = (size_t)(head / kv_heads) * prefill->tokens + first + r / GROUP;
    float *to = prefill->out + (token * heads + head % kv_heads * GROUP + r % GROUP) * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM; d++) to[d] = partials[r].values[d] / partials[r].sum;
  }
}
