// Vectors of floats as wide as the registers of the instruction set that this file is compiled for (AVX-512, AVX2, or
// any with four lanes). The type is the compilers' own: operators and `mask ? a : b` work lane by lane.
//
// Include this before the headers of csrc/common: their templates find the functions for Floats by plain lookup.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace bytesplat {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// 0, 1, 2, ... in the lanes.
inline Floats lane_numbers() {
    Floats numbers;
    for (int i = 0; i < LANES; ++i) numbers[i] = float(i);
    return numbers;
}

// One bit a lane: set where the mask, a comparison's result, is true.
inline uint32_t bits(Ints mask) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__) && defined(__FMA__)
    return uint32_t(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
    return uint32_t(_mm_movemask_ps((__m128)mask));
#else
    uint32_t result = 0;
    for (int i = 0; i < LANES; ++i) result |= uint32_t(mask[i] & 1) << i;
    return result;
#endif
}

// exp(-x) to 2e-7 of the result, for x > -80; from x = 11 on it stays at 2e-5, which the rasterizer skips as too faint.
// -x log2(e) is split into n + f, |f| <= 1/2: adding 1.5 * 2^23 rounds to the integer n and leaves it in the low bits,
// from where it is shifted into the exponent. 2^f is the polynomial of degree 5 of least relative error (9e-8).
inline Floats exp_minus(Floats x) {
    const Floats round = Floats{} + 12582912.0f, log2_e = Floats{} + 1.44269504f, limit = Floats{} + 11.0f;
    const Floats bounded = x < limit ? x : limit;
    const Floats shifted = fma(bounded, -log2_e, round);
    const Floats f = fma(bounded, -log2_e, round - shifted);
    Floats power = Floats{} + 0.00132647271f;
    power = fma(power, f, Floats{} + 0.00967151286f);
    power = fma(power, f, Floats{} + 0.0555073375f);
    power = fma(power, f, Floats{} + 0.240222421f);
    power = fma(power, f, Floats{} + 0.693146978f);
    power = fma(power, f, Floats{} + 1.0f);
    return (Floats)((Ints)power + ((Ints)shifted << 23));
}

// A butterfly of lane_sums: lanes with the STRIDE bit clear receive sums of pairs of a, the others of b.
template <int STRIDE> inline Floats merge(Floats a, Floats b) {
    Floats sum;
#if defined(__clang__)
    for (int i = 0; i < LANES; ++i) sum[i] = i & STRIDE ? b[i] + b[i ^ STRIDE] : a[i] + a[i ^ STRIDE];
#else
    Ints own, other;
    for (int i = 0; i < LANES; ++i) {
        own[i] = i & STRIDE ? LANES + i : i;
        other[i] = own[i] ^ STRIDE;
    }
    sum = __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
#endif
    return sum;
}

// Sums of LANES vectors at once: lane i of the result is the sum over the lanes of vectors[i], which are overwritten.
inline Floats lane_sums(Floats* vectors) {
    if constexpr (LANES > 8)
        for (int i = 0; i < 8; ++i) vectors[i] = merge<8>(vectors[i], vectors[i + 8]);
    if constexpr (LANES > 4)
        for (int i = 0; i < 4; ++i) vectors[i] = merge<4>(vectors[i], vectors[i + 4]);
    for (int i = 0; i < 2; ++i) vectors[i] = merge<2>(vectors[i], vectors[i + 2]);
    return merge<1>(vectors[0], vectors[1]);
}

inline float lane_max(Floats x) {
    float result = x[0];
    for (int i = 1; i < LANES; ++i) result = x[i] > result ? x[i] : result;
    return result;
}

}  // namespace bytesplat
