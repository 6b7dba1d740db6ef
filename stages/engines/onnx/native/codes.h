/* Stored codes as vectors of 16 floats.
 *
 * Vectors are the compilers' own (GCC and Clang lower them to what the processor has); intrinsics are only where AVX-512 has
 * one instruction for what the generic form takes several for. A row is the codes of one token of one KV head. */
#ifndef KVGATE_CODES_H
#define KVGATE_CODES_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef HEAD_DIM
#error "compile with -DHEAD_DIM=channels of a head, a multiple of 16, and -DGROUP=query heads of a KV head"
#endif
#define LANES 16
#define VECTORS (HEAD_DIM / LANES)

#define INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef int16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t UHalves __attribute__((vector_size(32)));
typedef uint8_t UBytes __attribute__((vector_size(16)));

/* The order of KINDS in coverage.py. INT8U and INT4U are the asymmetric formats, whose codes start at 0. */
enum { FP16, BF16, E4M3, E5M2, INT8, INT8U, INT4, INT4U, KINDS };

INLINE Vec splat(float x) { return x - (Vec){0}; }

INLINE Vec choose(Ints mask, Vec yes, Vec no) { return (Vec)((mask & (Ints)yes) | (~mask & (Ints)no)); }

INLINE Vec load(const float *p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store(float *p, Vec x) { memcpy(p, &x, sizeof x); }

/* The bits of 16 float16 numbers as floats; subnormal numbers are exact, also where the processor flushes those of floats. */
INLINE Vec from_half(Halves bits) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  union { Halves bits; __m128i half[2]; } from = {bits};
  union { __m256 half[2]; Vec whole; } to = {{_mm256_cvtph_ps(from.half[0]), _mm256_cvtph_ps(from.half[1])}};
  return to.whole;
#else
  _Float16 numbers[LANES];
  float out[LANES];
  memcpy(numbers, &bits, sizeof numbers);
  for (int i = 0; i < LANES; i++) out[i] = numbers[i];
  return load(out);
#endif
}

INLINE Vec load_half(const uint16_t *p) {
  Halves bits;
  memcpy(&bits, p, sizeof bits);
  return from_half(bits);
}

INLINE float half_to_float(uint16_t bits) {
  Halves all = {(int16_t)bits};
  return from_half(all)[0];
}

/* 16 bytes or 16-bit numbers as 16 wider ones. GCC 12 splits __builtin_convertvector into halves and worse, hence the others. */
#if defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE Ints ints_from_bytes(const void *p) { return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
INLINE Ints ints_from_ubytes(const void *p) { return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE Ints ints_from_uhalves(const void *p) { return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
INLINE Halves halves_from_bytes(const void *p) { return (Halves)_mm256_cvtepi8_epi16(_mm_loadu_si128(p)); }
#else
#define CONVERTED(from, to) \
  from x; \
  memcpy(&x, p, sizeof x); \
  return __builtin_convertvector(x, to)
INLINE Ints ints_from_bytes(const void *p) { CONVERTED(Bytes, Ints); }
INLINE Ints ints_from_ubytes(const void *p) { CONVERTED(UBytes, Ints); }
INLINE Ints ints_from_uhalves(const void *p) { CONVERTED(UHalves, Ints); }
INLINE Halves halves_from_bytes(const void *p) { CONVERTED(Bytes, Halves); }
#endif

/* Bytes of one token of one KV head. */
INLINE int row_bytes(int kind) {
  return kind == FP16 || kind == BF16 ? 2 * HEAD_DIM : kind == INT4 || kind == INT4U ? HEAD_DIM / 2 : HEAD_DIM;
}

/* What a widened code must be multiplied by: E4M3 is read as the float16 of the same bits, whose exponents are 8 lower. */
INLINE float unit(int kind) { return kind == E4M3 ? 256.0f : 1.0f; }

/* Channels 16 v to 16 v + 15 of a row, as numbers in `unit`. `kind` and `v` are constants wherever it is inlined.
 *
 * No code of the pool is NaN or infinite: the engine refuses a step whose keys or values are not finite before it stores any. */
INLINE Vec widen(int kind, const uint8_t *row, int v) {
  if (kind == FP16) return load_half((const uint16_t *)(row + 32 * v));
  if (kind == BF16) return (Vec)(ints_from_uhalves(row + 32 * v) << 16);
  if (kind == E4M3 || kind == E5M2) {
    Halves wide = halves_from_bytes(row + LANES * v);
    /* seeeemmm sign-extended and shifted by 7 is s s eeee mmm 0000000: without the second s a float16. */
    return from_half(kind == E5M2 ? wide << 8 : (wide << 7) & (int16_t)0xBFFF);
  }
  if (kind == INT8) return __builtin_convertvector(ints_from_bytes(row + LANES * v), Vec);
  if (kind == INT8U) return __builtin_convertvector(ints_from_ubytes(row + LANES * v) ^ 0x80, Vec);
  /* The low four bits of byte i hold channel i plus 8, the high ones channel D / 2 + i, signed. */
  int high = v >= VECTORS / 2;
  Ints bits = ints_from_ubytes(row + LANES * (high ? v - VECTORS / 2 : v)) >> (high ? 4 : 0);
#if defined(__AVX512F__)
  /* One look-up in place of mask, subtraction and conversion: it takes the low four bits of every index. */
  const Vec low = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec signs = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
  Vec table = (high ? signs : low) - (kind == INT4 ? 8.0f : 0.0f);
  return (Vec)_mm512_permutexvar_ps((__m512i)bits, (__m512)table);
#else
  return __builtin_convertvector(((bits & 15) ^ (high ? 8 : 0)) - (kind == INT4 ? 8 : 0), Vec);
#endif
}

/* exp(x) for x <= 0 within 2 units in the last place; below -87 it is 0, and NaN stays NaN. */
INLINE Vec exp_vec(Vec x) {
  const float shift = 12582912.0f; /* 1.5 * 2**23: adding it rounds to a whole number */
  Ints tiny = x < -87.0f;
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

/* Halve two vectors into one: after 8, 4, 2 and 1 of them, lane 4 * j + i is the sum of the vector of token 4 * j + i. */
#define FOLD_256(a, b) \
  (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
   __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD_128(a, b) \
  (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
   __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD_64(a, b) \
  (__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
   __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define FOLD_32(a, b) \
  (__builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) + \
   __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31))

#endif
