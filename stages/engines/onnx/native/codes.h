/* Conversion of stored codes to vectors of floats that fill a register.
 *
 * The code uses the vector extensions of GCC and Clang, and intrinsics only where one instruction replaces several. A row is
 * the codes of one token of one KV head. */
#ifndef KVGATE_CODES_H
#define KVGATE_CODES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=channels of a head, a multiple of 16, and -DGROUP=query heads of a KV head"
#endif

/* Lanes of a vector, and the number of vectors of sums that stay in registers. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define AVX512
enum { LANES = 16, SUMS = 16 };
#elif defined(__AVX2__) && defined(__F16C__)
enum { LANES = 8, SUMS = 8 };
#else
#error "the kernel is written for processors with AVX-512 or AVX2"
#endif
enum { VECTORS = HEAD_DIM / LANES };

#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

/* Numbers of `native=` in stages/policies/table.py. INT8U and INT4U are asymmetric: their codes start at 0. */
enum { FP16, BF16, E4M3, E5M2, INT8, INT8U, INT4, INT4U, NVFP4, KINDS };

INLINE Vec splat(float x) { return x - (Vec){0}; }

INLINE Vec choose(Ints mask, Vec yes, Vec no) { return (Vec)((mask & (Ints)yes) | (~mask & (Ints)no)); }

INLINE Vec load(const float *p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store(float *p, Vec x) { memcpy(p, &x, sizeof x); }

/* Load LANES bytes or 16-bit numbers from any address and widen them; convert float16 to float32 and back. Subnormal float16
 * numbers stay exact, even if the processor flushes subnormal floats. */
#if defined(AVX512)
INLINE Ints ints_from_bytes(const void *p) { return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
INLINE Ints ints_from_ubytes(const void *p) { return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE Ints ints_from_uhalves(const void *p) { return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
INLINE Vec from_half(const void *p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE void to_half(void *p, Vec x) { _mm256_storeu_si256(p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); }
/* seeeemmm, sign-extended and shifted by 7, is s s eeee mmm 0000000. The mask clears the second s, which leaves a float16
 * whose exponent is 8 too low. */
INLINE Vec from_e4m3(const void *p) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
  return (Vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBFFF)));
}
INLINE Vec from_e5m2(const void *p) {
  return (Vec)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 8));
}
#else
INLINE Ints ints_from_bytes(const void *p) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
INLINE Ints ints_from_ubytes(const void *p) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
INLINE Ints ints_from_uhalves(const void *p) { return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(p)); }
INLINE Vec from_half(const void *p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE void to_half(void *p, Vec x) { _mm_storeu_si128(p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)); }
INLINE Vec from_e4m3(const void *p) {
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(p));
  return (Vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xBFFF)));
}
INLINE Vec from_e5m2(const void *p) { return (Vec)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 8)); }
#endif

/* Return the bytes of the codes of one token and KV head. */
INLINE int row_bytes(int kind) {
  return kind == FP16 || kind == BF16 ? 2 * HEAD_DIM : kind == INT4 || kind == INT4U || kind == NVFP4 ? HEAD_DIM / 2 : HEAD_DIM;
}

/* Return the bytes of a scale per token: float16, or E4M3 for NVFP4. */
INLINE int scale_bytes(int kind) { return kind == NVFP4 ? 1 : 2; }

/* Return the factor of a widened code (NVFP4: of its widened block scale). */
INLINE float unit(int kind) { return kind == E4M3 || kind == NVFP4 ? 256.0f : 1.0f; }

/* Return vector v of a row's channels, to be multiplied by `unit`. `kind` and `v` are compile-time constants.
 *
 * The pool has no NaN or infinite codes, because the engine refuses a step with keys or values that are not finite. */
INLINE Vec widen(int kind, const uint8_t *row, int v) {
  if (kind == FP16) return from_half(row + 2 * LANES * v);
  if (kind == BF16) return (Vec)(ints_from_uhalves(row + 2 * LANES * v) << 16);
  if (kind == E4M3) return from_e4m3(row + LANES * v);
  if (kind == E5M2) return from_e5m2(row + LANES * v);
  if (kind == INT8) return __builtin_convertvector(ints_from_bytes(row + LANES * v), Vec);
  if (kind == INT8U) return __builtin_convertvector(ints_from_ubytes(row + LANES * v) ^ 0x80, Vec);
  /* The low four bits of byte i hold channel i, the high four bits channel D / 2 + i. */
  int high = v >= VECTORS / 2;
  Ints bits = ints_from_ubytes(row + LANES * (high ? v - VECTORS / 2 : v)) >> (high ? 4 : 0);
  if (kind == NVFP4) {
#if defined(AVX512)
    const Vec e2m1 = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (Vec)_mm512_permutexvar_ps((__m512i)bits, (__m512)e2m1);
#else
    const Vec e2m1 = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}; /* indexed by the low three bits; the fourth is the sign */
    return (Vec)((Ints)_mm256_permutevar8x32_ps((__m256)e2m1, (__m256i)bits) ^ ((bits & 8) << 28));
#endif
  }
  /* Integers: the low four bits are offset by 8, the high four bits are signed. */
#if defined(AVX512)
  /* One look-up replaces mask, subtraction and conversion: it ignores the high bits of an index. */
  const Vec low = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec signs = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  Vec table = (high ? signs : low) - (kind == INT4 ? 8.0f : 0.0f);
  return (Vec)_mm512_permutexvar_ps((__m512i)bits, (__m512)table);
#else
  return __builtin_convertvector(((bits & 15) ^ (high ? 8 : 0)) - (kind == INT4 ? 8 : 0), Vec);
#endif
}

/* Return exp(x) for x <= 0, within 2 units in the last place. Below -87 it is 0; NaN stays NaN. */
INLINE Vec exp_vec(Vec x) {
  const float shift = 12582912.0f; /* 1.5 * 2**23: adding it rounds to an integer */
  Ints tiny = x < splat(-87.0f);
  Vec n = (x * 1.44269504f + shift) - shift;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Vec)((Ints)(p * (Vec)power) & ~tiny);
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
#define L LANES

/* Sum the lanes of each of LANES vectors into one vector of LANES sums, in two steps: `quarter` folds the vectors of tokens
 * 4 j + i (j < LANES / 4) into quarter i, and `fold_quarters` folds the four quarters into one vector. */
INLINE Vec quarter(const Vec *sums) {
#if defined(AVX512)
#define FOLD_256(a, b) \
  (SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
   SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  Vec a = FOLD_256(sums[0], sums[1]), b = FOLD_256(sums[2], sums[3]);
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#else
  return SHUFFLE(sums[0], sums[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(sums[0], sums[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

#if defined(AVX512)
#define IN_FOURS(a, b, c, d) \
  a, b, L + c, L + d, a + 4, b + 4, L + c + 4, L + d + 4, a + 8, b + 8, L + c + 8, L + d + 8, a + 12, b + 12, L + c + 12, L + d + 12
#else
#define IN_FOURS(a, b, c, d) a, b, L + c, L + d, a + 4, b + 4, L + c + 4, L + d + 4
#endif
INLINE Vec fold_quarters(const Vec *quarters) {
  Vec a = SHUFFLE(quarters[0], quarters[1], IN_FOURS(0, 1, 0, 1)) + SHUFFLE(quarters[0], quarters[1], IN_FOURS(2, 3, 2, 3));
  Vec b = SHUFFLE(quarters[2], quarters[3], IN_FOURS(0, 1, 0, 1)) + SHUFFLE(quarters[2], quarters[3], IN_FOURS(2, 3, 2, 3));
  return SHUFFLE(a, b, IN_FOURS(0, 2, 0, 2)) + SHUFFLE(a, b, IN_FOURS(1, 3, 1, 3));
}

#endif
