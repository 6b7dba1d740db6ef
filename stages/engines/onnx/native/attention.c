/* Decode attention over the paged, quantized cache, as an operator of ONNX Runtime. It computes kv.PagedAttention of
 * functions.py in one pass over the pages, without copying them, with scores, softmax and sums in float32.
 *
 * A sequence's tokens are in up to three regions: pages before the window, pages in the window, and the exact copies of sinks
 * and recent tokens. Regions are cut into units of UNIT_PAGES pages. Each unit of a KV head yields a maximum, a sum and a
 * weighted sum of values for each of its GROUP queries. The results of a sequence are joined in order, the new token last, so
 * that neither the number of threads nor the other sequences of the batch change a bit of the result.
 *
 * native_rewrite.py writes the operator's inputs and attributes. */
#include <math.h>
#include <stdlib.h>

#include "ort_abi.h"
#include "pages.h"

enum { UNIT_PAGES = 4, MAX_GROUPS = HEAD_DIM / 16 };

enum { KEY, VALUE, WINDOW_KEY, WINDOW_VALUE, EXACT_KEY, EXACT_VALUE, SIDES };

/* One stored copy of keys or values: attributes `side.N`, and the index of its first input (-1: not stored). */
typedef struct {
  int kind, groups, asymmetric, is_static, scale_heads, scale_channels, rotated, input;
} Side;

typedef struct {
  const OrtApi *api;
  int windowed, half;
  int head_dim, group, kv_heads, sink, recent; /* attribute `sizes`, with the next three */
  int sliding_window; /* in tokens, including the new one; 0: none */
  int gap, gap_length; /* from gap_length cached tokens on, tokens from gap to its page's end are evicted; 0: none */
  float scaling, softcap; /* scores become softcap * tanh(score / softcap); 0: no softcap */
  /* Attribute `tables`: indices of inputs; -1: absent. */
  int page_table, lengths, window_base_table, window_table, window_starts, exact_slots, sinks;
  Side sides[SIDES];
} Layer;

/* The inputs of one side. Scales and zeros per token and group are float16 (NVFP4: E4M3), static ones float32. */
typedef struct {
  const Side *side;
  const uint8_t *codes, *scales, *zeros;
  const float *static_scale, *static_zero;
  int64_t blocks; /* number of pages in the pool, or of exact buffers */
} Store;

typedef struct {
  int row, head, region, page, pages;
} Unit;

/* The result of a unit for one query. Both sums are relative to exp(maximum). */
typedef struct {
  float maximum, sum, values[HEAD_DIM];
} Partial;

typedef struct {
  const Layer *layer;
  const float *query;
  const float *sinks; /* learned sinks, one score per query head; NULL: none */
  Store stores[SIDES];
  const int32_t *page_table, *lengths, *window_base_table, *window_table, *window_starts, *exact_slots;
  int64_t pages, window_pages;
  const Unit *units;
  Partial *partials;
} Call;

/* Return whether stored scales apply per vector instead of per row: true if a token has several scales, or zero points. */
INLINE int by_vector(const Side *side) { return side->groups > 1 || (side->groups && side->asymmetric); }

/* ---- one unit ---- */

/* Multiply x in place by the orthonormal Hadamard matrix, which is its own inverse. */
static void hadamard(float *x) {
  for (int half = 1; half < HEAD_DIM; half *= 2)
    for (int i = 0; i < HEAD_DIM; i += 2 * half)
      for (int j = i; j < i + half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
  float factor = 1.0f / sqrtf(HEAD_DIM);
  for (int i = 0; i < HEAD_DIM; i++) x[i] *= factor;
}

/* Return the static scale or zero of a channel. All heads or all channels may share one. */
INLINE float parameter(const float *values, const Side *side, int head, int channel) {
  return values[(side->scale_heads > 1 ? head : 0) * side->scale_channels + (side->scale_channels > 1 ? channel : 0)];
}

/* Return the factor of a channel's codes, without the scales per token. */
INLINE float channel_factor(const Store *store, int head, int channel) {
  float factor = unit(store->side->kind);
  return store->side->is_static ? factor * parameter(store->static_scale, store->side, head, channel) : factor;
}

/* Fold the scaling, the rotation and static key scales into the queries of a KV head. `bias` is the constant term of a
 * query's scores. */
static void prepare(const Call *call, const Store *keys, const Unit *unit, float (*query)[HEAD_DIM], float *bias) {
  const Side *side = keys->side;
  const float *from = call->query + ((size_t)unit->row * call->layer->kv_heads + unit->head) * GROUP * HEAD_DIM;
  for (int q = 0; q < GROUP; q++, from += HEAD_DIM) {
    for (int d = 0; d < HEAD_DIM; d++) query[q][d] = from[d] * call->layer->scaling;
    if (side->rotated) hadamard(query[q]);
    bias[q] = 0;
    for (int d = 0; d < HEAD_DIM; d++) {
      if (side->is_static && side->asymmetric) bias[q] += query[q][d] * parameter(keys->static_zero, side, unit->head, d);
      query[q][d] *= channel_factor(keys, unit->head, d);
    }
  }
}

/* Turn sums of codes into sums of values. */
static void finish(const Store *values, const Unit *unit, Partial *partial) {
  const Side *side = values->side;
  for (int d = 0; d < HEAD_DIM; d++) {
    partial->values[d] *= channel_factor(values, unit->head, d);
    if (side->is_static && side->asymmetric) partial->values[d] += partial->sum * parameter(values->static_zero, side, unit->head, d);
  }
  if (side->rotated) hadamard(partial->values);
}

/* Apply the softcap. Masked scores stay -inf. */
INLINE Vec capped(float softcap, Vec x) {
  if (!softcap) return x;
  Vec y = x / softcap, size = choose(y < 0, -y, y), shrunk = exp_vec(size * -2.0f);
  Vec tanh = (1.0f - shrunk) / (1.0f + shrunk);
  return choose(x < splat(-3e38f), x, choose(y < 0, -tanh, tanh) * softcap);
}

/* Online softmax: rescale to the new maximum, turn the page's scores into weights, and add their sum. */
static void weigh(const Layer *layer, const PageView *page, float bias, float *scores, Partial *partial, float *sums) {
  Ints lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  int begin = page->first / LANES * LANES;
  Vec highest = splat(-INFINITY), total = {0};
  for (int t = begin; t < page->last; t += LANES) {
    Vec x = capped(layer->softcap, load(scores + t) + bias);
    Ints counts = (lanes + t >= page->first) & (lanes + t < page->last);
    x = choose(counts, x, splat(-INFINITY)); /* mask the block's other tokens */
    highest = choose(x > highest, x, highest);
    store(scores + t, x);
  }
  float maximum = partial->maximum;
  for (int i = 0; i < LANES; i++) maximum = highest[i] > maximum ? highest[i] : maximum;
  if (maximum != partial->maximum) {
    float shrink = exp_vec(splat(partial->maximum - maximum))[0];
    partial->sum *= shrink;
    for (int d = 0; d < HEAD_DIM; d++) sums[d] *= shrink;
    partial->maximum = maximum;
  }
  for (int t = begin; t < page->last; t += LANES) {
    Vec p = exp_vec(load(scores + t) - maximum);
    store(scores + t, p);
    total += p;
  }
  for (int i = 0; i < LANES; i++) partial->sum += total[i];
}

/* A region of a sequence: block tables, stores, and its valid tokens [first, last), counted from the region's start. */
typedef struct {
  const Store *keys, *values;
  const int32_t *key_table, *value_table; /* NULL for exact copies: one block per row and head */
  int first, last;
  int gap; /* from this token to the end of its page, tokens are evicted; 0: none */
} Region;

enum { BEFORE, INSIDE, EXACT, REGIONS };

/* Return the first token that the layer attends to from a new token at position `length`. */
INLINE int first_token(const Layer *layer, int length) {
  return layer->sliding_window && length >= layer->sliding_window ? length + 1 - layer->sliding_window : 0;
}

INLINE int larger(int a, int b) { return a > b ? a : b; }

/* Return the part of a region that new token `step` attends to. Step 0 attends to the most cached tokens. */
static Region find_region(const Call *call, int row, int number, int step) {
  const Layer *layer = call->layer;
  int length = call->lengths[row], end = length - layer->recent;
  int start = layer->windowed ? call->window_starts[row] : end, low = larger(layer->sink, first_token(layer, length + step));
  Region region = {0};
  if (number == EXACT) {
    region.keys = &call->stores[EXACT_KEY], region.values = &call->stores[EXACT_VALUE];
    region.last = length > 0 ? layer->sink + layer->recent : 0;
  } else if (number == BEFORE) {
    region.keys = &call->stores[KEY], region.values = &call->stores[VALUE];
    region.key_table = region.value_table = call->page_table + (size_t)row * call->pages;
    region.first = low, region.last = end < start ? end : start;
    if (layer->gap_length && length >= layer->gap_length) region.gap = layer->gap;
  } else if (layer->windowed) {
    const int32_t *base = call->window_base_table + (size_t)row * call->window_pages;
    const int32_t *copy = call->window_table + (size_t)row * call->window_pages;
    int finer_keys = layer->sides[WINDOW_KEY].input >= 0, finer_values = layer->sides[WINDOW_VALUE].input >= 0;
    region.keys = &call->stores[finer_keys ? WINDOW_KEY : KEY], region.key_table = finer_keys ? copy : base;
    region.values = &call->stores[finer_values ? WINDOW_VALUE : VALUE], region.value_table = finer_values ? copy : base;
    region.first = larger(low - start, 0), region.last = end - start;
  }
  return region;
}

/* Return the end of a region's valid tokens in one of its pages, counted from the start of the page. */
INLINE int last_of_page(const Region *region, int page) {
  if (region->gap && page == region->gap / PAGE) return region->gap % PAGE;
  return region->last - page * PAGE < PAGE ? region->last - page * PAGE : PAGE;
}

/* Return whether new token `step` reads an exact slot. Recent slot i holds the newest cached token whose position modulo
 * `recent` is i. */
static int reads_exact_slot(const Layer *layer, int length, int slot, int step) {
  int low = first_token(layer, length + step);
  if (slot < layer->sink) return slot >= low && slot < length;
  int newest = length - 1, age = (newest - (slot - layer->sink)) % layer->recent;
  if (age < 0) age += layer->recent;
  return newest - age >= larger(layer->sink, low);
}

/* Return the codes of a page and KV head. */
INLINE const uint8_t *block(const Layer *layer, const Store *store, int32_t page, int head) {
  return store->codes + ((size_t)page * layer->kv_heads + head) * PAGE * row_bytes(store->side->kind);
}

/* Return the bytes of the scales, or of the zeros, of a page and KV head. */
INLINE size_t scale_page_bytes(const Side *side) { return (size_t)PAGE * side->groups * scale_bytes(side->kind); }

static void view_page(const Call *call, const Unit *unit, const Region *region, int page, PageView *view) {
  const Layer *layer = call->layer;
  const Store *keys = region->keys, *values = region->values;
  view->first = larger(region->first - page * PAGE, 0), view->last = last_of_page(region, page), view->rows = PAGE;
  if (!region->key_table) {
    int tokens = layer->sink + layer->recent;
    size_t row = ((size_t)call->exact_slots[unit->row] * layer->kv_heads + unit->head) * tokens + page * PAGE;
    view->keys = view->next_keys = keys->codes + row * row_bytes(FP16);
    view->values = view->next_values = values->codes + row * row_bytes(FP16);
    view->rows = tokens - page * PAGE < PAGE ? tokens - page * PAGE : PAGE;
    return;
  }
  int next = (page + 1) * PAGE < region->last ? page + 1 : page;
  view->keys = block(layer, keys, region->key_table[page], unit->head);
  view->values = block(layer, values, region->value_table[page], unit->head);
  view->next_keys = block(layer, keys, region->key_table[next], unit->head);
  view->next_values = block(layer, values, region->value_table[next], unit->head);
  size_t k = ((size_t)region->key_table[page] * layer->kv_heads + unit->head) * scale_page_bytes(keys->side);
  size_t v = ((size_t)region->value_table[page] * layer->kv_heads + unit->head) * scale_page_bytes(values->side);
  if (keys->side->groups) view->key_scales = keys->scales + k;
  if (keys->side->groups && keys->side->asymmetric) view->key_zeros = keys->zeros + k;
  if (values->side->groups) view->value_scales = values->scales + v;
  if (values->side->groups && values->side->asymmetric) view->value_zeros = values->zeros + v;
}

static void attend_unit(void *argument, size_t number) {
  const Call *call = argument;
  const Unit *unit = &call->units[number];
  Region region = find_region(call, unit->row, unit->region, 0);
  const Side *key_side = region.keys->side, *value_side = region.values->side;
  Partial *partials = call->partials + number * GROUP;
  float query[GROUP][HEAD_DIM], bias[GROUP], scores[GROUP][PAGE], sums[GROUP][HEAD_DIM] = {{0}};
  float scales[PAGE * MAX_GROUPS], zeros[PAGE * MAX_GROUPS];
  prepare(call, region.keys, unit, query, bias);
  for (int q = 0; q < GROUP; q++) partials[q].maximum = -INFINITY, partials[q].sum = 0;
  for (int page = unit->page; page < unit->page + unit->pages; page++) {
    PageView view = {0};
    view_page(call, unit, &region, page, &view);
    if (view.first >= view.last) continue;
    stored_floats(key_side->kind, view.key_scales, key_side->groups, scales);
    if (key_side->asymmetric) stored_floats(key_side->kind, view.key_zeros, key_side->groups, zeros);
    SCORES[key_side->kind][by_vector(key_side)](view.keys, &view, key_side->groups, scales, zeros, query, scores);
    if (!region.key_table) {
      int any = 0;
      for (int t = 0; t < view.last; t++) {
        int counts = reads_exact_slot(call->layer, call->lengths[unit->row], page * PAGE + t, 0);
        for (int q = 0; q < GROUP && !counts; q++) scores[q][t] = -INFINITY;
        any |= counts;
      }
      if (!any) continue;
    }
    stored_floats(value_side->kind, view.value_scales, value_side->groups, scales);
    if (value_side->asymmetric) stored_floats(value_side->kind, view.value_zeros, value_side->groups, zeros);
    for (int q = 0; q < GROUP; q++) {
      weigh(call->layer, &view, bias[q], scores[q], &partials[q], sums[q]);
      if (value_side->groups && !by_vector(value_side))
        for (int t = view.first; t < view.last; t++) scores[q][t] *= scales[t];
    }
    VALUES[value_side->kind][by_vector(value_side)](view.values, &view, value_side->groups, scales, zeros, scores, sums);
  }
  for (int q = 0; q < GROUP; q++) {
    memcpy(partials[q].values, sums[q], sizeof sums[q]);
    finish(region.values, unit, &partials[q]);
  }
}

/* ---- one call ---- */

/* Combine the partial results of one query (stride GROUP) with the new token, and normalize. */
static void join(const Partial *partials, int count, const Layer *layer, const float *sink, const float *query,
                 const float *key, const float *value, float *out) {
  float score = 0;
  for (int d = 0; d < HEAD_DIM; d++) score += query[d] * layer->scaling * key[d];
  score = capped(layer->softcap, splat(score))[0];
  float maximum = sink && *sink > score ? *sink : score;
  for (int i = 0; i < count; i++) maximum = partials[i * GROUP].maximum > maximum ? partials[i * GROUP].maximum : maximum;
  float weight = exp_vec(splat(score - maximum))[0], sum = weight;
  for (int d = 0; d < HEAD_DIM; d++) out[d] = weight * value[d];
  if (sink) sum += exp_vec(splat(*sink - maximum))[0];
  for (int i = 0; i < count; i++) {
    const Partial *partial = &partials[i * GROUP];
    weight = exp_vec(splat(partial->maximum - maximum))[0];
    sum += weight * partial->sum;
    for (int d = 0; d < HEAD_DIM; d++) out[d] += weight * partial->values[d];
  }
  for (int d = 0; d < HEAD_DIM; d++) out[d] /= sum;
}

/* List the units of up to `unit_pages` pages of all rows and heads, ordered by row and head. Return their number. */
static size_t list_units(const Call *call, int rows, int unit_pages, Unit *units) {
  size_t count = 0;
  for (int row = 0; row < rows; row++)
    for (int head = 0; head < call->layer->kv_heads; head++)
      for (int number = 0; number < REGIONS; number++) {
        Region region = find_region(call, row, number, 0);
        if (region.last <= region.first) continue;
        int end = (region.last + PAGE - 1) / PAGE;
        for (int page = region.first / PAGE; page < end; page += unit_pages, count++) {
          int pages = end - page < unit_pages ? end - page : unit_pages;
          if (units) units[count] = (Unit){row, head, number, page, pages};
        }
      }
  return count;
}
