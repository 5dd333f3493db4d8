// Real spherical harmonics of degree 0 to 3 as polynomials of a unit direction (Sloan 2013, "Efficient Spherical Harmonic
// Evaluation"), signs as in 3D Gaussian Splatting. Functions above `degree` are not evaluated.
#pragma once
#include "platform.h"

namespace bytesplat {

constexpr int SH_DEGREE_MAX = 3;
constexpr int SH_FUNCTIONS_MAX = (SH_DEGREE_MAX + 1) * (SH_DEGREE_MAX + 1);

BS_HD inline constexpr int sh_functions(int degree) { return (degree + 1) * (degree + 1); }

// Normalisation: sqrt of the rational under it over pi.
constexpr float SH_0 = 0.28209479177387814f;   // 1/4
constexpr float SH_1 = 0.48860251190291992f;   // 3/4
constexpr float SH_2A = 1.0925484305920792f;   // 15/4
constexpr float SH_2B = 0.31539156525252005f;  // 5/16
constexpr float SH_2C = 0.54627421529603959f;  // 15/16
constexpr float SH_3A = 0.59004358992664352f;  // 35/32
constexpr float SH_3B = 2.8906114426405538f;   // 105/4
constexpr float SH_3C = 0.45704579946446572f;  // 21/32
constexpr float SH_3D = 0.37317633259011546f;  // 7/16
constexpr float SH_3E = 1.4453057213202769f;   // 105/16

// basis[k] = Y_k(x, y, z) for k < (degree + 1)^2.
template <class T> BS_HD inline void sh_basis(int degree, T x, T y, T z, T* basis) {
    basis[0] = broadcast<T>(SH_0);
    if (degree < 1) return;
    basis[1] = -SH_1 * y;
    basis[2] = SH_1 * z;
    basis[3] = -SH_1 * x;
    if (degree < 2) return;
    const T xx = x * x, yy = y * y, zz = z * z;
    basis[4] = SH_2A * x * y;
    basis[5] = -SH_2A * y * z;
    basis[6] = SH_2B * (3.0f * zz - 1.0f);
    basis[7] = -SH_2A * x * z;
    basis[8] = SH_2C * (xx - yy);
    if (degree < 3) return;
    basis[9] = -SH_3A * y * (3.0f * xx - yy);
    basis[10] = SH_3B * x * y * z;
    basis[11] = -SH_3C * y * (5.0f * zz - 1.0f);
    basis[12] = SH_3D * z * (5.0f * zz - 3.0f);
    basis[13] = -SH_3C * x * (5.0f * zz - 1.0f);
    basis[14] = SH_3E * z * (xx - yy);
    basis[15] = -SH_3A * x * (xx - 3.0f * yy);
}

// Gradient with respect to (x, y, z) of sum_k weights[k] Y_k(x, y, z), the polynomials taken as functions on all of space
// (the part along the direction itself vanishes when the direction is normalised).
template <class T> BS_HD inline void sh_direction_gradient(int degree, T x, T y, T z, const T* weights, T gradient[3]) {
    gradient[0] = gradient[1] = gradient[2] = T{};
    if (degree < 1) return;
    const T* w = weights;
    gradient[0] -= SH_1 * w[3];
    gradient[1] -= SH_1 * w[1];
    gradient[2] += SH_1 * w[2];
    if (degree < 2) return;
    gradient[0] += SH_2A * (y * w[4] - z * w[7]) + 2.0f * SH_2C * x * w[8];
    gradient[1] += SH_2A * (x * w[4] - z * w[5]) - 2.0f * SH_2C * y * w[8];
    gradient[2] += 6.0f * SH_2B * z * w[6] - SH_2A * (y * w[5] + x * w[7]);
    if (degree < 3) return;
    const T xx = x * x, yy = y * y, zz = z * z;
    const T xy = x * y, yz = y * z, xz = x * z;
    gradient[0] += -6.0f * SH_3A * xy * w[9] + SH_3B * yz * w[10] - SH_3C * (5.0f * zz - 1.0f) * w[13] +
                   2.0f * SH_3E * xz * w[14] - 3.0f * SH_3A * (xx - yy) * w[15];
    gradient[1] += -3.0f * SH_3A * (xx - yy) * w[9] + SH_3B * xz * w[10] - SH_3C * (5.0f * zz - 1.0f) * w[11] -
                   2.0f * SH_3E * yz * w[14] + 6.0f * SH_3A * xy * w[15];
    gradient[2] += SH_3B * xy * w[10] - 10.0f * SH_3C * z * (y * w[11] + x * w[13]) +
                   3.0f * SH_3D * (5.0f * zz - 1.0f) * w[12] + SH_3E * (xx - yy) * w[14];
}

}  // namespace bytesplat
