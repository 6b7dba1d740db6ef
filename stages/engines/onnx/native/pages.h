/* Attention over one page of codes: scores of a KV head's queries, and weighted sums of its values. */
#include "codes.h"

enum { PAGE = 64 };

/* Number of queries whose sums stay in registers, so that each row is widened once for all of them. */
enum { BLOCK = GROUP * VECTORS <= (int)SUMS ? GROUP : VECTORS < (int)SUMS ? (int)SUMS / VECTORS : 1 };

/* Pointers to a page's codes and scales, and its valid tokens [first, last). */
typedef struct {
  const uint8_t *keys, *values, *key_scales, *key_zeros, *value_scales, *value_zeros;
  int first, last, rows;
  const uint8_t *next_keys, *next_values; /* codes of the unit's next page, to prefetch */
} PageView;

/* Convert the scales or zeros of a page (PAGE, groups) to floats, to be multiplied by `unit`. */
INLINE void stored_floats(int kind, const uint8_t *from, int groups, float *to) {
  for (int i = 0; i < PAGE * groups; i += LANES) store(to + i, kind == NVFP4 ? from_e4m3(from + i) : from_half(from + 2 * i));
}

/* How stored scales apply: per row (or not at all), per vector, or per vector with a zero point. */
enum { ROWS, SCALED, AFFINE };

INLINE Vec dequantized(int kind, int mode, const uint8_t *row, int v, const float *scales, const float *zeros, const int *group) {
  Vec x = widen(kind, row, v);
  if (mode == SCALED) x = x * scales[group[v]];
  if (mode == AFFINE) x = x * scales[group[v]] + zeros[group[v]];
  return x;
}

/* Prefetch a row of the next page. Pages are scattered, so the hardware cannot predict it. */
INLINE void fetch(const uint8_t *row, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

/* Compute scores (GROUP, PAGE) for tokens [first, last), rounded to blocks of LANES. `scales`, `zeros`: (PAGE, groups). */
INLINE void page_scores(int kind, int mode, int count, const uint8_t *codes, const PageView *page, int groups,
                        const float *scales, const float *zeros, const float (*query)[HEAD_DIM], float (*scores)[PAGE]) {
  int group[VECTORS];
  for (int v = 0; v < VECTORS; v++) group[v] = v * groups / VECTORS;
  for (int base = page->first / LANES * LANES; base < page->last; base += LANES) {
    Vec quarters[BLOCK][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      Vec sums[BLOCK][LANES / 4];
#pragma GCC unroll 4
      for (int j = 0; j < LANES / 4; j++) {
        int token = base + 4 * j + i;
        if (token >= page->rows) token = page->rows - 1; /* exact buffers may end within a block */
        const uint8_t *row = codes + (size_t)token * row_bytes(kind);
        const float *scale = scales + (size_t)token * groups, *zero = zeros + (size_t)token * groups;
        fetch(page->next_keys + (row - codes), row_bytes(kind));
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
          Vec x = dequantized(kind, mode, row, v, scale, zero, group);
#pragma GCC unroll 16
          for (int q = 0; q < count; q++) {
            Vec y = load(query[q] + LANES * v);
            sums[q][j] = v == 0 ? x * y : sums[q][j] + x * y;
          }
        }
      }
#pragma GCC unroll 16
      for (int q = 0; q < count; q++) quarters[q][i] = quarter(sums[q]);
    }
#pragma GCC unroll 16
    for (int q = 0; q < count; q++) {
      Vec total = fold_quarters(quarters[q]);
      store(scores[q] + base, mode == ROWS && groups ? total * load(scales + base) : total);
    }
  }
}

/* Add the page's values, weighted by (GROUP, PAGE), to sums (GROUP, HEAD_DIM). */
INLINE void page_values(int kind, int mode, int count, const uint8_t *codes, const PageView *page, int groups,
                        const float *scales, const float *zeros, const float (*weights)[PAGE], float (*sums)[HEAD_DIM]) {
  int group[VECTORS];
  for (int v = 0; v < VECTORS; v++) group[v] = v * groups / VECTORS;
  Vec total[BLOCK][VECTORS];
#pragma GCC unroll 16
  for (int q = 0; q < count; q++)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) total[q][v] = load(sums[q] + LANES * v);
  for (int token = page->first; token < page->last; token++) {
    const uint8_t *row = codes + (size_t)token * row_bytes(kind);
    const float *scale = scales + (size_t)token * groups, *zero = zeros + (size_t)token * groups;
    fetch(page->next_values + (row - codes), row_bytes(kind));
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) {
      Vec x = dequantized(kind, mode, row, v, scale, zero, group);
#pragma GCC unroll 16
      for (int q = 0; q < count; q++) total[q][v] = total[q][v] + x * weights[q][token];
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < count; q++)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) store(sums[q] + LANES * v, total[q][v]);
}

/* Run a page function for all queries of the group, in blocks whose sums fit in registers. The last block may be smaller. */
#define IN_BLOCKS(page_function, kind, mode, rows, out) \
  do { \
    int q = 0; \
    for (; q + BLOCK <= GROUP; q += BLOCK) \
      page_function(kind, mode, BLOCK, codes, page, groups, scales, zeros, rows + q, out + q); \
    if (GROUP % BLOCK) page_function(kind, mode, GROUP % BLOCK, codes, page, groups, scales, zeros, rows + q, out + q); \
  } while (0)

/* One function per kind of code and way of scaling, in tables indexed by the kind and by whether scales apply per row or per
 * vector. */
#define EACH_WAY(X) \
  X(FP16, ROWS) X(BF16, ROWS) X(E4M3, ROWS) X(E4M3, SCALED) X(E5M2, ROWS) X(E5M2, SCALED) X(INT8, ROWS) X(INT8, SCALED) \
  X(INT8U, ROWS) X(INT8U, AFFINE) X(INT4, ROWS) X(INT4, SCALED) X(INT4U, ROWS) X(INT4U, AFFINE) X(NVFP4, ROWS) X(NVFP4, SCALED)
#define INSTANCE(kind, mode) \
  static __attribute__((noinline)) void scores_##kind##_##mode(const uint8_t *codes, const PageView *page, int groups, \
      const float *scales, const float *zeros, const float (*query)[HEAD_DIM], float (*scores)[PAGE]) { \
    IN_BLOCKS(page_scores, kind, mode, query, scores); \
  } \
  static __attribute__((noinline)) void values_##kind##_##mode(const uint8_t *codes, const PageView *page, int groups, \
      const float *scales, const float *zeros, const float (*weights)[PAGE], float (*sums)[HEAD_DIM]) { \
    IN_BLOCKS(page_values, kind, mode, weights, sums); \
  }
EACH_WAY(INSTANCE)

#define SCORES_OF(kind, mode) [kind][mode != ROWS] = scores_##kind##_##mode,
#define VALUES_OF(kind, mode) [kind][mode != ROWS] = values_##kind##_##mode,
static void (*const SCORES[KINDS][2])(const uint8_t *, const PageView *, int, const float *, const float *,
                                      const float (*)[HEAD_DIM], float (*)[PAGE]) = {EACH_WAY(SCORES_OF)};
static void (*const VALUES[KINDS][2])(const uint8_t *, const PageView *, int, const float *, const float *,
                                      const float (*)[PAGE], float (*)[HEAD_DIM]) = {EACH_WAY(VALUES_OF)};
