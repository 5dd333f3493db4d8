// What g++ and clang (CPU) and NVRTC (GPU) call differently, and the few scalar helpers the standard lacks on one of
// them. All headers of this folder are plain C++17 without standard headers, so that both kinds compile the same text.
#pragma once

#if defined(__CUDACC__)
#define BS_HD __host__ __device__
#else
#include <cmath>
#define BS_HD
#endif

namespace bytesplat {

#if !defined(__CUDACC__)
using std::ceil;
using std::exp;
using std::floor;
using std::fma;
using std::log;
using std::sqrt;
#endif

// The templates of this folder take T = float on the GPU, T = double in tests against finite differences, and a SIMD
// vector of floats in the CPU's rasterizer. So they use only operators, T{} for zero, float literals that are exact or
// rounded alike in both directions, and `condition ? a : b`, which a vector evaluates lane by lane.
template <class T> BS_HD inline T broadcast(float x) { return x - T{}; }
template <class T> BS_HD inline T smaller(T a, T b) { return a < b ? a : b; }
template <class T> BS_HD inline T larger(T a, T b) { return a > b ? a : b; }
template <class T> BS_HD inline T clamp(T x, T low, T high) { return smaller(larger(x, low), high); }
template <class T> BS_HD inline bool is_finite(T x) { return x - x == T{}; }

// a b - c d to within two rounding errors of the result, however much cancels (Kahan; Jeannerod et al. 2013).
template <class T> BS_HD inline T difference_of_products(T a, T b, T c, T d) {
    const T cd = c * d;
    const T rounding = fma(-c, d, cd);
    return fma(a, b, -cd) + rounding;
}

}  // namespace bytesplat
