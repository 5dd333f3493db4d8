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

// BS_NATIVE(min) is the intrinsic of that name for a whole vector of floats.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define BS_NATIVE(operation) _mm512_##operation##_ps
constexpr int LANES = 16;
#elif defined(__AVX2__)
#define BS_NATIVE(operation) _mm256_##operation##_ps
constexpr int LANES = 8;
#else
#if defined(__SSE2__)
#define BS_NATIVE(operation) _mm_##operation##_ps
#endif
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

template <class T> inline T broadcast(float x);
template <> inline Floats broadcast<Floats>(float x) { return x - Floats{}; }

inline Floats load(const float* values) {
    Floats result;
    __builtin_memcpy(&result, values, sizeof(result));
    return result;
}

inline void store(Floats vector, float* values) { __builtin_memcpy(values, &vector, sizeof(vector)); }

// Where a is NaN the result is b.
inline Floats smaller(Floats a, Floats b) {
#if defined(BS_NATIVE)
    return BS_NATIVE(min)(a, b);
#else
    return a < b ? a : b;
#endif
}

inline Floats larger(Floats a, Floats b) {
#if defined(BS_NATIVE)
    return BS_NATIVE(max)(a, b);
#else
    return a > b ? a : b;
#endif
}

inline Floats sqrt(Floats x) {
#if defined(BS_NATIVE)
    return BS_NATIVE(sqrt)(x);
#else
    for (int i = 0; i < LANES; ++i) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

#if defined(BS_NATIVE) && defined(__FMA__)
inline Floats fma(Floats a, Floats b, Floats c) { return BS_NATIVE(fmadd)(a, b, c); }
#else
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }

// In double: without a fused operation the products would lose what makes the difference.
inline Floats difference_of_products(Floats a, Floats b, Floats c, Floats d) {
    for (int i = 0; i < LANES; ++i) a[i] = float(double(a[i]) * double(b[i]) - double(c[i]) * double(d[i]));
    return a;
}
#endif

inline Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// One bit a lane: set where the mask, a comparison's result, is true.
inline uint32_t bits(Ints mask) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(BS_NATIVE)
    return uint32_t(BS_NATIVE(movemask)((Floats)mask));
#else
    uint32_t result = 0;
    for (int i = 0; i < LANES; ++i) result |= uint32_t(mask[i] & 1) << i;
    return result;
#endif
}

// 2^(n + f) for |f| <= 1/2, given EXPONENT + n: that float has n in its low bits, from where it is shifted into the
// exponent. 2^f is the polynomial of degree 5 of least relative error, 9e-8.
constexpr float EXPONENT = 12582912.0f;  // 1.5 * 2^23
inline Floats exp2_split(Floats shifted, Floats f) {
    Floats power = broadcast<Floats>(0.00132647271f);
    power = fma(power, f, broadcast<Floats>(0.00967151286f));
    power = fma(power, f, broadcast<Floats>(0.0555073375f));
    power = fma(power, f, broadcast<Floats>(0.240222421f));
    power = fma(power, f, broadcast<Floats>(0.693146978f));
    power = fma(power, f, broadcast<Floats>(1.0f));
    return (Floats)((Ints)power + ((Ints)shifted << 23));
}

// exp(x) to 2e-7 of the result; beyond +-87 that of +-87. NaN stays NaN.
inline Floats exp(Floats x) {
    const Floats limit = broadcast<Floats>(87.0f), log2_e = broadcast<Floats>(1.44269502f);
    const Floats bounded = larger(-limit, smaller(limit, x));
    const Floats shifted = fma(bounded, log2_e, broadcast<Floats>(EXPONENT));
    const Floats f = fma(bounded, log2_e, EXPONENT - shifted);
    return exp2_split(shifted, fma(bounded, broadcast<Floats>(1.925963033e-8f), f));
}

// exp(-x) as the rasterizer needs it, to 2e-7 of the result for -80 < x < 11; from there on 2e-5, too faint to count.
inline Floats exp_minus(Floats x) {
    const Floats log2_e = broadcast<Floats>(1.44269502f), bounded = smaller(x, broadcast<Floats>(11.0f));
    const Floats shifted = fma(bounded, -log2_e, broadcast<Floats>(EXPONENT));
    return exp2_split(shifted, fma(bounded, -log2_e, EXPONENT - shifted));
}

// A number above ln(x), by at most 0.0015, for positive x: exponent ln(2), and for the mantissa a cubic.
inline Floats log_bound(Floats x) {
    const Ints exponent = ((Ints)x >> 23) - 127;
    const Floats mantissa = (Floats)((Ints)x - (exponent << 23));  // 1 to 2
    Floats cubic = broadcast<Floats>(0.109688f);
    cubic = fma(cubic, mantissa, broadcast<Floats>(-0.729090f));
    cubic = fma(cubic, mantissa, broadcast<Floats>(2.112603f));
    cubic = fma(cubic, mantissa, broadcast<Floats>(-1.491958f));
    return fma(__builtin_convertvector(exponent, Floats), broadcast<Floats>(0.693147182f), cubic);
}

// Lane i of a and b by index: lanes LANES and above are those of b.
inline Floats shuffle(Floats a, Floats b, Ints index) {
#if defined(__clang__)
    Floats result;
    for (int i = 0; i < LANES; ++i) result[i] = index[i] < LANES ? a[index[i]] : b[index[i] - LANES];
    return result;
#else
    return __builtin_shuffle(a, b, index);
#endif
}

// A step of the butterflies below: lanes with the STRIDE bit clear get sums of two lanes of a, the others of b.
template <int STRIDE> inline Floats merge(Floats a, Floats b) {
    Ints own, other;
    for (int i = 0; i < LANES; ++i) {
        own[i] = i & STRIDE ? LANES + i : i;
        other[i] = own[i] ^ STRIDE;
    }
    return shuffle(a, b, own) + shuffle(a, b, other);
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

// The largest of each pair of lanes STRIDE apart, in both of them.
template <int STRIDE> inline Floats pair_max(Floats x) {
    Ints other;
    for (int i = 0; i < LANES; ++i) other[i] = i ^ STRIDE;
    return larger(x, shuffle(x, x, other));
}

inline float lane_max(Floats x) {
    if constexpr (LANES > 8) x = pair_max<8>(x);
    if constexpr (LANES > 4) x = pair_max<4>(x);
    return pair_max<1>(pair_max<2>(x))[0];
}

}  // namespace bytesplat
