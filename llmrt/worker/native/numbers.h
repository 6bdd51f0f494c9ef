/* bfloat16 in memory, float32 in registers: the conversions, and vectors of sixteen numbers. The
 * compiler splits these where the processor has shorter ones. */

#ifndef LLMRT_NUMBERS_H
#define LLMRT_NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef uint16_t bf16;

/* Six rows times four vectors: so many sums fill the registers of AVX-512. */
enum { ROWS_TOGETHER = 6 };

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(x == x ? rounded : 0x7fc0);
}

/* e^x = 2^n e^r: n whole, by the exponent bits; e^r for |r| <= ln(2) / 2 by a polynomial (Cephes,
 * expf), right to 2 units in the last place. */
#define LOG2_E 1.44269504f
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define LOWEST_EXPONENT -87.0f
#define EXP_POLYNOMIAL(r)                                                       \
    ((((((1.9875691500e-4f * (r) + 1.3981999507e-3f) * (r) + 8.3334519073e-3f) * \
            (r) + 4.1665795894e-2f) * (r) + 1.6666665459e-1f) * (r) +           \
      5.0000001201e-1f) * (r) * (r) + (r) + 1.0f)

/* Written so that loops over it become vectors. */
static inline float exp_of(float x) {
    x = LOWEST_EXPONENT > x ? LOWEST_EXPONENT : x; /* in this order NaN stays NaN */
    x = 89.0f < x ? 89.0f : x;                     /* becomes infinity */
    const float n = rintf(x * LOG2_E);
    const float r = x - n * LN2_HIGH - n * LN2_LOW;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x <= LOWEST_EXPONENT ? 0 : EXP_POLYNOMIAL(r) * power;
}

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

static const i32x16 FIRST_SIXTEEN = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline f32x16 load16(const bf16 *x) {
    u16x16 halves;
    memcpy(&halves, x, sizeof halves);
    return (f32x16)(__builtin_convertvector(halves, u32x16) << 16);
}

static inline void store16(bf16 *x, f32x16 numbers) {
#ifdef __AVX512BF16__
    const __m256bh halves = _mm512_cvtneps_pbh(numbers);
    memcpy(x, &halves, sizeof halves);
#else
    for (int i = 0; i < 16; i++) x[i] = narrow(numbers[i]);
#endif
}

static inline f32x16 larger16(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return _mm512_max_ps(a, b);
#else
    for (int i = 0; i < 16; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
#endif
}

/* e^x for numbers that are not above 0, and 0 for the lowest. */
static inline f32x16 exp16(f32x16 x) {
    x = larger16((f32x16){0} + LOWEST_EXPONENT, x); /* in this order NaN stays NaN */
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const f32x16 n = (x * LOG2_E + to_integer) - to_integer;
    const f32x16 r = x - n * LN2_HIGH - n * LN2_LOW;
    const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
    const i32x16 is_above = ~(x <= LOWEST_EXPONENT);
    return (f32x16)((i32x16)(EXP_POLYNOMIAL(r) * (f32x16)power) & is_above);
}

static inline float largest_of(f32x16 x) {
    x = larger16(x, __builtin_shuffle(x, FIRST_SIXTEEN ^ 8));
    x = larger16(x, __builtin_shuffle(x, FIRST_SIXTEEN ^ 4));
    x = larger16(x, __builtin_shuffle(x, FIRST_SIXTEEN ^ 2));
    x = larger16(x, __builtin_shuffle(x, FIRST_SIXTEEN ^ 1));
    return x[0];
}

/* sums += the products of two pairs of bf16 each. */
static inline f32x16 add_pairs(f32x16 sums, u32x16 a, u32x16 b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
    const u32x16 high = (u32x16){0} + 0xffff0000u;
    return sums + (f32x16)(a << 16) * (f32x16)(b << 16) + (f32x16)(a & high) * (f32x16)(b & high);
#endif
}

#endif
